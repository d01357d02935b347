"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO's advantages and four changes, each a key of its own elsewhere, too.

- clip-higher: `clip_high` above `clip_low`, so that unlikely tokens can grow;
- dynamic sampling: groups of equal rewards give their slots to others (at most `max_filtered_groups` in a row);
- the mean over all tokens, not over each answer's first: long answers count by their length;
- soft overlong penalty: in the last part of the token limit an answer loses up to `overlong_penalty`; with
  `truncated=reject` cut answers are left out altogether (the paper's overlong filtering).
"""

from __future__ import annotations

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.clip import Clip, ClipConfig
from treadle.algorithms.group_relative import GroupRelative, GroupRelativeConfig
from treadle.algorithms.policy_gradient import PolicyGradientConfig
from treadle.config import key_of
from treadle.handles import Aggregate


class DAPOConfig(ClipConfig, GroupRelativeConfig):
    name: str = key_of(AlgorithmConfig, "name", default="dapo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")
    clip_high: float = key_of(ClipConfig, "clip_high", default=0.28)
    dynamic_sampling: bool = key_of(PolicyGradientConfig, "dynamic_sampling", default=True)
    overlong_share: float = key_of(PolicyGradientConfig, "overlong_share", default=0.2)


class DAPO(Clip, GroupRelative):
    Config = DAPOConfig
    config: DAPOConfig
