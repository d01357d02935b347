"""Dr. GRPO: GRPO without its two biases (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783).

    A = R − mean of the group,   loss Σ / (N·L) with a constant L

Nothing is divided by the group's deviation, which favours prompts that are nearly always or nearly never solved, nor by
an answer's own length, which makes long wrong answers cheap. Set `constant_length` near the token limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.advantages import group_relative
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Estimator, GroupConfig
from treadle.config import key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class DrGRPOConfig(GroupConfig):
    name: str = key_of(AlgorithmConfig, "name", default="dr_grpo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="constant")


class DrGRPO(Estimator):
    Config = DrGRPOConfig
    config: DrGRPOConfig
    zero_on_equal_group = True
    on_shift = "same"
    on_scale = "linear"

    def advantages(self, batch: Batch) -> Batch:
        advantage_N = group_relative(batch.reward_N, batch.group_N, batch.sample_N, "none")
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])
