"""Collecting: prompts become groups of scored samples, at most so many at a time, handed over in start order.

    slots: (max_staleness + 1) × prompts_per_step
      │ acquired when a group starts                      │ given back when the step that trained it has ended,
      ▼                                                   │ or at once when a filter drops the group
    prompt ─► requests ─► agent ─► reward ─► keep? ─► started (a queue in start order) ─► take(n)

Consumption in *start* order is what bounds staleness: while a group is unconsumed at most
(max_staleness + 1) × prompts_per_step - 1 older ones hold slots, so it trains at most max_staleness steps after the
one in progress when it started. In completion order one slow group would grow arbitrarily old.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.errors import RewardError, TrainingError
from treadle.types import Group, Prompt, Request, Sample

if TYPE_CHECKING:
    from treadle.algorithms.base import Algorithm
    from treadle.handles import Agent, PromptSource, RolloutHandle, Scorer
    from treadle.runs.recorder import Recorder

T = TypeVar("T")


class FailureBudget:
    """Ends the run when more than `share` of the latest `window` samples failed."""

    def __init__(self, share: float, window: int) -> None:
        self._allowed = share * window
        self._latest: deque[bool] = deque(maxlen=window)

    def note(self, error: RewardError | None) -> None:
        """Count a sample that ended, with the error that failed it; raises that error when it is one too many."""
        self._latest.append(error is not None)
        if error is not None and sum(self._latest) > self._allowed:
            error.add_note(
                f"{sum(self._latest)} of the latest {len(self._latest)} samples failed; "
                f"reward.max_failed allows {self._allowed:g} of {self._latest.maxlen}"
            )
            raise error


@dataclass
class Sampler:
    """Turns one request into one scored sample."""

    agent: Agent
    scorer: Scorer
    rollout: RolloutHandle
    failures: FailureBudget

    async def __call__(self, request: Request, sample_id: str) -> Sample:
        trajectories = await self.agent(request, sample_id, self.rollout)
        try:
            reward = await self.scorer(trajectories[-1])
        except RewardError as error:
            self.failures.note(error)
            return Sample(sample_id, request.kind, tuple(trajectories), failure=str(error))
        self.failures.note(None)
        return Sample(sample_id, request.kind, tuple(t.rewarded(reward) for t in trajectories))


@dataclass
class Collector:
    """Starts groups as slots allow and hands them over in the order they started."""

    prompts: PromptSource
    algorithm: Algorithm
    sample: Sampler
    record: Recorder
    slots: int
    max_filtered: int  # consecutive groups that filters may drop while one step is being filled
    version: int = 0
    step: int = 0
    pending: list[Prompt] = field(default_factory=list)  # in flight when the checkpoint was written: they go first

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)
        self._started: asyncio.Queue[asyncio.Task[Group | None] | None] = asyncio.Queue()
        self._in_flight: dict[int, Prompt] = {}
        self._finished = 0  # samples of groups that are still held
        self._running: set[asyncio.Task[Group | None]] = set()

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Start groups until the data ends."""
        while True:
            await self._free.acquire()
            again = bool(self.pending)
            prompt = self.pending.pop(0) if again else self.prompts.next()
            if prompt is None:
                return self._started.put_nowait(None)
            self._in_flight[prompt.index] = prompt
            task = tasks.create_task(self._group(prompt, again))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            self._started.put_nowait(task)

    def stop(self) -> None:
        """Give up what is in flight; the ledger will say `cancelled`."""
        for task in self._running:
            task.cancel()

    async def take(self, count: int) -> list[Group]:
        """The next `count` groups worth training, in start order; fewer only where the data ends."""
        groups: list[Group] = []
        filtered = 0
        while len(groups) < count:
            task = await self._started.get()
            if task is None:
                self._started.put_nowait(None)
                break
            group = await task
            if group is not None:
                groups.append(group)
            elif (filtered := filtered + 1) > self.max_filtered:
                raise TrainingError(
                    f"{filtered} groups in a row were filtered and only {len(groups)} of {count} are left to train in "
                    f"step {self.step}. `treadle inspect` shows them and why; make the task easier or harder, or raise "
                    "max_filtered_groups"
                )
        return groups

    def release(self, groups: list[Group]) -> None:
        """The step that trained these groups has ended."""
        for group in groups:
            self.prompts.feedback(group)
            self._give_back(group.prompt)

    def state(self, consumed: list[Group]) -> dict[str, Any]:
        """What a restart needs: the source's position and the prompts in flight beside those just consumed."""
        done = {group.index for group in consumed}
        in_flight = [prompt for index, prompt in sorted(self._in_flight.items()) if index not in done]
        # Pickled, for answers and metadata may hold what JSON does not.
        return {"source": self.prompts.state(), "in_flight": base64.b64encode(pickle.dumps(in_flight)).decode()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`."""
        self.prompts.restore(state["source"])
        self.pending = pickle.loads(base64.b64decode(state["in_flight"]))

    def _give_back(self, prompt: Prompt) -> None:
        del self._in_flight[prompt.index]
        self._finished = max(0, self._finished - self.algorithm.config.group_size)
        self._free.release()

    async def _sample(self, request: Request, sample_id: str) -> Sample:
        sample = await self.sample(request, sample_id)
        self._finished += 1
        self.record.progress.stage("generate", self._finished, len(self._in_flight) * self.algorithm.config.group_size)
        return sample

    async def _group(self, prompt: Prompt, again: bool) -> Group | None:
        """Run one group, issued already if `again`; None if it was filtered."""
        version = self.version
        requests = self.algorithm.requests(prompt)
        ids = [f"{prompt.index}.{i}" for i in range(len(requests))]
        if not again:
            self.record.issued(prompt, [(i, r.kind) for i, r in zip(ids, requests, strict=True)], self.step)
        samples = await gather(self._sample(r, i) for r, i in zip(requests, ids, strict=True))
        group = Group(prompt.index, prompt, tuple(samples), version)
        why = "every sample failed" if not group.usable else self.algorithm.keep(group)
        if why is None:
            return group
        self.record.filtered(group, self.step, why)
        self._give_back(prompt)
        return None


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the first that raises cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(c) for c in coroutines]
    except BaseExceptionGroup as group:
        raise first(group) from None
    return [task.result() for task in running]


def first(error: BaseException) -> BaseException:
    """The first real error inside nested exception groups, with its own traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
