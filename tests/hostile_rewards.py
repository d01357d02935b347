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


def evil(method: str, error: BaseException) -> Any:
    """A number whose `method` raises."""

    def fail(self: Any, *_: Any) -> Any:
        raise error

    return type("Evil", (), {"__float__": lambda self: 1.0, method: fail})()


def loop() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = [1.0]
    found.append(found)
    return found


def deep(depth: int) -> Any:
    found: Any = 1.0
    for _ in range(depth):
        found = [found]
    return found


def recurse() -> float:
    return recurse()


async def one() -> float:
    return 1.0


def obey(trajectory: Trajectory) -> Any:
    """Does what the prompt's answer says: the body of a function."""
    return _function(trajectory)(trajectory)


async def obey_here(trajectory: Trajectory) -> Any:
    return _function(trajectory)(trajectory)


def _function(trajectory: Trajectory) -> Any:
    space: dict[str, Any] = dict(globals())
    body = "".join(f"    {line}\n" for line in trajectory.prompt.answer.splitlines())
    exec(
        "import asyncio, decimal, fractions, os, signal, sys, threading\nimport numpy as np\n"
        "from treadle.errors import ConfigError, RewardError\nfrom treadle.types import Reward\n"
        f"def body(t):\n{body}",
        space,
    )
    return space["body"]
