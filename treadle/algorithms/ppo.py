"""PPO: proximal policy optimization with a learned critic (Schulman et al. 2017, arXiv 1707.06347).

Advantages are those of `critic.py`, the objective is that of `clip.py`. The KL to a reference policy, where it has a
weight β, is taken off the reward token by token, as in r_t − β·(log π_old − log π_ref), or added to the loss.
"""

from __future__ import annotations

from typing import Literal

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.clip import Clip, ClipConfig
from treadle.algorithms.critic import Critic, CriticConfig
from treadle.algorithms.kl import Estimator as KLEstimator
from treadle.algorithms.policy_gradient import PolicyGradientConfig
from treadle.config import key_of


class PPOConfig(ClipConfig, CriticConfig):
    name: str = key_of(AlgorithmConfig, "name", default="ppo")
    group_size: int = key_of(AlgorithmConfig, "group_size", default=1)
    minibatches: int = key_of(AlgorithmConfig, "minibatches", default=4)
    kl_in: Literal["loss", "reward"] = key_of(PolicyGradientConfig, "kl_in", default="reward")
    kl_estimator: KLEstimator = key_of(PolicyGradientConfig, "kl_estimator", default="k1+")


class PPO(Clip, Critic):
    Config = PPOConfig
    config: PPOConfig
    metrics = tuple(dict.fromkeys((*Clip.metrics, *Critic.metrics)))
