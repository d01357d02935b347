"""PPO: proximal policy optimization with a learned critic (Schulman et al. 2017, arXiv 1707.06347).

Advantages come from GAE over the sampled tokens, bootstrapped where a trajectory was cut short, and are whitened over
the batch. The KL to a reference policy, where it has a weight β, is taken off the reward token by token, as in
r_t − β·(log π_old − log π_ref), or added to the loss. Rewards are never written over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from treadle.algorithms.advantages import whiten
from treadle.algorithms.base import Algorithm, AlgorithmConfig, Role
from treadle.algorithms.clipping import clipped_surrogate, clipped_value_error
from treadle.algorithms.gae import gae
from treadle.algorithms.kl import Estimator, adapted, kl
from treadle.algorithms.metrics import KL_REFERENCE, POLICY_METRICS, policy_metrics
from treadle.algorithms.ratio import ratio
from treadle.config import key
from treadle.handles import Loss, Outputs
from treadle.metrics import Metric

if TYPE_CHECKING:
    from treadle.batch import Batch


class PPOConfig(AlgorithmConfig):
    name: str = key("module of treadle.algorithms, or my.module:Class", default="ppo")
    group_size: int = key("samples asked of each prompt", default=1, ge=1, le=2**16)
    minibatches: int = key("optimizer steps per batch", default=4, ge=1, le=2**20)
    clip_low: float = key("the ratio is clipped below 1 - clip_low", default=0.2, gt=0, le=1)
    clip_high: float = key("the ratio is clipped above 1 + clip_high", default=0.2, gt=0, le=1e3)
    value_clip: float = key("how far a value may profit from moving in one batch", default=0.2, gt=0, le=1e6)
    gamma: float = key("discount per token", default=1.0, gt=0, le=1)
    lam: float = key("GAE: 0 trusts the critic, 1 trusts the rewards", default=0.95, ge=0, le=1)
    kl_coefficient: float = key("weight of the KL to the reference; 0: no reference", default=0.0, ge=0, le=1e3)
    kl_in: Literal["reward", "loss"] = key("where the KL is charged", default="reward")
    kl_estimator: Estimator = key("k1, k2, k3, abs; with +: gradient of k2 in the loss (see kl.py)", default="k1+")
    kl_target: float | None = key("adapts kl_coefficient to this KL, nats per token", default=None, gt=0, le=1e3)
    critic_warmup_steps: int = key("steps that train the critic only", default=0, ge=0, le=2**31)

    @model_validator(mode="after")
    def _rules(self) -> PPOConfig:
        if self.kl_coefficient > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator is k1, whose expected gradient in a loss is zero; use k1+ (its value, the right "
                "gradient), k2, k3, abs, k3+ or abs+, or charge it with kl_in=reward"
            )
        if self.kl_target is not None and self.kl_coefficient == 0:
            raise ValueError(
                "kl_target adapts kl_coefficient by factors, so it cannot start at 0; "
                "set kl_coefficient above 0 (0.01, say) or leave kl_target out"
            )
        return self

    def check_run(self, steps: int) -> None:
        if self.critic_warmup_steps >= steps:
            raise ValueError(
                f"algorithm.critic_warmup_steps={self.critic_warmup_steps} leaves none of steps={steps} to train the "
                f"policy; 0 to {steps - 1} are possible, or raise steps"
            )


class PPO(Algorithm):
    Config = PPOConfig
    config: PPOConfig
    metrics = (
        *POLICY_METRICS,
        KL_REFERENCE,
        Metric("critic/value", "reward", "value of the state in which a token was chosen"),
        Metric("critic/return", "reward", "what the value should have been: GAE's advantage plus the old value"),
        Metric("critic/value_error", "reward²", "squared difference of the two"),
        Metric("critic/value_clip_fraction", "share", "tokens whose value gradient the clip has cut"),
    )
    needs = frozenset({"logprob", "entropy"})
    before_advantages = frozenset({"critic"})
    skips_no_signal = False  # the critic learns from every row

    def __init__(self, config: PPOConfig | None = None) -> None:
        super().__init__(config)
        self.kl_coefficient = self.config.kl_coefficient
        charged = self.kl_coefficient > 0
        self.uses = frozenset({"critic", "reference"} if charged else {"critic"})
        if charged and self.config.kl_in == "reward":
            self.before_advantages = frozenset({"critic", "policy", "reference"})
        elif charged:
            self.before_loss = frozenset({"reference"})

    def first_step(self, role: Role) -> int:
        return self.config.critic_warmup_steps if role == "policy" else 0

    def advantages(self, batch: Batch) -> Batch:
        assert batch.value_T is not None
        assert batch.bootstrap_N is not None
        config, reward_T = self.config, batch.reward_T
        if self.kl_coefficient > 0 and config.kl_in == "reward":
            assert batch.old_logprob_T is not None
            assert batch.reference_logprob_T is not None
            kl_T = kl(batch.old_logprob_T, batch.reference_logprob_T, config.kl_estimator)
            reward_T = reward_T - self.kl_coefficient * kl_T
        after_N = batch.bootstrap_N.where(batch.truncated_N, 0.0)
        advantage_T = gae(reward_T, batch.value_T, after_N, batch.offset_N1, config.gamma, config.lam)
        return batch.replace(advantage_T=whiten(advantage_T), return_T=advantage_T + batch.value_T)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert batch.advantage_T is not None
        assert outputs.logprob_T is not None
        config, old_T = self.config, self.old_logprob(batch, outputs)
        ratio_T = ratio(outputs.logprob_T, old_T)
        surrogate_T, cut_T = clipped_surrogate(ratio_T, batch.advantage_T, config.clip_low, config.clip_high)
        metrics, peaks = policy_metrics(outputs, old_T, cut_T)
        terms = [self.term(surrogate_T)]
        if batch.reference_logprob_T is not None:
            kl_T = kl(outputs.logprob_T, batch.reference_logprob_T, config.kl_estimator)
            metrics["kl_reference"] = kl_T.detach()
            if config.kl_in == "loss":
                terms.append(self.term(kl_T, self.kl_coefficient))
        return Loss(terms, metrics, peaks)

    def value_loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert batch.value_T is not None
        assert batch.return_T is not None
        assert outputs.value_T is not None
        error_T, cut_T = clipped_value_error(outputs.value_T, batch.value_T, batch.return_T, self.config.value_clip)
        value_T = outputs.value_T.detach()
        metrics = {
            "value": value_T,
            "return": batch.return_T,
            "value_error": (value_T - batch.return_T).square(),
            "value_clip_fraction": cut_T.to(value_T.dtype),
        }
        return Loss([self.term(error_T)], metrics)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        # Not measured in critic warm-up, and not a number where every optimizer step was skipped.
        measured = metrics.get("policy/kl_reference", math.nan)
        if self.config.kl_target is not None and math.isfinite(measured):
            self.kl_coefficient = adapted(self.kl_coefficient, measured, self.config.kl_target)

    def state(self) -> dict[str, Any]:
        return {"kl_coefficient": self.kl_coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.kl_coefficient = state["kl_coefficient"]
