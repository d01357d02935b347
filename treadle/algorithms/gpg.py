"""GPG: the plain policy gradient with the group's mean as baseline (Chu et al. 2025, arXiv 2504.02546).

    A = α·(R − mean of the group),   α = groups / groups whose rewards differ

Groups that say nothing thin out the gradient, and α puts back what they took. No clip and no ratio: its objective is
`importance`, which at one optimizer step a batch is −A·log π.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.advantages import group_relative, samples
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Estimator, GroupConfig
from treadle.config import key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class GPGConfig(GroupConfig):
    name: str = key_of(AlgorithmConfig, "name", default="gpg")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")


class GPG(Estimator):
    Config = GPGConfig
    config: GPGConfig
    partner = "importance"
    zero_on_equal_group = True
    across_groups = True
    on_shift = "same"
    on_scale = "linear"

    def advantages(self, batch: Batch) -> Batch:
        found = samples(batch)
        groups, differ = len(found.count_G), len(found.group_S[~found.equal_S].unique())
        advantage_N = group_relative(batch.reward_N, batch.group_N, batch.sample_N, "none") * (groups / max(differ, 1))
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])
