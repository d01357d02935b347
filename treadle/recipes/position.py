"""Where a run stands, kept in its checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.handles import TrainedHandle
    from treadle.recipes.collect import Collector
    from treadle.recipes.system import System


@dataclass(frozen=True)
class Position:
    """Where a run stands."""

    step: int = 0  # steps done
    version: int = 0  # of the weights that generate
    evaluated: int | None = None  # the step after which they were last evaluated
    saved: int | None = None  # the step of the last checkpoint
    data_ended: bool = False


class Saver:
    """Writes checkpoints. What a role writes in the background is waited for before the next one, and at the end."""

    def __init__(self, system: System, tasks: asyncio.TaskGroup) -> None:
        self._system, self._tasks = system, tasks
        self._last: asyncio.Task[None] | None = None

    async def save(self, now: Position, collector: Mapping[str, object]) -> Position:
        """A checkpoint of now: the place in the run and in the data, the algorithm, every trained role."""
        await self.done()
        system, now = self._system, replace(now, saved=now.step)
        state = {"position": asdict(now), "collector": collector, "algorithm": system.algorithm.state()}
        with ExitStack() as stack:
            path = stack.enter_context(system.record.checkpoint(now.step, state))
            writing = [model for role, model in system.learners.items() if await model.save(path / role)]
            if writing:
                self._last = self._tasks.create_task(self._written(writing, stack.pop_all()))
        return now

    async def done(self) -> None:
        """The last checkpoint is whole."""
        if self._last is not None:
            await self._last

    @staticmethod
    async def _written(writing: Sequence[TrainedHandle], whole: ExitStack) -> None:
        with whole:
            for outcome in await asyncio.gather(*(model.saved() for model in writing), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome


async def restore(system: System, collector: Collector) -> Position:
    """Go on from the latest checkpoint, or begin."""
    found = system.record.restore()
    if found is None:
        return Position()
    path, state = found
    for role, model in system.learners.items():
        await model.load(path / role)
    system.algorithm.restore(state["algorithm"])
    collector.restore(state["collector"])
    return Position(**state["position"])
