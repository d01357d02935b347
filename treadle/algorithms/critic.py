"""Advantages from a learned critic (GAE, Schulman et al. 2016, arXiv 1506.02438; `gae.py`).

    A_t = whiten over the batch of Σ_k (γλ)^k·δ_{t+k},   δ_t = r_t + γ·V_{t+1} − V_t

The estimate is bootstrapped where a trajectory was cut short. The critic learns the returns, the estimate before
whitening plus the old value; a value may not profit from moving further than `value_clip` in one batch. Rewards are
never written over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from treadle.algorithms.advantages import whiten
from treadle.algorithms.base import AlgorithmConfig, Role
from treadle.algorithms.clipping import clipped_value_error
from treadle.algorithms.gae import gae
from treadle.algorithms.metrics import CRITIC_METRICS
from treadle.algorithms.policy_gradient import Estimator, PolicyGradientConfig
from treadle.config import key, key_of
from treadle.handles import Loss, Outputs

if TYPE_CHECKING:
    from treadle.batch import Batch


class CriticConfig(PolicyGradientConfig):
    by_token: ClassVar[bool] = True
    name: str = key_of(AlgorithmConfig, "name", default="critic")
    group_size: int = key_of(AlgorithmConfig, "group_size", default=1)
    value_clip: float = key("how far a value may profit from moving in one batch", default=0.2, gt=0, le=1e6)
    gamma: float = key("discount per token", default=1.0, gt=0, le=1)
    lam: float = key("GAE: 0 trusts the critic, 1 trusts the rewards", default=0.95, ge=0, le=1)
    critic_warmup_steps: int = key("steps that train the critic only", default=0, ge=0, le=2**31)

    def check_run(self, steps: int) -> None:
        super().check_run(steps)
        if self.critic_warmup_steps >= steps:
            raise ValueError(
                f"algorithm.critic_warmup_steps={self.critic_warmup_steps} leaves none of steps={steps} to train the "
                f"policy; 0 to {steps - 1} are possible, or raise steps"
            )


class Critic(Estimator):
    Config = CriticConfig
    config: CriticConfig
    metrics = CRITIC_METRICS
    uses = frozenset({"critic"})
    before_advantages = frozenset({"critic"})
    across_groups = True

    def first_step(self, role: Role) -> int:
        return self.config.critic_warmup_steps if role == "policy" else 0

    def advantages(self, batch: Batch) -> Batch:
        assert batch.value_T is not None
        assert batch.bootstrap_N is not None
        after_N = batch.bootstrap_N.where(batch.truncated_N, 0.0)
        advantage_T = gae(batch.reward_T, batch.value_T, after_N, batch.offset_N1, self.config.gamma, self.config.lam)
        return batch.replace(advantage_T=whiten(advantage_T), return_T=advantage_T + batch.value_T)

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
