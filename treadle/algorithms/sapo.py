"""SAPO: a soft gate in place of a clip (Gao et al. 2025, "Soft adaptive policy optimization", arXiv 2511.20347).

    −f(r)·A,   f(r) = 4/τ · σ(τ·(r − 1)),   τ of positive or of negative advantages

f has slope 1 at r = 1 and flattens on both sides, so a token far from the old policy moves little instead of not at
all; negative advantages, whose gradients spread over the whole vocabulary, fade faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate
from treadle.algorithms.ratio import ratio
from treadle.config import key, key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class SAPOConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="sapo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-mean")
    temperature_positive: float = key("τ where the advantage is positive", default=1.0, gt=0, le=1e3)
    temperature_negative: float = key("τ where it is negative", default=1.05, gt=0, le=1e3)


class SAPO(Objective):
    Config = SAPOConfig
    config: SAPOConfig

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        positive_T = batch.advantage_T > 0
        steep_T = batch.advantage_T.new_full((), self.config.temperature_negative)
        steep_T = steep_T.where(~positive_T, self.config.temperature_positive)
        gate_T = (steep_T * (ratio(logprob_T, old_T) - 1)).sigmoid() * 4 / steep_T
        return Surrogate(-gate_T * batch.advantage_T)
