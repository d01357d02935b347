"""The share of the response's characters that are the letter a; an empty response earns 0. For smoke runs."""

from __future__ import annotations

from treadle.types import Trajectory


def reward(trajectory: Trajectory) -> float:
    text = trajectory.response
    return text.count("a") / len(text) if text else 0.0
