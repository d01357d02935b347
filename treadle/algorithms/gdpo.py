"""GDPO: several rewards, each normalised apart (Liu et al. 2026, arXiv 2601.05242).

    A = whiten(Σ_parts weight · (R_part − mean of the group) / (deviation of the group + ε))

Normalising the sum, as GRPO does, gives different mixtures of parts the same advantage and lets the part with the
largest spread drown the others. Here each part of the reward (`Reward.parts`) is standardised in its group first, and
the sum over the whole batch. A sample without a part (its reward did not give it) is left out of that part. A reward
without parts is one part. A group of equal rewards is not exactly 0 once the batch's mean is taken off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import model_validator

from treadle.algorithms.advantages import group_relative, whiten
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Estimator, GroupConfig, uncharged
from treadle.config import key, key_of
from treadle.errors import TrainingError
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class GDPOConfig(GroupConfig):
    name: str = key_of(AlgorithmConfig, "name", default="gdpo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-mean")
    part_weights: dict[str, float] = key("weights of the reward's parts by name; 1 where not given", default={})

    @model_validator(mode="after")
    def _gdpo_rules(self) -> GDPOConfig:
        uncharged(self, "gdpo looks at the parts of a reward, not at their sum")
        return self


class GDPO(Estimator):
    Config = GDPOConfig
    config: GDPOConfig
    skips_no_signal = False
    across_groups = True

    def advantages(self, batch: Batch) -> Batch:
        parts = batch.reward_parts_N or {"reward": batch.reward_N}
        if unknown := sorted(set(self.config.part_weights) - set(parts)):
            raise TrainingError(
                f"algorithm.part_weights names {unknown}, and the reward's parts are {sorted(parts)}; correct the names"
            )
        advantage_N = batch.reward_N.new_zeros(len(batch))
        for name, part_N in parts.items():
            [given_M] = part_N.isfinite().nonzero(as_tuple=True)
            found_M = group_relative(part_N[given_M], batch.group_N[given_M], batch.sample_N[given_M])
            advantage_N = advantage_N.index_add(0, given_M, found_M * self.config.part_weights.get(name, 1.0))
        return batch.replace(advantage_T=whiten(advantage_N.float()[batch.row_T]))
