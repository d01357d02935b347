"""What the sections of all rollout engines have in common."""

from __future__ import annotations

from treadle.config import Config, key


class RolloutConfig(Config):
    """A rollout engine, chosen by its name."""

    name: str = key("rollout engine, a module of treadle.rollout", default="embedded")
    max_sequences: int = key("sequences decoded together; more requests wait", default=64, ge=1, le=1 << 16)
