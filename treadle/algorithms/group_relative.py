"""GRPO's advantages: the answers to one prompt are each other's baseline (Shao et al. 2024, arXiv 2402.03300).

    A = (R − mean of the group) / (standard deviation of the group + ε)

Advantages belong to answers: a reward given turn by turn counts by its sum. The mean includes the answer itself, which
shrinks the expected gradient by (G − 1) / G; the deviation makes hard and easy prompts weigh alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.advantages import Scale, group_relative
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Estimator, GroupConfig
from treadle.config import key, key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class GroupRelativeConfig(GroupConfig):
    name: str = key_of(AlgorithmConfig, "name", default="group_relative")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-mean")
    scale: Scale = key("std: divide by the group's standard deviation; none: only centre", default="std")


class GroupRelative(Estimator):
    Config = GroupRelativeConfig
    config: GroupRelativeConfig
    zero_on_equal_group = True
    on_shift = "same"
    on_scale = "same"

    def __init__(self, config: AlgorithmConfig | None = None) -> None:
        super().__init__(config)
        if self.on_shift is not None and self.config.scale == "none":
            self.on_scale = "linear"

    def advantages(self, batch: Batch) -> Batch:
        advantage_N = group_relative(batch.reward_N, batch.group_N, batch.sample_N, self.config.scale)
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])
