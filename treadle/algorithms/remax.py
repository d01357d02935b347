"""ReMax: the baseline of a prompt is the reward of its greedy answer (Li et al. 2023, arXiv 2310.10505).

    A = R − R(greedy answer),   loss Σ / N

One answer more is sampled of each prompt, greedily; the ledger counts it as *baseline*, and it is not trained. It
depends on no sampled answer, so the gradient is unbiased, also with one answer a prompt. A group whose greedy answer
failed is filtered. A KL in the reward is charged to the sampled answers alone: the greedy one has no log-probs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Estimator, PolicyGradientConfig
from treadle.config import key, key_of
from treadle.handles import Aggregate
from treadle.types import Kind, Request

if TYPE_CHECKING:
    from treadle.batch import Batch
    from treadle.types import Group, Prompt


class ReMaxConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="remax")
    group_size: int = key("samples asked of each prompt, beside the greedy one", default=1, ge=1, le=2**16)
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-sum")


class ReMax(Estimator):
    Config = ReMaxConfig
    config: ReMaxConfig
    on_shift = "same"
    on_scale = "linear"

    def requests(self, prompt: Prompt) -> list[Request]:
        return [*super().requests(prompt), Request(prompt, Kind.BASELINE, greedy=True)]

    def keep(self, group: Group) -> str | None:
        if not any(sample.kind is Kind.BASELINE for sample in group.usable):
            return "its greedy answer failed"
        return super().keep(group)

    def advantages(self, batch: Batch) -> Batch:
        known_G, group_N = batch.group_N.unique(return_inverse=True)
        greedy_N = batch.baseline_N
        baseline_G = batch.reward_N.new_zeros(len(known_G)).scatter(0, group_N[greedy_N], batch.reward_N[greedy_N])
        known_G = greedy_N.new_zeros(len(known_G)).index_fill(0, group_N[greedy_N], True)
        advantage_N = (batch.reward_N - baseline_G[group_N]).where(known_G[group_N], 0.0)  # no baseline, no signal
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])
