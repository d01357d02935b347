"""CISPO: the importance weight is clipped, not the token (MiniMax-M1, Chen et al. 2025, arXiv 2506.13585).

    −sg(clip(r, 1 − low, 1 + high))·A·log π

PPO's clip takes the gradient of rare, decisive tokens ("wait", "however") after the first update; here every token
keeps one, of bounded weight. The paper sets no lower bound (`clip_low=1`) and tunes the upper one; ScaleRL (Khatri et
al. 2025, arXiv 2510.13786) finds weights up to 4 to 8 alike.
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


class CISPOConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="cispo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")
    clip_low: float = key("weights are at least 1 - clip_low", default=1.0, gt=0, le=1)
    clip_high: float = key("weights are at most 1 + clip_high", default=4.0, gt=0, le=1e3)


class CISPO(Objective):
    Config = CISPOConfig
    config: CISPOConfig

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        ratio_T = ratio(logprob_T, old_T).detach()
        held_T = ratio_T.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        return Surrogate(-held_T * batch.advantage_T * logprob_T, held_T != ratio_T)
