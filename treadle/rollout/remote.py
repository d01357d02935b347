"""A pool's replica in another process, behind a handle of the controller.

    stream ──► submit: requests that are made together travel together, in order
    poll   ◄── pieces of all of them, whatever came since the last answer

Tokens are counted, so a pause returns when all that were sampled before it have arrived.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from treadle.errors import ReplicaLost, RolloutError, WorkerError
from treadle.rollout.replicas import Loaded, Piece, Replica
from treadle.types import TokenRequest
from treadle.weights.digest import Manifest
from treadle.weights.stream import Address

T = TypeVar("T")
_QUIET_ROUNDS = 32  # rounds of the event loop without a new request: more than a chain of awaits has links
_IDLE = 10.0  # seconds after which a poll answers that nothing came


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way to a replica."""

    number: int
    request: TokenRequest
    seed: int


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of one: a piece, an error, or its end."""

    number: int
    piece: Piece | None
    error: RolloutError | None = None


class Serving:
    """The replica's side: streams what is asked, and keeps what comes until it is fetched."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asked = -1  # the last number
        self._dropped: set[int] = set()  # before they were asked: calls may overtake each other
        self._heard: list[Heard] = []
        self._count = 0  # heard so far
        self._news = asyncio.Event()

    def submit(self, asked: Sequence[Asked]) -> None:
        for one in asked:
            self._asked = one.number
            if one.number in self._dropped:
                self._dropped.remove(one.number)
                continue
            task = self._tasks[one.number] = asyncio.ensure_future(self._stream(one))
            task.add_done_callback(lambda _, number=one.number: self._tasks.pop(number))

    async def drop(self, number: int) -> None:
        """End a request; returns when the replica is rid of it."""
        if number > self._asked:
            self._dropped.add(number)
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def poll(self) -> tuple[list[Heard], Mapping[str, float]]:
        """What came since the last call, as soon as anything did; and the replica's figures."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_IDLE):
                await self._news.wait()
        for _ in range(4):  # the rows of a step are told one by one
            await asyncio.sleep(0)
        heard, self._heard = self._heard, []
        self._news.clear()
        return heard, self.replica.stats()

    async def pause(self, keep_cache: bool) -> int:
        """Stop; how much has been heard by then."""
        await self.replica.pause(keep_cache)
        for _ in range(_QUIET_ROUNDS):  # what was sampled reaches the streams
            await asyncio.sleep(0)
        return self._count

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        try:
            await self.replica.close()
        finally:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, one: Asked) -> None:
        try:
            async for piece in self.replica.stream(one.request, one.seed):
                self._tell(Heard(one.number, piece))
        except RolloutError as error:
            self._tell(Heard(one.number, None, error))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # told to whoever asked, whatever it is
            self._tell(Heard(one.number, None, RolloutError(f"sample '{one.request.id}': {error!r}")))
        else:
            self._tell(Heard(one.number, None))

    def _tell(self, heard: Heard) -> None:
        self._heard.append(heard)
        self._count += 1
        self._news.set()


class Handle(Protocol):
    """The worker that holds a `Serving`, as the controller sees it. Raises `WorkerError` where it is gone."""

    async def start(self, name: str) -> Any: ...
    async def submit(self, asked: Sequence[Asked]) -> None: ...
    async def drop(self, number: int) -> None: ...
    async def poll(self) -> tuple[list[Heard], Mapping[str, float]]: ...
    async def pause(self, keep_cache: bool) -> int: ...
    async def resume(self) -> None: ...
    async def expect(self, address: Address) -> None: ...
    async def received(self) -> Sequence[Manifest]: ...
    async def load(self, version: int) -> Loaded: ...
    async def sleep(self) -> None: ...
    async def arrive(self) -> None:
        """Wait until whoever else works on the engine's devices has left them."""
        ...

    async def wake(self) -> None: ...
    async def end(self) -> None: ...


class RemoteReplica:
    """A `Replica` whose engine is somewhere else."""

    def __init__(self, name: str, handle: Handle, capacity: int, processes: int) -> None:
        """`processes`: of the engine, that take weights."""
        self.name, self.capacity = name, capacity
        self.receivers = tuple(f"{name}-{rank}" for rank in range(processes))
        self._handle = handle
        self._numbers = itertools.count()
        self._asked: list[Asked] = []
        self._pieces: dict[int, asyncio.Queue[Heard]] = {}
        self._heard = 0
        self._news = asyncio.Event()  # more was heard, or the replica is lost
        self._tasks: list[asyncio.Task[None]] = []
        self._new = asyncio.Event()
        self._figures: Mapping[str, float] = {}
        self._lost: ReplicaLost | None = None

    async def start(self) -> None:
        await self._safely(self._handle.start(self.name))
        self._tasks = [asyncio.ensure_future(work) for work in (self._send(), self._fetch())]

    async def stream(self, request: TokenRequest, seed: int) -> AsyncIterator[Piece]:
        """Tokens as they come. Leaving the iteration ends the request."""
        if self._lost is not None:
            raise self._lost
        number, ended = next(self._numbers), False
        pieces = self._pieces[number] = asyncio.Queue()
        self._asked.append(Asked(number, request, seed))
        self._new.set()
        try:
            while True:
                heard = await pieces.get()
                if heard.piece is None:
                    ended = True
                    if heard.error is not None:
                        raise heard.error
                    return
                ended = heard.piece.finish is not None
                yield heard.piece
        finally:
            del self._pieces[number]
            sent = len(self._asked)
            self._asked = [asked for asked in self._asked if asked.number != number]
            if not ended and self._lost is None and sent == len(self._asked):
                with suppress(ReplicaLost):
                    await self._safely(self._handle.drop(number))

    async def pause(self, keep_cache: bool) -> None:
        """Stop between two tokens. All that came before has been given to those who wait for it."""
        count = await self._safely(self._handle.pause(keep_cache))
        while self._heard < count and self._lost is None:
            self._news.clear()
            await self._news.wait()
        if self._lost is not None:
            raise self._lost

    async def resume(self) -> None:
        await self._safely(self._handle.resume())

    async def expect(self, address: Address) -> None:
        await self._safely(self._handle.expect(address))

    async def received(self) -> Sequence[Manifest]:
        return await self._safely(self._handle.received())

    async def load(self, version: int) -> Loaded:
        return await self._safely(self._handle.load(version))

    async def sleep(self) -> None:
        await self._safely(self._handle.sleep())

    async def wake(self) -> None:
        await self._safely(self._handle.arrive())
        await self._safely(self._handle.wake())

    def stats(self) -> Mapping[str, float]:
        return self._figures

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        self._give_up(ReplicaLost(f"rollout engine {self.name} was ended"))
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(ReplicaLost):
            await self._safely(self._handle.end())

    # ------------------------------------------------------------------ help

    async def _send(self) -> None:
        """Requests go in batches, one after another: those of a step arrive in order, and together."""
        while True:
            await self._new.wait()
            self._new.clear()
            quiet, seen = 0, len(self._asked)
            while quiet < _QUIET_ROUNDS:
                await asyncio.sleep(0)
                quiet = quiet + 1 if seen == len(self._asked) else 0
                seen = len(self._asked)
            asked, self._asked = self._asked, []
            if asked:
                try:
                    await self._safely(self._handle.submit(asked))
                except ReplicaLost as lost:
                    self._give_up(lost)
                    return

    async def _fetch(self) -> None:
        while True:
            try:
                heard, self._figures = await self._safely(self._handle.poll())
            except ReplicaLost as lost:
                self._give_up(lost)
                return
            for one in heard:
                if one.number in self._pieces:
                    self._pieces[one.number].put_nowait(one)
            self._heard += len(heard)
            self._news.set()

    def _give_up(self, lost: ReplicaLost) -> None:
        self._lost = lost
        self._news.set()
        for number, pieces in self._pieces.items():
            pieces.put_nowait(Heard(number, None, lost))

    async def _safely(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except WorkerError as error:
            raise ReplicaLost(f"rollout engine {self.name} is gone: {error}") from error
