"""A group of workers as one object: its methods are coroutines that reach the ranks as their verbs say."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from treadle.controller.host import Failure
from treadle.controller.sharding import split
from treadle.controller.verbs import Verb, verb_of
from treadle.errors import TreadleError, WorkerError

STEP: ContextVar[int | None] = ContextVar("treadle_step", default=None)
"""The program's step, for errors to name."""
_ASK = 5.0  # seconds that a rank has to say what it is doing
_OTHERS = 2.0  # seconds in which other ranks may say more about a failure than the first that told of one


class Lost(Exception):
    """A rank's process is gone; the message says what is known."""


class Link(Protocol):
    """The way to one rank."""

    rank: int

    def send(self, role: str, method: str, args: Sequence[Any], ordered: bool) -> Awaitable[Any]:
        """Its result, or a `Failure`; raises `Lost`. Calls that are `ordered` run in the order of being sent."""
        ...

    async def status(self) -> tuple[bool, str]: ...

    def share(self, value: Any) -> Any:
        """What stands for an argument that several ranks get."""
        ...


class Group:
    """The worker's methods as coroutines: `await Group("policy", PolicyWorker, links).step(batch)`.

    Raises what a worker raised, if that is a `TreadleError`, and `WorkerError` for everything else: both say which
    role, rank and step it was, and have the worker's own traceback. After a death, a hang or a failure of a method that
    all ranks run, the ranks are no longer in step, and every further call raises that `WorkerError` again.
    """

    def __init__(
        self, role: str, worker: type, links: Sequence[Link], *, timeout: float, attention: float = 0.0
    ) -> None:
        """`timeout`: seconds that a call may take. `attention`: see `Shardable.units`."""
        self._role, self._worker, self._links = role, worker, links
        self._timeout, self._attention = timeout, attention
        self._broken: WorkerError | None = None

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        verb = verb_of(self._worker, name)
        ordered = not inspect.iscoroutinefunction(getattr(self._worker, name))

        async def call(*args: Any) -> Any:
            if self._broken is not None:
                raise self._broken
            links = self._links[:1] if verb is Verb.ONE else self._links
            if verb is Verb.SHARDED and len(links) > 1:
                whole, *others = args
                rows = split(whole.units(self._attention), len(links))
                told = [links[0].share(other) for other in others]
                calls = [
                    link.send(self._role, name, [whole.select(mine), *told], ordered)
                    for link, mine in zip(links, rows, strict=True)
                ]
                return whole.gather(rows, await self._all(name, links, calls))
            told = [links[0].share(arg) for arg in args] if len(links) > 1 else args
            calls = [link.send(self._role, name, told, ordered) for link in links]
            return (await self._all(name, links, calls))[0]

        return call

    async def _all(self, method: str, links: Sequence[Link], calls: Sequence[Awaitable[Any]]) -> list[Any]:
        """All results, or the error that tells most."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            waiting, started = set(tasks), asyncio.get_running_loop().time()
            while waiting:
                left = self._timeout - (asyncio.get_running_loop().time() - started)
                done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done or any(_failed(task) for task in done):
                    raise await self._error(method, links, tasks)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _error(self, method: str, links: Sequence[Link], tasks: Sequence[asyncio.Task[Any]]) -> Exception:
        failed = any(_failed(task) for task in tasks)
        if failed and len(tasks) > 1:  # what broke a rank breaks the others' collectives, perhaps before it is told
            await asyncio.wait(tasks, timeout=_OTHERS)
        told = [
            (link, task.exception() or task.result()) for link, task in zip(links, tasks, strict=True) if task.done()
        ]
        told = [(link, what) for link, what in told if isinstance(what, Failure | BaseException)]
        raised = [(link, what) for link, what in told if isinstance(what, Failure)]
        first = [(link, what) for link, what in raised if not what.collective]
        lost = [(link, what) for link, what in told if not isinstance(what, Failure)]
        if first or lost:
            error = self._told(method, *(first or lost)[0])
        else:
            error = await self._hung(method, links, tasks, raised)
        if isinstance(error, WorkerError) or len(tasks) > 1:
            self._broken = error if isinstance(error, WorkerError) else WorkerError(str(error))
        return error

    def _told(self, method: str, link: Link, what: Any) -> Exception:
        where = self._where(method, f"rank {link.rank} of {len(self._links)}")
        if not isinstance(what, Failure):
            return WorkerError(f"{where}: {what}")
        cause = WorkerError(f"{where}, there:\n{what.traceback}")
        error = what.error if isinstance(what.error, TreadleError) else WorkerError(f"{where}: {what.text}")
        error.__cause__ = cause
        return error

    async def _hung(
        self,
        method: str,
        links: Sequence[Link],
        tasks: Sequence[asyncio.Task[Any]],
        raised: Sequence[tuple[Link, Failure]],
    ) -> WorkerError:
        """Nobody says what is wrong, or only ranks that waited for others: whoever is somewhere else is missing."""
        late = [link for link, task in zip(links, tasks, strict=True) if not task.done()]
        doing = await asyncio.gather(*(_status(link) for link in late))
        missing = [(link, at) for link, (collective, at) in zip(late, doing, strict=True) if not collective]
        where = self._where(method, "")
        if missing:
            names = "; ".join(f"rank {link.rank} is at {at}" for link, at in missing)
            waiting = len(links) - len(missing)
            others = f", and {waiting} of {len(links)} ranks wait for it" if waiting else ""
            return WorkerError(f"{where}: no end within {self._timeout:g} s (controller.timeout): {names}{others}")
        if raised:
            return self._as_worker_error(self._told(method, *raised[0]))
        names = "; ".join(f"rank {link.rank} at {at}" for link, (_, at) in zip(late, doing, strict=True))
        return WorkerError(
            f"{where}: no end within {self._timeout:g} s (controller.timeout): all ranks wait in a collective, {names}"
        )

    @staticmethod
    def _as_worker_error(error: Exception) -> WorkerError:
        return error if isinstance(error, WorkerError) else WorkerError(str(error))

    def _where(self, method: str, rank: str) -> str:
        step = STEP.get()
        return " ".join(
            filter(None, [f"{self._role}.{method}", rank and f"on {rank}", "" if step is None else f"in step {step}"])
        )


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.exception() is not None or isinstance(task.result(), Failure))


async def _status(link: Link) -> tuple[bool, str]:
    try:
        return await asyncio.wait_for(link.status(), _ASK)
    except TimeoutError:
        return False, "a stop: its process does not answer"
    except Lost as lost:
        return False, f"its end: {lost}"
