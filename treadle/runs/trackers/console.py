"""The view on the terminal (`treadle/runs/progress.py`). It is always there; naming it chooses what it shows."""

from __future__ import annotations

import difflib

from pydantic import field_validator

from treadle.config import key
from treadle.metrics import OURS, Registry
from treadle.runs.trackers.base import TrackerConfig


class Config(TrackerConfig):
    name: str = key("module of treadle.runs.trackers, or my.module:Class", default="console")
    metrics: tuple[str, ...] = key(
        "metrics of a step that are shown", default=("reward/mean", "response/tokens", "time/tokens_per_second")
    )

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        for name in metrics:
            if Registry().find(name) is None and not name.startswith(("policy/", "critic/")):  # an algorithm's
                near = difflib.get_close_matches(name, [m.name for m in OURS], 1)
                hint = f"did you mean {near[0]!r}?" if near else "docs/metrics.md lists all"
                raise ValueError(f"there is no metric {name!r}; {hint}")
        return metrics
