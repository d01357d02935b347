"""What a pool needs of an engine, in whatever process that runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from treadle.rollout.router import Load

if TYPE_CHECKING:
    from treadle.types import TokenRequest
    from treadle.weights.digest import Manifest
    from treadle.weights.stream import Address

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """What came next of one request."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None = None  # the engine's reason, with the last piece
    versions: Sequence[int] | None = None  # of all tokens of this request, where the engine knows them, with the last


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one replica did for a publish; seconds."""

    manifests: Sequence[Manifest]  # one a process
    load: float = 0.0
    readback: float = 0.0
    digest: float = 0.0


class Replica(Protocol):
    """One engine. Its methods raise `ReplicaLost` when it is gone."""

    name: str
    capacity: int
    receivers: tuple[str, ...]  # its processes that take weights

    async def start(self) -> None: ...
    def stream(self, request: TokenRequest, seed: int) -> AsyncIterator[Piece]: ...
    async def pause(self, keep_cache: bool) -> None: ...
    async def resume(self) -> None: ...
    async def expect(self, address: Address) -> None: ...
    async def received(self) -> Sequence[Manifest]: ...
    async def load(self, version: int) -> Loaded: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    def stats(self) -> Mapping[str, float]: ...
    async def close(self) -> None: ...


@dataclass(eq=False)
class Member:
    """A replica in a pool."""

    replica: Replica
    slot: str  # the place in the pool; another replica may take it later
    state: Literal["starting", "empty", "unproved", "ready", "gone"] = "starting"
    """empty: it has no weights yet · unproved: it has some, and only the publisher asks it until it proved them."""
    leaving: bool = False  # it ends with what it serves, and nobody takes its place
    load: Load = field(init=False)
    served: set[asyncio.Task[None]] = field(default_factory=set)
    seen: float = 0.0  # when it last gave a sign of life
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.load = Load(self.slot, self.replica.capacity)


@dataclass(frozen=True)
class Limits:
    """What a pool allows."""

    replicas: int
    vocabulary: int
    context: int
    timeout: float  # seconds without a token or an answer
    start_timeout: float
    restarts: int


async def within(call: Awaitable[T], seconds: float, since: asyncio.Future[Any] | None = None) -> T:
    """Its result; raises `TimeoutError` so many seconds after `since` is done. A call that will not be cancelled is not
    waited for."""
    task = asyncio.ensure_future(call)
    try:
        if since is not None:
            await asyncio.wait([task, since], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to be told
