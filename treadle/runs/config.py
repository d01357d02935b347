"""Configuration keys of the run itself. They may change when a run is continued."""

from __future__ import annotations

from treadle.config import Config, key


class RunConfig(Config):
    """Where a run is recorded, and how often it can be taken up again."""

    dir: str = key("directory that records the run; the same command with the same directory continues it")
    checkpoint_every: int = key("steps between checkpoints; 0: only one, at the end", default=10, ge=0, le=1 << 30)
    keep_checkpoints: int = key("newest checkpoints that are kept", default=1, ge=1, le=1 << 20)
