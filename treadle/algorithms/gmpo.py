"""GMPO: the geometric mean of an answer's ratios, clipped token by token (Zhao et al. 2025, arXiv 2507.20673).

    −exp(mean of x̃)·A,   x = log r of a token, x̃ = PPO's clip of x: min(x, high) where A > 0, max(x, −low) where A < 0

Unlike the arithmetic mean of GRPO, one outlier hardly moves it, so the bounds can be wide: e^±0.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import model_validator

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate, whole_sequences
from treadle.algorithms.ratio import SATURATION
from treadle.config import key, key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class GMPOConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="gmpo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-mean")
    clip_low: float = key("log-ratios of tokens are clipped below -clip_low, nats", default=0.4, gt=0, le=20)
    clip_high: float = key("log-ratios of tokens are clipped above clip_high, nats", default=0.4, gt=0, le=20)

    @model_validator(mode="after")
    def _gmpo_rules(self) -> GMPOConfig:
        whole_sequences(self, "gmpo", "use gspo with level=token")
        return self


class GMPO(Objective):
    Config = GMPOConfig
    config: GMPOConfig

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        advantage_T, x_T = batch.advantage_T, (logprob_T - old_T).clamp(-SATURATION, SATURATION)
        low, high = -self.config.clip_low, self.config.clip_high
        cut_T = ((advantage_T > 0) & (x_T > high)) | ((advantage_T < 0) & (x_T < low))
        held_T = x_T.where(~cut_T, x_T.detach().clamp(low, high))
        mean_N = batch.sum_N(held_T) / batch.length_N.clamp(min=1)
        return Surrogate(-mean_N.exp()[batch.row_T] * advantage_T, cut_T)
