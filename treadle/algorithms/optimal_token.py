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
from treadle.algorithms.gae import running_sums
from treadle.algorithms.policy_gradient import Estimator, GroupConfig
from treadle.config import key
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from treadle.batch import Batch


class OptimalTokenConfig(GroupConfig):
    by_token: ClassVar[bool] = True
    name: str = key("module of treadle.algorithms, my.module:Class, two joined by +", default="optimal_token")
    aggregate: Aggregate = key("how per-token terms become one loss", default="sequence-mean-token-sum")


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
        found, row_T = samples(batch), batch.row_T
        reward_T, group_T = found.reward_S[found.of_N][row_T], found.group_S[found.of_N][row_T]
        moved_T = 1 - 2 * batch.old_logprob_T.double().exp() + batch.extras_T["old_sum_p2_T"].double()
        if batch.weight_T is not None:
            moved_T = moved_T * batch.weight_T.square()
        # A sample counts once, however many trajectories it has.
        parts_S = found.sum_S((batch.length_N > 0).double())
        energy_T = running_sums(moved_T.clamp(min=0), batch.offset_N1) / parts_S[found.of_N][row_T]
        # K: a place for each group and number of tokens, groups end to end.
        longest_G = batch.length_N.new_zeros(len(found.count_G))
        longest_G = longest_G.scatter_reduce(0, found.group_S[found.of_N], batch.length_N, "amax")
        start_G = longest_G.cumsum(0) - longest_G
        place_T = start_G[group_T] + torch.arange(len(row_T), device=row_T.device) - batch.offset_N1[:-1][row_T]
        zero_K = energy_T.new_zeros(int(longest_G.sum()))
        total_K = zero_K.index_add(0, place_T, energy_T)
        earned_K = zero_K.index_add(0, place_T, energy_T * reward_T)
        of_T, none_K = found.of_N[row_T], zero_K.long() - 1
        first_K, last_K = (
            none_K.scatter_reduce(0, place_T, of_T, f"a{which}", include_self=False) for which in ("min", "max")
        )
        many_K = (first_K != last_K) & (total_K > 0)  # several samples have a token there
        # The last place before this one, in its group, that has a baseline; without any, the group's mean.
        last_K = torch.arange(len(zero_K), device=row_T.device).masked_fill(~many_K, -1).cummax(0).values
        none_K = last_K < torch.repeat_interleave(start_G, longest_G)
        mean_K = torch.repeat_interleave(found.sum_G(found.reward_S) / found.count_G, longest_G)
        baseline_K = mean_K.where(none_K, (earned_K / total_K.where(many_K, 1.0))[last_K.clamp(min=0)])
        advantage_T = (reward_T - baseline_K[place_T]).masked_fill(found.equal_S[found.of_N][row_T], 0.0)
        return batch.replace(advantage_T=advantage_T.float())
