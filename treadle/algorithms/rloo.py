"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, "Back to basics", arXiv 2402.14740; Kool et al.
2019).

    A = R − mean reward of the prompt's other answers,   loss Σ / N: the gradient of whole answers

The baseline does not look at the answer itself, so the gradient is unbiased. A failed or rejected answer is in no mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.advantages import leave_one_out
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Estimator, GroupConfig
from treadle.config import key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class RLOOConfig(GroupConfig):
    name: str = key_of(AlgorithmConfig, "name", default="rloo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-sum")


class RLOO(Estimator):
    Config = RLOOConfig
    config: RLOOConfig
    zero_on_equal_group = True
    on_shift = "same"
    on_scale = "linear"

    def advantages(self, batch: Batch) -> Batch:
        advantage_N = leave_one_out(batch.reward_N, batch.group_N, batch.sample_N)
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])
