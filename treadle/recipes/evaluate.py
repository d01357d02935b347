"""Evaluation: held-out prompts answered at a temperature and greedily, under the same token limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.recipes.collect import Sampler, gather
from treadle.recipes.measure import measure_evaluation
from treadle.types import Group, Kind, Prompt, Request, Sample

if TYPE_CHECKING:
    from treadle.recipes.config import EvaluationConfig, RLConfig
    from treadle.recipes.position import Position
    from treadle.recipes.system import System

Answering = Callable[[Request, str], Coroutine[Any, Any, Sample]]


async def evaluate(config: RLConfig, system: System, now: Position) -> Position:
    """Answer the held-out prompts, if there are any, with the weights as they are."""
    if system.held_out:
        progress, done = system.record.progress, itertools.count(1)
        total = len(system.held_out) * (config.evaluation.samples + config.evaluation.greedy)
        progress.note(f"answering {len(system.held_out)} held-out prompts, {total} answers in all")
        sampler = Sampler(system.evaluator, system.scorer, system.rollout, config.failure_budget)

        async def sample(request: Request, sample_id: str) -> Sample:
            found = await sampler(request, sample_id)
            progress.stage("evaluate", next(done), total)
            return found

        groups = await answer(system.held_out, config.evaluation, sample, f"evaluation/{now.step}")
        system.record.evaluated(now.step, groups, measure_evaluation(groups))
    return replace(now, evaluated=now.step)


async def answer(
    prompts: list[Prompt], config: EvaluationConfig, sample: Answering, label: str
) -> dict[str, list[Group]]:
    """Groups in the order of the prompts for each way of answering: "sampled" and, if configured, "greedy"."""
    ways = {"sampled": config.samples} | ({"greedy": 1} if config.greedy else {})
    return {way: await _way(prompts, count, way == "greedy", sample, f"{label}/{way}") for way, count in ways.items()}


async def _way(prompts: list[Prompt], count: int, greedy: bool, sample: Answering, label: str) -> list[Group]:
    asked = [(Request(p, Kind.EVALUATION, greedy), f"{label}/{p.index}.{i}") for p in prompts for i in range(count)]
    done = iter(await gather(sample(request, sample_id) for request, sample_id in asked))
    return [Group(prompt.index, prompt, tuple(next(done) for _ in range(count))) for prompt in prompts]
