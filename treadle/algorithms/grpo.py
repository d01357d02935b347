"""GRPO: group relative policy optimization (Shao et al. 2024, arXiv 2402.03300).

Several answers to one prompt are each other's baseline: the advantage of every token of an answer is its reward,
standardised in its group. Advantages belong to episodes: a reward given turn by turn counts by its sum.

Loss, per token: −min(r·A, clip(r)·A) + β·k3(π, π_ref) − η·entropy. The paper has β = 0.04; today's practice, and the
default, is 0: then there is no reference model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import model_validator

from treadle.algorithms.advantages import Scale, group_relative
from treadle.algorithms.base import Algorithm, AlgorithmConfig
from treadle.algorithms.clipping import clipped_surrogate
from treadle.algorithms.kl import Estimator, kl
from treadle.algorithms.metrics import KL_REFERENCE, POLICY_METRICS, policy_metrics
from treadle.algorithms.ratio import ratio
from treadle.config import key
from treadle.handles import Aggregate, Loss, Outputs

if TYPE_CHECKING:
    from treadle.batch import Batch


class GRPOConfig(AlgorithmConfig):
    aggregate: Aggregate = key("how per-token terms become one loss", default="sequence-mean-token-mean")
    scale: Scale = key("std: divide by the group's standard deviation; none: only centre", default="std")
    clip_low: float = key("the ratio is clipped below 1 - clip_low", default=0.2, gt=0, le=1)
    clip_high: float = key("the ratio is clipped above 1 + clip_high", default=0.2, gt=0, le=1e3)
    kl_coefficient: float = key(
        "weight of the KL to the reference in the loss; 0: no reference", default=0.0, ge=0, le=1e3
    )
    kl_estimator: Estimator = key("k2, k3, abs; k1+, k3+, abs+: gradient of k2 (see kl.py)", default="k3")
    entropy_coefficient: float = key("weight of the entropy bonus", default=0.0, ge=0, le=1e3)

    @model_validator(mode="after")
    def _rules(self) -> GRPOConfig:
        if self.group_size < 2:
            raise ValueError(
                "group_size is 1, but GRPO compares the samples of a prompt with each other and would never learn from "
                "one; allowed: 2 or more (8 is usual). For one sample per prompt use name=ppo"
            )
        if self.kl_coefficient > 0 and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator is k1, whose expected gradient in a loss is zero; use k1+ (its value, the right "
                "gradient), k2, k3, abs, k3+ or abs+, or set kl_coefficient=0"
            )
        return self


class GRPO(Algorithm):
    Config = GRPOConfig
    config: GRPOConfig
    metrics = (*POLICY_METRICS, KL_REFERENCE)
    needs = frozenset({"logprob", "entropy"})

    def __init__(self, config: GRPOConfig | None = None) -> None:
        super().__init__(config)
        if self.config.kl_coefficient > 0:
            self.uses = self.before_loss = frozenset({"reference"})
        # The KL and the entropy pull at rows whose rewards say nothing, too.
        self.skips_no_signal = self.config.kl_coefficient == 0 and self.config.entropy_coefficient == 0

    def advantages(self, batch: Batch) -> Batch:
        advantage_N = group_relative(batch.reward_N, batch.group_N, batch.sample_N, self.config.scale)
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert batch.advantage_T is not None
        assert outputs.logprob_T is not None
        assert outputs.entropy_T is not None
        config, old_T = self.config, self.old_logprob(batch, outputs)
        ratio_T = ratio(outputs.logprob_T, old_T)
        surrogate_T, cut_T = clipped_surrogate(ratio_T, batch.advantage_T, config.clip_low, config.clip_high)
        metrics, peaks = policy_metrics(outputs, old_T, cut_T)
        terms = [self.term(surrogate_T)]
        if config.kl_coefficient > 0:
            assert batch.reference_logprob_T is not None
            kl_T = kl(outputs.logprob_T, batch.reference_logprob_T, config.kl_estimator)
            metrics["kl_reference"] = kl_T.detach()
            terms.append(self.term(kl_T, config.kl_coefficient))
        if config.entropy_coefficient > 0:
            terms.append(self.term(-outputs.entropy_T, config.entropy_coefficient))
        return Loss(terms, metrics, peaks)
