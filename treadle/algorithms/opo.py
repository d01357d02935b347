"""OPO: the baseline of least variance, answers weighted by their lengths (Hao et al. 2025, arXiv 2505.23585).

    A = R − Σ L·R / Σ L over the group

If an answer's gradient grows in norm with the square root of its length L, this baseline has the least variance. The
paper trains strictly on-policy, by whole answers (loss Σ / N). L counts trained tokens, those of all trajectories of a
sample together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.advantages import samples, weighted_baseline
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Estimator, GroupConfig
from treadle.config import key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class OPOConfig(GroupConfig):
    name: str = key_of(AlgorithmConfig, "name", default="opo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-sum")


class OPO(Estimator):
    Config = OPOConfig
    config: OPOConfig
    zero_on_equal_group = True
    on_shift = "same"
    on_scale = "linear"

    def advantages(self, batch: Batch) -> Batch:
        found = samples(batch)
        advantage_N = weighted_baseline(found, found.sum_S(batch.trained_N.double()))
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])
