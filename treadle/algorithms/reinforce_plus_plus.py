"""REINFORCE++: no critic, no group; the whole batch is the baseline (Hu et al. 2025, arXiv 2501.03262).

    A_t = whiten over the batch of Σ_{k ≥ t} r_k

The rewards r are placed on tokens: at the end of a turn or an answer, and, with `kl_coefficient` above 0, less β·KL
at each token (the paper's k1, charged to the reward). `reinforce_plus_plus_baseline` is the form for groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from treadle.algorithms.advantages import whiten
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.gae import discounted_sums
from treadle.algorithms.kl import Estimator as KLEstimator
from treadle.algorithms.policy_gradient import Estimator, PolicyGradientConfig
from treadle.config import key, key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    by_token: ClassVar[bool] = True
    name: str = key_of(AlgorithmConfig, "name", default="reinforce_plus_plus")
    group_size: int = key_of(AlgorithmConfig, "group_size", default=1)
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")
    gamma: float = key("discount per token", default=1.0, gt=0, le=1)
    kl_in: Literal["loss", "reward"] = key_of(PolicyGradientConfig, "kl_in", default="reward")
    kl_estimator: KLEstimator = key_of(PolicyGradientConfig, "kl_estimator", default="k1+")


class ReinforcePlusPlus(Estimator):
    Config = ReinforcePlusPlusConfig
    config: ReinforcePlusPlusConfig
    skips_no_signal = False
    across_groups = True
    on_scale = "same"

    def advantages(self, batch: Batch) -> Batch:
        return_T = discounted_sums(batch.reward_T, batch.offset_N1, self.config.gamma)
        return batch.replace(advantage_T=whiten(return_T))
