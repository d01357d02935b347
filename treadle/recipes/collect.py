"""Collecting: prompts become groups of scored samples, at most so many at a time, handed over in start order.

    slots: (max_staleness + 1) × prompts_per_step
      │ taken when a group starts      given back when the step that trained it has ended, or it was filtered │
      ▼                                                                                                       │
    prompt ─► requests ─► agent ─► reward ─► started, in start order ─► take(n): keep? ─► n groups to train ──┘

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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.errors import RewardError, RolloutError, TrainingError, TreadleError
from treadle.types import Ended, Group, Kind, Prompt, Request, Reward, Sample, Trajectory

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
        self._failed = 0  # of the latest

    def note(self, error: TreadleError | None) -> None:
        """Count a sample that ended, with the error that failed it; raises that error when it is one too many."""
        if len(self._latest) == self._latest.maxlen:
            self._failed -= self._latest.popleft()
        self._latest.append(error is not None)
        self._failed += error is not None
        if error is not None and self._failed > self._allowed:
            error.add_note(
                f"{self._failed} of the latest {len(self._latest)} samples failed; "
                f"reward.max_failed allows {self._allowed:g} of {self._latest.maxlen}"
            )
            raise error


@dataclass
class Sampler:
    """Turns one request into one scored sample, or into one that says why it failed."""

    agent: Agent
    scorer: Scorer
    rollout: RolloutHandle
    failures: FailureBudget

    async def __call__(self, request: Request, sample_id: str) -> Sample:
        trajectories = await self.agent(request, sample_id, self.rollout)
        if not trajectories:
            raise RolloutError(f"sample {sample_id}: the agent returned no trajectory; it must return at least one")
        error: TreadleError | None = None
        try:
            trajectories = await self._scored(trajectories, sample_id)
        except (RewardError, RolloutError) as raised:
            error = raised
        self.failures.note(error)
        return Sample(sample_id, request.kind, tuple(trajectories), failure=None if error is None else str(error))

    async def _scored(self, trajectories: list[Trajectory], sample_id: str) -> list[Trajectory]:
        """All with the reward of the last one, which ended the episode; its turns are its own."""
        if any(t.ended is Ended.FAILED for t in trajectories):
            raise RolloutError(f"sample {sample_id}: what the agent works with failed")
        *others, last = trajectories
        reward = last.reward if last.reward is not None else await self.scorer(last)
        shared = Reward(reward.value, reward.parts)
        return [*(replace(t, reward=shared) for t in others), replace(last, reward=reward)]


@dataclass
class Collector:
    """Starts groups as slots allow and hands them over in the order they started."""

    prompts: PromptSource
    algorithm: Algorithm
    sample: Sampler
    record: Recorder
    slots: int
    max_filtered: int  # groups in a row that filters may drop
    pending: list[Prompt] = field(default_factory=list)  # in flight when the checkpoint was written: they go first

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)
        self._started: asyncio.Queue[asyncio.Task[Group] | None] = asyncio.Queue()
        self._held: dict[int, Prompt] = {}  # prompts whose groups hold a slot
        self._tasks: set[asyncio.Task[Any]] = set()
        self._step = self._version = self._done = 0

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to fill the slots."""
        self._own(tasks.create_task(self._run(tasks)))

    def stop(self) -> None:
        """Give up what is in flight; the ledger will say `cancelled`."""
        for task in self._tasks:
            task.cancel()

    async def take(self, count: int, step: int, version: int) -> list[Group]:
        """The next `count` groups worth training, in start order; fewer only where the data end.

        As many groups as are missing are waited for, then judged together: so what takes the place of filtered ones
        starts at an instant that does not depend on how long rewards took, and equal runs stay equal.
        """
        self._step, self._version, self._done = step, version, 0
        groups: list[Group] = []
        filtered = 0
        while missing := count - len(groups):
            found = await self._next(missing)
            for group in found:
                self.prompts.feedback(group)
                why = self._verdict(group)
                if why is None:
                    groups.append(group)
                    filtered = 0
                    continue
                self.record.filtered(group, step, why)
                self.release([group])
                filtered += 1
                if filtered > self.max_filtered:
                    raise TrainingError(
                        f"{filtered} groups in a row were filtered ({why!r} the last), {len(groups)} of {count} are "
                        f"left to train in step {step}. `treadle inspect` shows them; make the task easier or harder, "
                        "or raise max_filtered_groups"
                    )
            if len(found) < missing:
                break
        return groups

    def release(self, groups: list[Group]) -> None:
        """Give back the slots of these groups."""
        for group in groups:
            del self._held[group.prompt.index]
            self._free.release()

    def state(self, consumed: list[Group]) -> dict[str, Any]:
        """What a restart needs: the source's position and the prompts in flight beside those just consumed."""
        done = {group.prompt.index for group in consumed}
        in_flight = [prompt for index, prompt in sorted(self._held.items()) if index not in done]
        # Pickled, for answers and metadata may hold what JSON does not.
        return {"source": self.prompts.state(), "in_flight": base64.b64encode(pickle.dumps(in_flight)).decode()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`."""
        self.prompts.restore(state["source"])
        self.pending = pickle.loads(base64.b64decode(state["in_flight"]))

    # ------------------------------------------------------------------ inside

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._free.acquire()
            prompt = self.pending.pop(0) if self.pending else self.prompts.next()
            if prompt is None:
                return self._started.put_nowait(None)
            self._held[prompt.index] = prompt
            requests = {f"{prompt.index}.{i}": r for i, r in enumerate(self._requests(prompt))}
            self.record.issued(prompt, [(i, r.kind) for i, r in requests.items()], self._step)
            task = tasks.create_task(self._group(prompt, requests, self._version))
            self._own(task)
            self._started.put_nowait(task)

    async def _group(self, prompt: Prompt, requests: Mapping[str, Request], version: int) -> Group:
        samples = await gather(self._sample(request, i) for i, request in requests.items())
        return Group(prompt.index, prompt, tuple(samples), version)

    async def _sample(self, request: Request, sample_id: str) -> Sample:
        sample = await self.sample(request, sample_id)
        self._done += 1
        self.record.progress.stage("generate", self._done, len(self._held) * self.algorithm.config.group_size)
        return sample

    async def _next(self, count: int) -> list[Group]:
        """The next groups in start order; fewer where the data end."""
        groups: list[Group] = []
        while len(groups) < count:
            task = await self._started.get()
            if task is None:
                self._started.put_nowait(None)
                break
            groups.append(await task)
        return groups

    def _requests(self, prompt: Prompt) -> list[Request]:
        found = self.algorithm.requests(prompt)
        if not isinstance(found, list) or not any(isinstance(r, Request) and r.kind is Kind.TRAIN for r in found):
            name = type(self.algorithm).__name__
            raise TrainingError(f"{name}.requests returned {found!r:.80}; allowed is a list with a Request to train")
        return found

    def _verdict(self, group: Group) -> str | None:
        """Why a group is not trained, or None."""
        if not any(sample.kind is Kind.TRAIN for sample in group.usable):
            return "every sample failed"
        why = self.algorithm.keep(group)
        if why is not None and not isinstance(why, str):
            name = type(self.algorithm).__name__
            raise TrainingError(f"{name}.keep returned {why!r:.80}; allowed is None to keep a group, or why not")
        return why

    def _own(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the first that raises cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(c) for c in coroutines]
    except BaseExceptionGroup as group:
        error = first(group)
        raise error from error.__cause__
    return [task.result() for task in running]


def first(error: BaseException) -> BaseException:
    """The first real error inside nested exception groups, with its own traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
