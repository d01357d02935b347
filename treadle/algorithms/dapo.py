"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO's advantages and four changes, each a key of its own elsewhere, too.

- clip-higher: `clip_high` above `clip_low`, so that unlikely tokens can grow;
- dynamic sampling: groups of equal rewards give their slots to others (at most `max_filtered_groups` in a row);
- the mean over all tokens, not over each answer's first: long answers count by their length;
- soft overlong penalty: in the last part of the token limit an answer loses up to `overlong_penalty`; with
  `truncated=reject` cut answers are left out altogether (the paper's overlong filtering).
"""

from __future__ import annotations

from treadle.algorithms.clip import Clip, ClipConfig
from treadle.algorithms.group_relative import GroupRelative, GroupRelativeConfig
from treadle.config import key
from treadle.handles import Aggregate


class DAPOConfig(ClipConfig, GroupRelativeConfig):
    name: str = key("module of treadle.algorithms, my.module:Class, two joined by +", default="dapo")
    aggregate: Aggregate = key("how per-token terms become one loss", default="token-mean")
    clip_high: float = key("the ratio is clipped above 1 + clip_high", default=0.28, gt=0, le=1e3)
    dynamic_sampling: bool = key(
        "drop groups whose rewards are all equal and sample others in their place", default=True
    )
    overlong_share: float = key(
        "last part of the token limit in which an answer loses reward, more with every token; 0: none",
        default=0.2,
        ge=0,
        le=1,
    )


class DAPO(Clip, GroupRelative):
    Config = DAPOConfig
    config: DAPOConfig
