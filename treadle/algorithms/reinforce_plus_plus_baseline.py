"""REINFORCE++ with a group's mean as baseline (Hu et al. 2025, arXiv 2501.03262, "REINFORCE++-baseline").

    A = whiten over the batch of (R − mean of the group),   the KL, if any, in the loss with k2

The deviation is the batch's, not the group's: a prompt that is nearly always solved does not weigh more than another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.advantages import group_relative, whiten
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.kl import Estimator as KLEstimator
from treadle.algorithms.policy_gradient import Estimator, GroupConfig, PolicyGradientConfig
from treadle.config import key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class ReinforcePlusPlusBaselineConfig(GroupConfig):
    name: str = key_of(AlgorithmConfig, "name", default="reinforce_plus_plus_baseline")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")
    kl_estimator: KLEstimator = key_of(PolicyGradientConfig, "kl_estimator", default="k2")


class ReinforcePlusPlusBaseline(Estimator):
    Config = ReinforcePlusPlusBaselineConfig
    config: ReinforcePlusPlusBaselineConfig
    skips_no_signal = False
    across_groups = True
    on_shift = "same"
    on_scale = "same"

    def advantages(self, batch: Batch) -> Batch:
        advantage_N = group_relative(batch.reward_N, batch.group_N, batch.sample_N, "none")
        return batch.replace(advantage_T=whiten(advantage_N.float()[batch.row_T]))
