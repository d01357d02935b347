"""PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), the usual objective.

    −min(r·A, clip(r, 1 − low, 1 + high)·A)        r = π / π_p of the token

*Clip-higher* is a `clip_high` above `clip_low` (DAPO, arXiv 2503.14476): it leaves unlikely tokens room to grow. *Dual
clip* bounds what a token of negative advantage can cost, at c·|A| (Ye et al. 2019, arXiv 1912.09729).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.clipping import clipped_surrogate, dual_clipped
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate
from treadle.algorithms.ratio import ratio
from treadle.config import key, key_of

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class ClipConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="clip")
    clip_low: float = key("the ratio is clipped below 1 - clip_low", default=0.2, gt=0, le=1)
    clip_high: float = key("the ratio is clipped above 1 + clip_high", default=0.2, gt=0, le=1e3)
    dual_clip: float | None = key("a token of negative advantage costs at most this × |A|", default=None, ge=1, le=1e6)


class Clip(Objective):
    Config = ClipConfig
    config: ClipConfig

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        ratio_T, config = ratio(logprob_T, old_T), self.config
        term_T, cut_T = clipped_surrogate(ratio_T, batch.advantage_T, config.clip_low, config.clip_high)
        if config.dual_clip is not None:
            term_T, cut_T = dual_clipped(term_T, cut_T, ratio_T, batch.advantage_T, config.dual_clip)
        return Surrogate(term_T, cut_T)
