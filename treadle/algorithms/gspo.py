"""GSPO: one ratio for a whole answer (Zheng et al. 2025, arXiv 2507.18071).

    s = (π(answer) / π_p(answer))^(1 / length),   −min(s·A, clip(s, 1 − low, 1 + high)·A)

s is the geometric mean of the tokens' ratios, so the bounds are hundreds of times narrower than PPO's. `level=token` is
GSPO-token: the same ratio and clip, the gradient by token, for advantages that differ within an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.clipping import clipped_surrogate
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate, whole_sequences
from treadle.algorithms.ratio import ratio, sequence_ratio
from treadle.config import key, key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class GSPOConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="gspo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-mean")
    level: Literal["sequence", "token"] = key("whether tokens have advantages of their own", default="sequence")
    clip_low: float = key("the ratio is clipped below 1 - clip_low", default=3e-4, gt=0, le=1)
    clip_high: float = key("the ratio is clipped above 1 + clip_high", default=4e-4, gt=0, le=1e3)

    @model_validator(mode="after")
    def _gspo_rules(self) -> GSPOConfig:
        if self.level == "sequence":
            whole_sequences(self, "gspo with level=sequence", "set level=token")
        return self


class GSPO(Objective):
    Config = GSPOConfig
    config: GSPOConfig

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        ratio_T = sequence_ratio(batch, logprob_T, old_T)
        if self.config.level == "token":
            ratio_T = ratio_T.detach() * ratio(logprob_T, logprob_T.detach())
        term_T, cut_T = clipped_surrogate(ratio_T, batch.advantage_T, self.config.clip_low, self.config.clip_high)
        return Surrogate(term_T, cut_T)
