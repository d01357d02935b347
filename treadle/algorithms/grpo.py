"""GRPO: group relative policy optimization (Shao et al. 2024, arXiv 2402.03300).

Several answers to one prompt are each other's baseline (`group_relative.py`), under PPO's clip (`clip.py`):

    −min(r·A, clip(r)·A) + β·KL(π, π_ref) − η·entropy,   mean over the tokens of an answer, then over answers

The paper has β = 0.04 and k3 for the KL; today's practice, and the default, is β = 0: then there is no reference model.
"""

from __future__ import annotations

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.clip import Clip, ClipConfig
from treadle.algorithms.group_relative import GroupRelative, GroupRelativeConfig
from treadle.algorithms.kl import Estimator as KLEstimator
from treadle.algorithms.policy_gradient import PolicyGradientConfig
from treadle.config import key_of
from treadle.handles import Aggregate


class GRPOConfig(ClipConfig, GroupRelativeConfig):
    name: str = key_of(AlgorithmConfig, "name", default="grpo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="sequence-mean-token-mean")
    kl_estimator: KLEstimator = key_of(PolicyGradientConfig, "kl_estimator", default="k3")


class GRPO(Clip, GroupRelative):
    Config = GRPOConfig
    config: GRPOConfig
