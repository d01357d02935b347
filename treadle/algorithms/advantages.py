"""Baselines from the group, and scaling. Pure functions.

Suffixes: N trajectories · S samples · G groups · T trained tokens. Groups and samples are found by identity: their
rows may lie anywhere, in any number. A baseline counts each sample once, however many trajectories it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Scale = Literal["std", "none"]

EPSILON = 1e-6
"""Added to a standard deviation, so that the rounding of nearly equal numbers does not become an advantage of ±1."""


def group_relative(reward_N: Tensor, group_N: Tensor, sample_N: Tensor, scale: Scale = "std") -> Tensor:
    """(reward − mean of the group) / (standard deviation of the group + ε), or without the division; float64 [N].

    The deviation is the unbiased one (n − 1). A group of equal rewards, a group of one among them, is exactly 0 by
    rule, not by arithmetic. `reward_N` may be any number earned per sample, e.g. one part of the reward.
    """
    reward_S, group_S, sample_of_N = _samples(reward_N, group_N, sample_N)
    count_G = group_S.bincount()
    zero_G = reward_S.new_zeros(len(count_G))
    centred_S = reward_S - (zero_G.index_add(0, group_S, reward_S) / count_G)[group_S]
    if scale == "std":
        variance_G = zero_G.index_add(0, group_S, centred_S.square()) / (count_G - 1).clamp(min=1)
        centred_S = centred_S / (variance_G.sqrt() + EPSILON)[group_S]
    highest_G = zero_G.scatter_reduce(0, group_S, reward_S, "amax", include_self=False)
    lowest_G = zero_G.scatter_reduce(0, group_S, reward_S, "amin", include_self=False)
    return centred_S.masked_fill((highest_G == lowest_G)[group_S], 0.0)[sample_of_N]


def whiten(term_T: Tensor) -> Tensor:
    """To mean 0 and standard deviation 1 over all tokens; exactly 0 where all are equal, or there is only one."""
    if len(term_T) < 2 or bool(term_T.min() == term_T.max()):
        return term_T.new_zeros(len(term_T))
    wide_T = term_T.double()
    centred_T = wide_T - wide_T.mean()
    return (centred_T / (centred_T.std() + EPSILON)).to(term_T.dtype)


def _samples(reward_N: Tensor, group_N: Tensor, sample_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards by sample (float64), their groups numbered from 0, and the sample that each row belongs to."""
    import torch

    known_S, sample_of_N = sample_N.unique(return_inverse=True)
    row_N = torch.arange(len(sample_N), device=sample_N.device)
    # Rows of one sample share its reward and its group, so any of them can speak for it.
    row_S = row_N.new_zeros(len(known_S)).scatter(0, sample_of_N, row_N)
    return reward_N[row_S].double(), group_N[row_S].unique(return_inverse=True)[1], sample_of_N
