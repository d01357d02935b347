"""DRO: direct reward optimisation, a square in place of a trust region (Richemond et al. 2024, arXiv 2405.19107; in the
form of Kimi k1.5, arXiv 2501.12599).

    −A·log π + β/2·(log π − log π_p)²

Its gradient is −(A − β·log r)·∇ log π: each token is pushed until its log-ratio is A / β, and pulled back beyond,
whoever sampled it. `level=sequence` is the papers' form, with the log-probs of whole answers; `token` bounds each
token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.kl import FAR
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate, whole_sequences
from treadle.config import key, key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class DROConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="dro")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-sum")
    level: Literal["sequence", "token"] = key("whose log-ratio is squared", default="sequence")
    beta: float = key("β: how strongly a log-ratio is held back", default=0.1, gt=0, le=1e3)

    @model_validator(mode="after")
    def _dro_rules(self) -> DROConfig:
        if self.level == "sequence":
            whole_sequences(self, "dro with level=sequence", "set level=token")
        return self


class DRO(Objective):
    Config = DROConfig
    config: DROConfig
    skips_no_signal = False  # a moved answer is pulled back, whatever it earned

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        moved_T = (logprob_T - old_T).clamp(-FAR, FAR)
        if self.config.level == "sequence":  # (Σ x)² in equal parts at the answer's tokens
            sum_N = batch.sum_N(moved_T)
            square_T = (sum_N.square() / batch.length_N.clamp(min=1))[batch.row_T]
        else:
            square_T = moved_T.square()
        term_T = -batch.advantage_T * logprob_T + self.config.beta / 2 * square_T
        return Surrogate(term_T)
