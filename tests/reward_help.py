"""Trajectories to score, and scorers to score them once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from treadle.rewards.scorer import RewardConfig, make_scorer
from treadle.types import Ended, Prompt, Reward, Trajectory


def trajectory(response: str = "", answer: Any = None, turns: int = 1, **metadata: Any) -> Trajectory:
    sampled = 1 + np.arange(turns)
    return Trajectory(
        prompt=Prompt("d.jsonl:7", 0, (), (5,), answer, metadata),
        token_T=np.arange(turns + 1),
        provenance_T=np.array([0] + [1] * turns, np.uint8),
        logprob_T=np.zeros(turns + 1, np.float32),
        version_T=np.zeros(turns + 1, np.int32),
        turn_ends=tuple(sampled.tolist()),
        ended=Ended.TRUNCATED,
        messages=({"role": "assistant", "content": response},),
    )


def score_many(
    functions: dict[str, Callable[..., Any]], weights: dict[str, float], what: Trajectory, **config: Any
) -> Reward:
    async def run() -> Reward:
        async with make_scorer(RewardConfig(functions=weights, **config), functions) as scorer:
            return await scorer(what)

    return asyncio.run(run())
