"""Pass@k training: the reward of an answer is what it adds to the best of k (Chen et al. 2025, arXiv 2508.10751).

With c of a prompt's n answers passed, the mean over all sets of k of them is R̄ = 1 − C(n − c, k) / C(n, k), its
deviation σ = √(R̄(1 − R̄)), and the advantages are those of GRPO averaged over the sets that an answer is in:

    passed  (1 − R̄) / σ        failed  (1 − R̄ − C(n − c − 1, k − 1) / C(n − 1, k − 1)) / σ

So one solution among many failures is worth much and a second one less: it pays to stay diverse. Groups in which all
passed, or none, or too few failed for a set of k failures, are exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import model_validator

from treadle.algorithms.advantages import samples
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Estimator, GroupConfig, uncharged
from treadle.config import key, key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class PassAtKConfig(GroupConfig):
    name: str = key_of(AlgorithmConfig, "name", default="pass_at_k")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-mean")
    k: int = key("answers of which the best counts", default=4, ge=1, le=2**16)
    passed: float = key("the reward from which an answer counts as passed", default=1.0, ge=-1e6, le=1e6)

    @model_validator(mode="after")
    def _k_rules(self) -> PassAtKConfig:
        uncharged(self, "pass_at_k looks at whether an answer passed, which a small charge would change")
        if self.k > self.group_size:
            raise ValueError(f"k={self.k} is more than group_size={self.group_size}; lower k or raise group_size")
        return self


class PassAtK(Estimator):
    Config = PassAtKConfig
    config: PassAtKConfig
    zero_on_equal_group = True

    def advantages(self, batch: Batch) -> Batch:
        import torch

        found, k = samples(batch), self.config.k
        passed_S = found.reward_S >= self.config.passed - 1e-6
        n_S = found.count_G[found.group_S].double()
        failed_S = found.sum_G((~passed_S).double())[found.group_S]
        mean_S = 1 - _share(failed_S, n_S, k)
        miss_S = _share(failed_S - 1, n_S - 1, k - 1)  # the other k - 1 of a set failed, too
        deviation_S = (mean_S * (1 - mean_S)).sqrt()
        advantage_S = torch.where(passed_S, 1 - mean_S, 1 - mean_S - miss_S) / deviation_S
        advantage_S = advantage_S.masked_fill(deviation_S == 0, 0.0)
        return batch.replace(advantage_T=found.unless_equal(advantage_S).float()[batch.row_T])


def _share(some_S: Tensor, all_S: Tensor, k: int) -> Tensor:
    """C(some, k) / C(all, k) as a product; 0 where there are fewer than k of some."""
    import torch

    share_S = torch.ones_like(all_S)
    for i in range(k):
        share_S = share_S * ((some_S - i).clamp(min=0) / (all_S - i).clamp(min=1))
    return share_S
