"""OTB: for each token the baseline of least variance (Li et al. 2026, "Optimal token baseline", arXiv 2602.07078).

    A_t = R − Σ W_t·R / Σ W_t over the group's answers of t tokens or more,   W_t = Σ_{j ≤ t} (1 − 2π_j + Σ_v p_j(v)²)

1 − 2π + Σp² is the squared norm of a token's gradient in the logits, so W_t is how far an answer has moved the policy
by its t-th token; where importance weights correct the sampler, their squares scale it. Tool-integrated answers need
nothing else: t counts sampled tokens, and what a tool said in between is stepped over. Where only one answer is left,
there is nothing to compare with and its tokens keep the last baseline that two had a part in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from treadle.algorithms.advantages import samples
from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.gae import running_sums
from treadle.algorithms.policy_gradient import Estimator, GroupConfig
from treadle.config import key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class OptimalTokenConfig(GroupConfig):
    by_token: ClassVar[bool] = True
    name: str = key_of(AlgorithmConfig, "name", default="optimal_token")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-sum")


class OptimalToken(Estimator):
    Config = OptimalTokenConfig
    config: OptimalTokenConfig
    zero_on_equal_group = True
    on_shift = "same"
    on_scale = "linear"
    before_advantages = frozenset({"policy"})
    observes = frozenset({"logprob", "sum_p2"})

    def advantages(self, batch: Batch) -> Batch:
        import torch

        assert batch.old_logprob_T is not None
        found = samples(batch)
        group_N, length_N = found.group_S[found.of_N], batch.length_N
        moved_T = (1 - 2 * batch.old_logprob_T.exp() + batch.extras_T["old_sum_p2_T"]).clamp(min=0)
        if batch.weight_T is not None:
            moved_T *= batch.weight_T.square()
        # A sample counts once, however many trajectories it has.
        energy_T = running_sums(moved_T, batch.offset_N1)
        del moved_T
        energy_T /= found.sum_S((length_N > 0).double())[found.of_N].repeat_interleave(length_N)
        # K: a place for each group and number of tokens, groups end to end.
        longest_G = length_N.new_zeros(len(found.count_G)).scatter_reduce(0, group_N, length_N, "amax")
        start_G = longest_G.cumsum(0) - longest_G
        place_T = (start_G[group_N] - batch.offset_N1[:-1]).repeat_interleave(length_N)
        place_T += torch.arange(len(place_T), device=place_T.device)
        zero_K, none_K = (energy_T.new_zeros(int(longest_G.sum()), dtype=kind) for kind in (torch.float64, torch.int64))
        of_T = found.of_N.repeat_interleave(length_N)
        first_K, last_K = (
            none_K.scatter_reduce(0, place_T, of_T, f"a{which}", include_self=False) for which in ("min", "max")
        )
        del of_T
        total_K = zero_K.index_add(0, place_T, energy_T)
        reward_T = found.reward_S[found.of_N].repeat_interleave(length_N)
        earned_K = zero_K.index_add(0, place_T, energy_T.mul_(reward_T))
        many_K = (first_K != last_K) & (total_K > 0)  # several samples have a token there
        # The last place before this one, in its group, that has a baseline; without any, the group's mean.
        last_K = torch.arange(len(zero_K), device=place_T.device).masked_fill(~many_K, -1).cummax(0).values
        none_K = last_K < start_G.repeat_interleave(longest_G)
        mean_K = (found.sum_G(found.reward_S) / found.count_G).repeat_interleave(longest_G)
        baseline_K = mean_K.where(none_K, (earned_K / total_K.where(many_K, 1.0))[last_K.clamp(min=0)])
        advantage_T = (reward_T - baseline_K[place_T]).float()
        return batch.replace(advantage_T=advantage_T.masked_fill(found.equal_S[found.of_N][batch.row_T], 0.0))
