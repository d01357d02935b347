"""Clipped objectives. Suffix T: trained tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped_surrogate(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's −min(r·A, clip(r, 1 − low, 1 + high)·A) (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

    Returns the terms, and a bool mask of the tokens whose gradient the clip has cut.
    """
    cut_T = ((advantage_T > 0) & (ratio_T > 1 + high)) | ((advantage_T < 0) & (ratio_T < 1 - low))
    held_T = ratio_T.where(~cut_T, ratio_T.detach().clamp(1 - low, 1 + high))
    return -held_T * advantage_T, cut_T


def dual_clipped(
    term_T: Tensor, cut_T: Tensor, ratio_T: Tensor, advantage_T: Tensor, most: float
) -> tuple[Tensor, Tensor]:
    """A clipped surrogate that costs at most `most`·|A| where A < 0 (Ye et al. 2019, arXiv 1912.09729)."""
    over_T = (advantage_T < 0) & (ratio_T > most)
    return term_T.where(~over_T, -most * advantage_T), cut_T | over_T


def clipped_value_error(value_T: Tensor, old_T: Tensor, return_T: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """½·max((V − R)², (clip(V, V_old ± clip) − R)²): the value may not profit from moving further than `clip`.

    Returns the terms, and a bool mask of the tokens whose gradient the clip has cut.
    """
    moved_T = value_T - old_T
    error_T = (value_T - return_T).square()
    near_error_T = (old_T + moved_T.detach().clamp(-clip, clip) - return_T).square()
    cut_T = (moved_T.abs() > clip) & (near_error_T > error_T)
    return near_error_T.where(cut_T, error_T) / 2, cut_T
