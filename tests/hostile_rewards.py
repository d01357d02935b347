"""Rewards that go wrong, in a module that worker processes import quickly."""

from __future__ import annotations

import time
from typing import Any

from treadle.types import Trajectory


def hostile(trajectory: Trajectory) -> float:
    raise ValueError("no such answer")


def nothing(trajectory: Trajectory) -> Any:
    return None


def hanging(trajectory: Trajectory) -> float:
    time.sleep(1000)
    return 1.0
