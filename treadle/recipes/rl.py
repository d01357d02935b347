"""Reinforcement learning of a language model: the one loop.

             slots: (max_staleness + 1) × prompts_per_step
                  │
    prompts ──► collect ──► groups, in start order ──► learn ──► publish ──► rollout loads, version += 1
                  │  ▲                                    │
        agent ◄───┘  └── reward                           ├─ old, reference log-probs, values → advantages
          │                                               └─ policy.step, critic.step
          └─► rollout engine (token ids in, token ids out)

`max_staleness = 0` is the synchronous on-policy trainer: a step's slots are given back when the step has ended, so
nothing is generated meanwhile. 1 is the one-step-off pipeline, k is bounded asynchrony. There is no other loop.

What waits for what: `take` waits for the oldest groups, and they for generation and reward; a publish waits for
generation as `on_publish` says; evaluation runs between steps, so the next publish waits for it; slots wait for the
end of the step. The first failure anywhere ends the run with its own traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.batch import Batch
from treadle.controller.group import STEP
from treadle.errors import TrainingError
from treadle.recipes.collect import Collector, Sampler, first, gather
from treadle.recipes.evaluate import evaluate
from treadle.recipes.measure import Stopwatch, measure_batch, measure_rollout, measure_speed
from treadle.recipes.position import Position, Saver, restore
from treadle.types import Group, Max, Statistics, merge

if TYPE_CHECKING:
    from treadle.algorithms.base import Algorithm, Role
    from treadle.handles import Learned, ModelHandle, TrainedHandle
    from treadle.recipes.config import RLConfig
    from treadle.recipes.system import System


async def train(config: RLConfig, system: System) -> Position:
    """Train until `config.steps` or the end of the data, from the latest checkpoint if there is one."""
    try:
        async with asyncio.TaskGroup() as tasks:
            return await _train(config, system, tasks)
    except BaseExceptionGroup as group:
        error = first(group)
        raise error from error.__cause__


async def _train(config: RLConfig, system: System, tasks: asyncio.TaskGroup) -> Position:
    record = system.record
    collector = Collector(
        prompts=system.prompts,
        algorithm=system.algorithm,
        sample=Sampler(system.agent, system.scorer, system.rollout, config.failure_budget),
        record=record,
        slots=(config.max_staleness + 1) * config.prompts_per_step,
        max_filtered=config.max_filtered_groups,
    )
    saver = Saver(system, tasks)
    now = await restore(system, collector)
    await system.publish(now.version)
    if now.evaluated is None:
        now = await evaluate(config, system, now)

    groups: list[Group] = []
    collector.start(tasks)
    while now.step < config.steps and not now.data_ended:
        collector.release(groups)  # the step that trained them has ended
        watch = Stopwatch(record.progress)
        with watch("generate"):
            groups = await collector.take(config.prompts_per_step, now.step + 1, now.version)
        if groups:
            now = await advance(config, system, now, groups, watch)
        now = replace(now, data_ended=len(groups) < config.prompts_per_step)
        if config.evaluation.due(now.step) and now.evaluated != now.step:
            now = await evaluate(config, system, now)
        if record.checkpoint_due(now.step) and now.saved != now.step:
            now = await saver.save(now, collector.state(groups))
    collector.stop()
    if now.step == 0:
        raise TrainingError(
            "the data ended and no step was trained: every group failed or was filtered; `treadle inspect` shows why"
        )

    if now.evaluated != now.step:
        now = await evaluate(config, system, now)
    if now.saved != now.step:
        now = await saver.save(now, collector.state(groups))
    await saver.done()
    return now


async def advance(config: RLConfig, system: System, now: Position, groups: list[Group], watch: Stopwatch) -> Position:
    """One step: observe, estimate, learn, publish."""
    algorithm, step, version = system.algorithm, now.step + 1, now.version
    STEP.set(step)
    for group in groups:
        assert version - group.oldest_version <= config.max_staleness, f"group {group.index} is too old for {version}"

    with watch("observe"):
        batch = Batch.pack(groups, algorithm.config.minibatches)
        batch = await observe(batch, algorithm.before_advantages, system.observers)
        batch = algorithm.estimate(batch, version)
        batch = await observe(batch, algorithm.passes_before_loss, system.observers)
    with watch("update"):
        roles: list[Role] = [role for role in algorithm.trains if step > algorithm.first_step(role)]
        learned, batch = await learn(batch, roles, algorithm, system.learners)
    with watch("publish"):
        # A version is a publish. Critic warm-up and skipped steps move no policy weights and make none.
        if "policy" in roles and learned["policy/updated"].value > 0:
            version += 1
            learned = merge(learned, await system.publish(version))

    skipped = {"data/skipped_prompts": Max(sum(system.prompts.skipped.values()))}
    statistics = merge(learned, measure_batch(groups, batch, now.version), measure_rollout(system.rollout), skipped)
    if system.speed is not None:
        overlap = config.max_staleness > 0
        statistics |= measure_speed(batch, watch.seconds, algorithm, roles, system.speed, overlap)
    system.record.trained(step, groups, batch, statistics, watch.seconds)
    algorithm.after_step({name: value.value for name, value in statistics.items()})
    return replace(now, step=step, version=version)


async def observe(batch: Batch, roles: Iterable[Role], models: Mapping[Role, ModelHandle]) -> Batch:
    """Fill in what these roles see: the policy's old log-probs, the reference's log-probs, the critic's values."""
    for found in await gather(models[role].annotate(batch) for role in sorted(roles)):
        batch = batch.annotated(found)
    return batch


async def learn(
    batch: Batch, roles: list[Role], algorithm: Algorithm, models: Mapping[Role, TrainedHandle]
) -> tuple[Statistics, Batch]:
    """One optimizer step per mini-batch and epoch for each of these roles; and the batch with what they saw of it."""
    parts: list[Learned] = []
    for _ in range(algorithm.config.epochs):
        for minibatch in batch.minibatches():
            parts += await gather(models[role].step(minibatch, algorithm.state()) for role in roles)
    if len(parts) == len(roles):  # one step of the whole batch: what it saw is the batch's
        for part in parts:
            batch = batch.annotated(part.seen)
    return merge(*(part.statistics for part in parts)), batch
