"""What a step costs beside the models: plain Python over records that a model might have made, as their number grows.

Each entry of `COSTS` is given a number of trajectories (or of whatever its name says) and a directory, sets up what it
needs, and returns the call that is timed. Only what ships is called; the models alone are left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from treadle.algorithms.grpo import GRPO
from treadle.batch import Batch
from treadle.data.packing import plan
from treadle.errors import RewardError
from treadle.inspector.terminal import show
from treadle.recipes.collect import Collector, FailureBudget, Sampler
from treadle.recipes.measure import measure_batch
from treadle.runs.config import RunConfig
from treadle.runs.directory import RunDirectory
from treadle.runs.ledger import Ledger, State
from treadle.runs.metrics import JsonLines
from treadle.runs.progress import Progress
from treadle.runs.recorder import Recorder
from treadle.types import Ended, Group, Kind, Prompt, Provenance, Request, Reward, Sample, Trajectory

SIZE, PROMPT, SAMPLED = 8, 48, 32  # samples of a group, tokens of a prompt, tokens of an answer

Call = Callable[[], object]
Setup = Callable[[int, Path, ExitStack], Call]


# ---------------------------------------------------------------------- records


def prompt(index: int) -> Prompt:
    return Prompt(f"data:{index}", index, ({"role": "user", "content": f"What is {index} + 1?"},), tuple(range(PROMPT)))


def trajectory(of: Prompt, number: int) -> Trajectory:
    return Trajectory(
        prompt=of,
        token_T=np.concatenate([of.token_ids, 1000 + number + np.arange(SAMPLED)]),
        provenance_T=np.repeat(np.array([Provenance.PROMPT, Provenance.SAMPLED], np.uint8), [PROMPT, SAMPLED]),
        logprob_T=np.pad(np.full(SAMPLED, -0.5, np.float32), (PROMPT, 0), constant_values=np.nan),
        version_T=np.pad(np.zeros(SAMPLED, np.int32), (PROMPT, 0), constant_values=-1),
        turn_ends=(PROMPT + SAMPLED - 1,),
        ended=Ended.TERMINATED,
        messages=(*of.messages, {"role": "assistant", "content": f"It is {number}."}),
        reward=Reward(float(number % 3)),
    )


def groups(trajectories: int) -> list[Group]:
    """Whole groups of `SIZE` samples."""
    found = []
    for index in range(trajectories // SIZE):
        of = prompt(index)
        samples = tuple(Sample(f"{index}.{i}", Kind.TRAIN, (trajectory(of, i),)) for i in range(SIZE))
        found.append(Group(index, of, samples))
    return found


def batch(trajectories: int, minibatches: int = 1) -> Batch:
    return GRPO().estimate(Batch.pack(groups(trajectories), minibatches))


# ---------------------------------------------------------------------- a step's records


def pack(n: int, _: Path, __: ExitStack) -> Call:
    found = groups(n)
    return lambda: Batch.pack(found)


def estimate(n: int, _: Path, __: ExitStack) -> Call:
    packed = Batch.pack(groups(n))
    return lambda: GRPO().estimate(packed)


def select(n: int, _: Path, __: ExitStack) -> Call:
    found, rows = batch(n), list(range(n))[::-1]
    return lambda: found.select(rows)


def minibatches(n: int, _: Path, __: ExitStack) -> Call:
    """Of 64 trajectories each."""
    found = batch(n, n // 64)
    return found.minibatches


def plan_step(n: int, _: Path, __: ExitStack) -> Call:
    found = batch(n)
    return lambda: plan(found, 2048)


def plan_minibatches(n: int, _: Path, __: ExitStack) -> Call:
    """As `plan_step`, in mini-batches of 64 trajectories each."""
    found = batch(n, n // 64)
    return lambda: plan(found, 2048)


def plan_large_rows(n: int, _: Path, __: ExitStack) -> Call:
    """Rows of more than half a micro-batch: no two of them go together."""
    found = batch(n)
    return lambda: plan(found, 3 * (PROMPT + SAMPLED) // 2)


def cut(n: int, _: Path, __: ExitStack) -> Call:
    """Select every micro-batch of a plan and make it compact, as the engine does."""
    found = batch(n).minibatches()[0]
    parts = plan(found, 2048)
    return lambda: [found.select(rows).compact() for rows in parts]


def measure(n: int, _: Path, __: ExitStack) -> Call:
    found = groups(n)
    packed = Batch.pack(found)
    return lambda: measure_batch(found, packed, 0)


def record(n: int, path: Path, stack: ExitStack) -> Call:
    """Issue, write samples, settle the ledger, write metrics."""
    recorder = recording(path, stack)
    found = groups(n)
    packed = GRPO().estimate(Batch.pack(found))
    steps = count(1)

    def call() -> None:
        step = next(steps)
        renamed = [again(g, step * n + g.index) for g in found]
        for g in renamed:
            recorder.issued(g.prompt, [(s.id, s.kind) for s in g.samples], step)
        recorder.trained(step, renamed, packed, {}, {"generate": 1.0})

    return call


def collect(n: int, path: Path, stack: ExitStack) -> Call:
    """Groups start, their samples come at once and are scored, `take` hands them over, `release` frees them."""

    class Prompts:
        skipped: dict[str, int] = {}  # noqa: RUF012 (a protocol's attribute)
        numbers = count()

        def next(self) -> Prompt:
            return prompt(next(self.numbers))

        def feedback(self, group: Group) -> None: ...
        def state(self) -> dict[str, Any]:
            return {}

        def restore(self, state: object) -> None: ...

    async def agent(request: Request, sample_id: str, rollout: object) -> list[Trajectory]:
        await asyncio.sleep(0)
        return [answers[int(sample_id.rpartition(".")[2])]]

    async def scorer(trajectory: Trajectory) -> Reward:
        return Reward(1.0)

    answers = [trajectory(prompt(0), number) for number in range(SIZE)]
    recorder = recording(path, stack)
    source: Any = Prompts()
    nothing: Any = None

    async def step() -> None:
        async with asyncio.TaskGroup() as tasks:
            collector = Collector(
                source, GRPO(), Sampler(agent, scorer, nothing, FailureBudget(1.0, n)), recorder, n // SIZE, 0
            )
            collector.start(tasks)
            found = await collector.take(n // SIZE, 1, 0)
            collector.state(found)
            collector.stop()

    return lambda: asyncio.run(step())


def failures(n: int, _: Path, __: ExitStack) -> Call:
    """Every twentieth sample fails."""

    def call() -> None:
        budget = FailureBudget(0.1, n)
        error = RewardError("the judge is down")
        for i in range(n):
            budget.note(error if i % 20 == 0 else None)

    return call


# ---------------------------------------------------------------------- a run's length


def balance(n: int, path: Path, stack: ExitStack) -> Call:
    """The books of a step of 64, when so many samples have ended before."""
    ledger = stack.enter_context(closing_ledger(path / "ledger.sqlite"))
    for index in range(n // SIZE):
        settle(ledger, index)
    ledger.commit()
    numbers = count(n // SIZE)

    def call() -> None:
        for _ in range(64 // SIZE):
            settle(ledger, next(numbers))
        ledger.balance()

    return call


def samples_files(n: int, path: Path, _: ExitStack) -> Call:
    """Find the files of so many steps, as a restart and `treadle inspect` do."""
    run = RunDirectory(path)
    run.samples.mkdir()
    for step in range(n):
        run.samples_file("step", step).touch()
    return lambda: run.samples_files("step")


def inspect_steps(n: int, path: Path, stack: ExitStack) -> Call:
    """`treadle inspect` of a run of so many steps."""
    recording(path, stack)
    with ExitStack() as closing:
        metrics = JsonLines(path / "metrics.jsonl")
        closing.callback(metrics.close)
        for step in range(1, n + 1):
            metrics.append(step, {"reward/mean": 0.5, "policy/loss": 0.1, "time/step": 1.0})
    return lambda: show(path, console=Console(file=StringIO()))


def inspect_samples(n: int, path: Path, stack: ExitStack) -> Call:
    """`treadle inspect` of a step of so many trajectories."""
    record(n, path, stack)()
    return lambda: show(path, console=Console(file=StringIO()))


# ---------------------------------------------------------------------- help


def recording(path: Path, stack: ExitStack) -> Recorder:
    directory = stack.enter_context(RunDirectory.open(path, "steps: 1\n"))
    progress = Progress(Console(file=StringIO()))
    recorder = stack.enter_context(Recorder(directory, RunConfig(dir=str(path)), 1, progress))
    recorder.restore()
    return recorder


def again(group: Group, index: int) -> Group:
    """The same group under another number, for every sample is recorded once."""
    samples = tuple(Sample(f"{index}.{i}", s.kind, s.trajectories) for i, s in enumerate(group.samples))
    return Group(index, prompt(index), samples)


def settle(ledger: Ledger, index: int) -> None:
    samples = {f"{index}.{i}": Kind.TRAIN for i in range(SIZE)}
    ledger.issue(index, f"data:{index}", samples, 1)
    for sample in samples:
        ledger.finish(sample, State.TRAINED, 1, reward=1.0)


@contextmanager
def closing_ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path)
    try:
        yield ledger
    finally:
        ledger.close()


# ---------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Cost:
    """What is timed: its name in the table, what is counted, how many of it."""

    name: str
    setup: Setup
    sizes: Sequence[int]
    axis: str = "trajectories"


STEP = (64, 256, 1024, 4096, 16384)

COSTS = (
    Cost("Batch.pack", pack, STEP),
    Cost("advantages (GRPO.estimate)", estimate, STEP),
    Cost("Batch.select, all rows", select, STEP),
    Cost("Batch.minibatches, of 64 rows", minibatches, STEP),
    Cost("plan of micro-batches", plan_step, STEP),
    Cost("plan, mini-batches of 64 rows", plan_minibatches, STEP),
    Cost("plan, rows over half a micro-batch", plan_large_rows, STEP),
    Cost("cutting all micro-batches", cut, STEP),
    Cost("metrics of a step (measure_batch)", measure, STEP),
    Cost("recording a step (samples, ledger, metrics)", record, STEP),
    Cost("collecting, all groups in flight", collect, STEP),
    Cost("counting failures", failures, STEP),
    Cost("inspect, samples of one step", inspect_samples, STEP),
    Cost("ledger balance after a step of 64", balance, (1024, 4096, 16384, 65536, 262144), "samples of the run"),
    Cost("finding the samples files", samples_files, (100, 400, 1600, 6400), "steps of the run"),
    Cost("inspect, metrics", inspect_steps, (100, 400, 1600, 6400), "steps of the run"),
)


def seconds(call: Call, least: float = 0.2) -> float:
    """CPU seconds of the fastest of three calls, or of as many as take `least` seconds; of one that takes a second."""
    times: list[float] = []
    while sum(times) < least or (len(times) < 3 and sum(times) < 1.0):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def measured(cost: Cost, sizes: Sequence[int], scratch: Path, limit: float = 20.0) -> dict[int, float]:
    """Seconds by size, until one takes more than `limit`."""
    found: dict[int, float] = {}
    for size in sizes:
        path = scratch / cost.setup.__name__ / str(size)
        path.mkdir(parents=True)
        with ExitStack() as stack:
            call = cost.setup(size, path, stack)
            found[size] = seconds(call)
        if found[size] > limit:
            break
    return found
