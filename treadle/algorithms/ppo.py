"""PPO: proximal policy optimization with a learned critic (Schulman et al. 2017, arXiv 1707.06347).

Advantages are those of `critic.py`, the objective is that of `clip.py`. The KL to a reference policy, where it has a
weight β, is taken off the reward token by token, as in r_t − β·(log π_old − log π_ref), or added to the loss.
"""

from __future__ import annotations

from typing import Literal

from treadle.algorithms.clip import Clip, ClipConfig
from treadle.algorithms.critic import Critic, CriticConfig
from treadle.algorithms.kl import Estimator as KLEstimator
from treadle.config import key


class PPOConfig(ClipConfig, CriticConfig):
    name: str = key("module of treadle.algorithms, my.module:Class, two joined by +", default="ppo")
    group_size: int = key("samples asked of each prompt", default=1, ge=1, le=2**16)
    minibatches: int = key("optimizer steps per batch", default=4, ge=1, le=2**20)
    kl_in: Literal["loss", "reward"] = key("where the KL is charged", default="reward")
    kl_estimator: KLEstimator = key(
        "k1, k2, k3, abs; with +: gradient of k2, the right one in a loss (see kl.py)", default="k1+"
    )


class PPO(Clip, Critic):
    Config = PPOConfig
    config: PPOConfig
    metrics = tuple(dict.fromkeys((*Clip.metrics, *Critic.metrics)))
