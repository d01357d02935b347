"""A group of workers as one object: its methods are coroutines that reach the ranks as their verbs say."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from treadle.controller.host import Failure
from treadle.controller.sharding import split
from treadle.controller.verbs import Verb, arguments, verb_of
from treadle.errors import WorkerError

STEP: ContextVar[int | None] = ContextVar("treadle_step", default=None)
"""The program's step, for errors to name."""
Turn = Callable[[], AbstractAsyncContextManager[None]]
_ASK = 5.0  # seconds that a rank has to say what it is doing
_OTHERS = 2.0  # seconds in which other ranks may say more about a failure than the first that told of one
_NAMED = 4  # ranks that a message names one by one


class Lost(Exception):
    """A rank cannot be used any more; the message says what is known."""


class Link(Protocol):
    """The way to one rank."""

    rank: int
    fate: asyncio.Future[WorkerError]
    """What has put an end to its use, for all groups with a worker there."""

    def send(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], ordered: bool
    ) -> Awaitable[Any]:
        """Its result, or a `Failure`; raises `Lost`. Calls that are `ordered` run in the order of being sent. What
        cannot be sent raises here, and leaves no trace."""
        ...

    async def status(self) -> tuple[bool, str]:
        """Whether it waits for other ranks, and the line of code it is at."""
        ...

    def share(self, value: Any) -> Any:
        """What stands for an argument, which has left this process when this returns. From any thread."""
        ...


@dataclass(frozen=True)
class Where:
    """What was called, for errors to name."""

    what: str
    ranks: int
    step: int | None = None
    limit: str = "controller.timeout"

    def at(self, *ranks: int) -> str:
        shown = ", ".join(map(str, ranks[:_NAMED])) + (" and others" if len(ranks) > _NAMED else "")
        where = f" on rank{'s' if len(ranks) > 1 else ''} {shown} of {self.ranks}" if ranks else ""
        return self.what + where + ("" if self.step is None else f" in step {self.step}")


class Group:
    """The worker's methods as coroutines: `await Group("policy", PolicyWorker, links).step(batch)`.

    Raises what a worker raised, if that is a `TreadleError`, and `WorkerError` for everything else: both say which
    role, rank and step it was, and have the worker's own traceback. After a death, a hang or a failure of a method that
    several ranks run, the ranks are no longer in step: every further call there raises at once, of any role.
    """

    def __init__(
        self,
        role: str,
        worker: type,
        links: Sequence[Link],
        *,
        timeout: float,
        attention: float = 0.0,
        turn: Turn = nullcontext,
    ) -> None:
        """`timeout`: seconds that a call may take, its wait for other calls on these ranks included. `attention`: see
        `Shardable.units`. `turn` is entered over each call that computes."""
        self._role, self._worker, self._links = role, worker, links
        self._timeout, self._attention, self._turn = timeout, attention, turn

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        verb = verb_of(self._worker, name)
        ordered = not inspect.iscoroutinefunction(getattr(self._worker, name))

        async def call(*args: Any, **kwargs: Any) -> Any:
            async with self._turn() if ordered else nullcontext():
                return await self._call(verb, name, args, kwargs, ordered)

        return call

    async def _call(self, verb: Verb, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ordered: bool) -> Any:
        args, kwargs = arguments(self._worker, name, args, kwargs)
        check(self._links)
        where = Where(f"{self._role}.{name}", len(self._links), STEP.get())
        links = self._links[:1] if verb is Verb.ONE else self._links
        if len(links) == 1:
            return (await self._run(where, links, name, [args], kwargs, ordered))[0]
        # All that can fail for its size or its kind comes before the first rank is told.
        kwargs = {key: links[0].share(value) for key, value in kwargs.items()}
        if verb is not Verb.SHARDED:
            told = [links[0].share(arg) for arg in args]
            return (await self._run(where, links, name, [told] * len(links), kwargs, ordered))[0]
        whole, *others = args
        told = [links[0].share(other) for other in others]
        rows = split(whole.units(self._attention), len(links))
        with ThreadPoolExecutor() as threads:  # what it takes to send a part is copied outside of Python's lock
            shared = list(threads.map(lambda link, mine: link.share(whole.select(mine)), links, rows))
        parts = [[part, *told] for part in shared]
        return whole.gather(rows, await self._run(where, links, name, parts, kwargs, ordered))

    async def _run(
        self,
        where: Where,
        links: Sequence[Link],
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any],
        ordered: bool,
    ) -> list[Any]:
        calls: list[asyncio.Future[Any]] = []
        try:
            for link, given in zip(links, args, strict=True):
                calls.append(asyncio.ensure_future(link.send(self._role, method, given, kwargs, ordered)))
        except Exception as error:
            for call in calls:
                call.add_done_callback(lambda call: call.cancelled() or call.exception())
            if calls:  # some ranks were told and others not
                end(self._links, WorkerError(f"{where.at(links[len(calls)].rank)}: it could not be told: {error}"))
            raise
        del args
        return await together(where, links, calls, self._timeout, self._links)


def check(links: Iterable[Link]) -> None:
    """Raises what has put an end to the use of one of them."""
    for link in links:
        if link.fate.done():
            raise WorkerError(str(link.fate.result())) from link.fate.result()


def end(links: Iterable[Link], error: WorkerError) -> None:
    for link in links:
        if not link.fate.done():
            link.fate.set_result(error)


async def together(
    where: Where, links: Sequence[Link], calls: Iterable[Awaitable[Any]], timeout: float, group: Sequence[Link] = ()
) -> list[Any]:
    """All results, or the error that tells most, after which no rank of the `group` can be used any more.

    If nobody waits for the results any longer, they still end its use if they are errors.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    group = group or links
    fates = [link.fate for link in group]
    end_by = asyncio.get_running_loop().time() + timeout
    try:
        while waiting := [task for task in tasks if not task.done()]:
            left = max(end_by - asyncio.get_running_loop().time(), 0)
            done, _ = await asyncio.wait([*waiting, *fates], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done or any(_failed(task) for task in tasks):
                break
            check(group)
    except WorkerError:
        for task in tasks:
            task.add_done_callback(_told)
            task.cancel()
        raise
    except asyncio.CancelledError:
        for link, task in zip(links, tasks, strict=True):
            task.add_done_callback(lambda task, link=link: _unheard(where, link, group, task))
        raise
    if all(task.done() and not _failed(task) for task in tasks):
        check(group)
        return [task.result() for task in tasks]
    try:
        error = await _blame(where, links, tasks, timeout)
        alone = len(tasks) == 1 and isinstance(_told(tasks[0]), Failure)
        if not alone:  # one rank that raised is as much in step with itself as before
            end(group, error if isinstance(error, WorkerError) else WorkerError(str(error)))
        raise error
    finally:
        for task in tasks:
            task.add_done_callback(_told)
            task.cancel()


def _unheard(where: Where, link: Link, group: Sequence[Link], task: asyncio.Task[Any]) -> None:
    """A call that nobody waits for has ended."""
    if (what := _told(task)) is not None and (len(group) > 1 or not isinstance(what, Failure)):
        error = _error(where, link, what)
        end(group, error if isinstance(error, WorkerError) else WorkerError(str(error)))


def _told(task: asyncio.Task[Any]) -> Failure | BaseException | None:
    """What went wrong; None while nothing has."""
    if not task.done() or task.cancelled():
        return None
    what = task.exception() or task.result()
    return what if isinstance(what, Failure | BaseException) else None


def _failed(task: asyncio.Task[Any]) -> bool:
    return _told(task) is not None


async def _blame(where: Where, links: Sequence[Link], tasks: Sequence[asyncio.Task[Any]], timeout: float) -> Exception:
    """The error that tells most: of a rank that died; then of one that failed by itself; then of whoever is missing
    where the others wait."""
    failed = any(_failed(task) for task in tasks)
    if failed and len(tasks) > 1:  # what broke a rank breaks the others' collectives, perhaps before it is told
        await asyncio.wait(tasks, timeout=_OTHERS)
    told = [(link, what) for link, task in zip(links, tasks, strict=True) if (what := _told(task)) is not None]
    lost = [(link, what) for link, what in told if not isinstance(what, Failure)]
    alone = [(link, what) for link, what in told if isinstance(what, Failure) and not what.collective]
    if lost or alone:
        return _error(where, *(lost or alone)[0])
    returned = [link.rank for link, task in zip(links, tasks, strict=True) if task.done() and not _failed(task)]
    late = [link for link, task in zip(links, tasks, strict=True) if not task.done()]
    doing = await asyncio.gather(*(_status(link) for link in late))
    elsewhere = {link.rank: at for link, (waits, at) in zip(late, doing, strict=True) if not waits}
    inside = {link.rank: at for link, (waits, at) in zip(late, doing, strict=True) if waits}
    why = f"no end within {timeout:g} s ({where.limit})"
    if told:
        assert isinstance(told[0][1], Failure)
        why = f"a collective failed on rank {told[0][0].rank} ({told[0][1].text})"
    if not inside and not told and not elsewhere:
        return WorkerError(f"{where.at()}: {why}")
    if not inside and told and not elsewhere and not returned:
        return _error(where, *told[0])
    waiting = [*inside, *(link.rank for link, _ in told)]
    others = f"{len(waiting)} of {where.ranks} ranks wait in a collective" if waiting else ""
    if inside:
        rank, at = next(iter(inside.items()))
        others += f", rank {rank} at {at}"
    if elsewhere:
        named = [f"rank {rank} is at {at}" for rank, at in list(elsewhere.items())[:_NAMED]]
        return _caused(
            WorkerError(f"{where.at(*elsewhere)}: {why}: {'; '.join(filter(None, [*named, others]))}"), where, told
        )
    if returned:
        missing = "has returned without joining"
        text = f"{where.at(*returned)}: {why}: {others}, which rank {', '.join(map(str, returned[:_NAMED]))} {missing}"
        return _caused(WorkerError(text), where, told)
    return _caused(WorkerError(f"{where.at(*inside)}: {why}: {others}"), where, told)


def _error(where: Where, link: Link, what: Failure | BaseException) -> Exception:
    if not isinstance(what, Failure):
        error = WorkerError(f"{where.at(link.rank)}: {what}")
        error.__cause__ = what
        return error
    return _caused(what.known() or WorkerError(f"{where.at(link.rank)}: {what.text}"), where, [(link, what)])


def _caused(error: Exception, where: Where, told: Sequence[tuple[Link, Any]]) -> Exception:
    """With the traceback that was found there."""
    for link, what in told[:1]:
        error.__cause__ = WorkerError(f"{where.at(link.rank)}, there:\n{what.traceback}")
    return error


async def _status(link: Link) -> tuple[bool, str]:
    try:
        return await asyncio.wait_for(link.status(), _ASK)
    except TimeoutError:
        return False, "a stop: its process does not answer"
    except Lost as lost:
        return False, f"its end: {lost}"
