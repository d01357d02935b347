"""What the sections of all rollout engines have in common."""

from __future__ import annotations

from treadle.config import Config, key
from treadle.weights.config import WeightsConfig


class RolloutConfig(Config):
    """A rollout engine, chosen by its name. Time limits and weights are of engines in other processes."""

    name: str = key("rollout engine, a module of treadle.rollout", default="embedded")
    max_sequences: int = key("sequences decoded together; more requests wait", default=64, ge=1, le=1 << 16)
    timeout: float = key(
        "seconds without a token, or without an answer to a command, after which an engine counts as hung",
        default=120.0,
        gt=0,
        le=86400,
    )
    start_timeout: float = key("seconds that an engine may take to start", default=600.0, gt=0, le=86400)
    weights: WeightsConfig = key("how weights travel to the engines", default=WeightsConfig)

    @property
    def engines(self) -> int:
        """How many one process starts."""
        return 1
