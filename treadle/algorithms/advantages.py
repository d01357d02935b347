"""Baselines from the group, and scaling. Pure functions.

Suffixes: N trajectories · S samples · G groups · T trained tokens. Groups and samples are found by identity: their
rows may lie anywhere, in any number. A baseline counts each sample once, however many trajectories it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch

Scale = Literal["std", "none"]

EPSILON = 1e-6
"""Added to a standard deviation, so that the rounding of nearly equal numbers does not become an advantage of ±1."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples behind some rows, each counted once."""

    reward_S: Tensor  # float64
    group_S: Tensor  # numbered from 0
    of_N: Tensor  # the sample that each row belongs to

    @classmethod
    def of(cls, reward_N: Tensor, group_N: Tensor, sample_N: Tensor) -> Samples:
        import torch

        known_S, of_N = sample_N.unique(return_inverse=True)
        row_N = torch.arange(len(sample_N), device=sample_N.device)
        # Rows of one sample share its reward and its group, so any of them can speak for it.
        row_S = row_N.new_zeros(len(known_S)).scatter(0, of_N, row_N)
        return cls(reward_N[row_S].double(), group_N[row_S].unique(return_inverse=True)[1], of_N)

    @property
    def count_G(self) -> Tensor:
        return self.group_S.bincount()

    def sum_G(self, value_S: Tensor) -> Tensor:
        return value_S.new_zeros(len(self.count_G)).index_add(0, self.group_S, value_S)

    def sum_S(self, value_N: Tensor) -> Tensor:
        """Of the rows of each sample."""
        return value_N.new_zeros(len(self.reward_S)).index_add(0, self.of_N, value_N)

    @property
    def equal_S(self) -> Tensor:
        """Samples of groups whose rewards are all equal, a group of one among them; bool."""
        zero_G = self.reward_S.new_zeros(len(self.count_G))
        highest_G = zero_G.scatter_reduce(0, self.group_S, self.reward_S, "amax", include_self=False)
        lowest_G = zero_G.scatter_reduce(0, self.group_S, self.reward_S, "amin", include_self=False)
        return (highest_G == lowest_G)[self.group_S]

    def unless_equal(self, advantage_S: Tensor) -> Tensor:
        """By row; exactly 0 in groups of equal rewards, by rule and not by arithmetic."""
        return advantage_S.masked_fill(self.equal_S, 0.0)[self.of_N]


def samples(batch: Batch) -> Samples:
    return Samples.of(batch.reward_N, batch.group_N, batch.sample_N)


def group_relative(reward_N: Tensor, group_N: Tensor, sample_N: Tensor, scale: Scale = "std") -> Tensor:
    """(reward − mean of the group) / (standard deviation of the group + ε), or without the division; float64 [N].

    The deviation is the unbiased one (n − 1). A group of equal rewards, a group of one among them, is exactly 0 by
    rule, not by arithmetic. `reward_N` may be any number earned per sample, e.g. one part of the reward.
    """
    s = Samples.of(reward_N, group_N, sample_N)
    centred_S = s.reward_S - (s.sum_G(s.reward_S) / s.count_G)[s.group_S]
    if scale == "std":
        variance_G = s.sum_G(centred_S.square()) / (s.count_G - 1).clamp(min=1)
        centred_S = centred_S / (variance_G.sqrt() + EPSILON)[s.group_S]
    return s.unless_equal(centred_S)


def leave_one_out(reward_N: Tensor, group_N: Tensor, sample_N: Tensor) -> Tensor:
    """reward − mean of the group's other samples; float64 [N]. A group of one, or of equal rewards, is exactly 0."""
    s = Samples.of(reward_N, group_N, sample_N)
    others_G = (s.count_G - 1).clamp(min=1)
    baseline_S = (s.sum_G(s.reward_S)[s.group_S] - s.reward_S) / others_G[s.group_S]
    return s.unless_equal(s.reward_S - baseline_S)


def weighted_baseline(s: Samples, weight_S: Tensor) -> Tensor:
    """reward − Σ(weight · reward) / Σ weight over the group; float64 [N]. Where all weights are 0, they count alike."""
    none_G = s.sum_G(weight_S) <= 0
    weight_S = weight_S.where(~none_G[s.group_S], 1.0)
    baseline_G = s.sum_G(weight_S * s.reward_S) / s.sum_G(weight_S)
    return s.unless_equal(s.reward_S - baseline_G[s.group_S])


def whiten(term_T: Tensor) -> Tensor:
    """To mean 0 and standard deviation 1 over all tokens; exactly 0 where all are equal, or there is only one."""
    if len(term_T) < 2 or bool(term_T.min() == term_T.max()):
        return term_T.new_zeros(len(term_T))
    wide_T = term_T.double()
    centred_T = wide_T - wide_T.mean()
    return (centred_T / (centred_T.std() + EPSILON)).to(term_T.dtype)
