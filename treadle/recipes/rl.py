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
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from treadle.batch import Batch
from treadle.recipes.collect import Collector, FailureBudget, Sampler, first
from treadle.recipes.evaluate import answer
from treadle.recipes.measure import Stopwatch, measure_batch, measure_evaluation
from treadle.types import Mean, Statistics, merge

if TYPE_CHECKING:
    from treadle.algorithms.base import Algorithm, Role
    from treadle.handles import Agent, PromptSource, Publisher, RolloutHandle, Scorer, TrainedHandle
    from treadle.recipes.config import RLConfig
    from treadle.runs.recorder import Recorder
    from treadle.types import Group, Prompt


@dataclass(frozen=True)
class System:
    """Everything the loop drives. It cannot tell one process from a cluster, or one engine from another."""

    algorithm: Algorithm
    prompts: PromptSource
    held_out: list[Prompt]
    agent: Agent
    evaluator: Agent
    scorer: Scorer
    rollout: RolloutHandle
    publish: Publisher
    models: Mapping[Role, TrainedHandle]
    record: Recorder


@dataclass(frozen=True)
class Now:
    """Where a run stands."""

    step: int = 0  # steps done
    version: int = 0  # of the weights that generate
    evaluated: int | None = None  # the step after which they were last evaluated
    data_ended: bool = False


async def train(config: RLConfig, system: System) -> Now:
    """Train until `config.steps` or the end of the data, from the latest checkpoint if there is one."""
    try:
        async with asyncio.TaskGroup() as tasks:
            return await _train(config, system, tasks)
    except BaseExceptionGroup as group:
        raise first(group) from None


async def _train(config: RLConfig, system: System, tasks: asyncio.TaskGroup) -> Now:
    algorithm, record = system.algorithm, system.record
    failures = FailureBudget(config.reward.max_failed, config.prompts_per_step * algorithm.config.group_size)
    collector = Collector(
        prompts=system.prompts,
        algorithm=algorithm,
        sample=Sampler(system.agent, system.scorer, system.rollout, failures),
        record=record,
        slots=(config.max_staleness + 1) * config.prompts_per_step,
        max_filtered=config.max_filtered_groups,
    )
    now = await restore(system, collector)
    await system.publish(now.version)
    if now.evaluated is None:
        now = await evaluate(config, system, now)
    collecting = tasks.create_task(collector.run(tasks))

    while now.step < config.steps and not now.data_ended:
        collector.step, collector.version = now.step + 1, now.version
        watch = Stopwatch(record.progress)
        with watch("generate"):
            groups = await collector.take(config.prompts_per_step)
        now = replace(now, data_ended=len(groups) < config.prompts_per_step)
        if groups:
            now = await advance(config, system, now, groups, watch)
        last = now.step == config.steps or now.data_ended
        if last:
            collecting.cancel()
            collector.stop()
        if (last or config.evaluation.due(now.step)) and now.evaluated != now.step:
            now = await evaluate(config, system, now)
        if last or record.checkpoint_due(now.step, config.steps):
            await save(system, now, collector.state(groups))
        collector.release(groups)
    return now


async def advance(config: RLConfig, system: System, now: Now, groups: list[Group], watch: Stopwatch) -> Now:
    """One step: look, estimate, learn, publish."""
    algorithm, models = system.algorithm, system.models
    step, version = now.step + 1, now.version
    assert all(version - group.oldest_version <= config.max_staleness for group in groups)

    with watch("look"):
        batch = Batch.pack(groups, algorithm.config.minibatches)
        batch = await look(batch, algorithm.before_advantages, models)
        batch = estimate(batch, algorithm)
        batch = await look(batch, algorithm.passes_before_loss, models)
    with watch("update"):
        learned = await learn(batch, step, algorithm, models)
    with watch("publish"):
        if moved(learned):
            version += 1
            learned = merge(learned, await system.publish(version))

    statistics = merge(learned, measure_batch(groups, batch, now.version))
    system.record.trained(step, groups, batch, statistics, watch.seconds)
    algorithm.after_step({name: value.value for name, value in statistics.items()})
    return replace(now, step=step, version=version)


async def look(batch: Batch, roles: Iterable[Role], models: Mapping[Role, TrainedHandle]) -> Batch:
    """Fill in what these roles see: the policy's old log-probs, the reference's log-probs, the critic's values."""
    found = await asyncio.gather(*(models[role].annotate(batch) for role in roles))
    return batch.replace(**{name: values for seen in found for name, values in seen.items()})


def estimate(batch: Batch, algorithm: Algorithm) -> Batch:
    """Advantages, computed on trained tokens alone."""
    batch = batch.expanded(algorithm.advantages(batch.compact()))
    return batch.mark_signal() if algorithm.skips_no_signal else batch


async def learn(batch: Batch, step: int, algorithm: Algorithm, models: Mapping[Role, TrainedHandle]) -> Statistics:
    """One optimizer step per mini-batch and epoch, for every trained role whose time has come."""
    roles: list[Role] = [role for role in algorithm.trains if step > algorithm.first_step(role)]
    parts: list[Statistics] = []
    for _ in range(algorithm.config.epochs):
        for minibatch in batch.minibatches():
            parts += await asyncio.gather(*(models[role].step(minibatch) for role in roles))
    return merge(*parts)


def moved(learned: Statistics) -> bool:
    """Did any optimizer step change the policy? Critic warm-up and skipped steps do not make a version."""
    applied = learned.get("policy/grad_norm")
    return isinstance(applied, Mean) and applied.weight > 0


async def evaluate(config: RLConfig, system: System, now: Now) -> Now:
    """Answer the held-out prompts, if there are any, with the weights as they are."""
    if prompts := system.held_out:
        label = f"evaluation/{now.step}"
        groups = await answer(prompts, config.evaluation, system.evaluator, system.scorer, system.rollout, label)
        system.record.evaluated(now.step, groups, measure_evaluation(groups))
    return replace(now, evaluated=now.step)


async def save(system: System, now: Now, collector: Mapping[str, object]) -> None:
    """Write a checkpoint: the place in the run and in the data, the algorithm, every trained role."""
    state = {"now": asdict(now), "collector": collector, "algorithm": system.algorithm.state()}
    with system.record.checkpoint(now.step, state) as path:
        for role in system.algorithm.trains:
            await system.models[role].save(path / role)


async def restore(system: System, collector: Collector) -> Now:
    """Go on from the latest checkpoint, or begin."""
    found = system.record.restore()
    if found is None:
        return Now()
    path, state = found
    for role in system.algorithm.trains:
        await system.models[role].load(path / role)
    system.algorithm.restore(state["algorithm"])
    collector.restore(state["collector"])
    return Now(**state["now"])
