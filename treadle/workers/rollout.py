"""A rollout engine in a process of its own, behind the controller's verbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from treadle.controller.verbs import one
from treadle.rollout.remote import Asked, Heard, Serving
from treadle.rollout.replicas import Loaded, Replica
from treadle.weights.digest import Manifest
from treadle.weights.stream import Address


class RolloutWorker:
    """One replica. It is made when it has its name; its methods run beside what computes in this process."""

    def __init__(self, make: Callable[[str], Replica]) -> None:
        self._make = make
        self._serving: Serving | None = None

    @one
    async def start(self, name: str) -> None:
        self._serving = Serving(self._make(name))
        await self._serving.replica.start()

    @one
    async def submit(self, asked: Sequence[Asked]) -> None:
        self._now.submit(asked)

    @one
    async def drop(self, number: int) -> None:
        await self._now.drop(number)

    @one
    async def poll(self) -> tuple[list[Heard], Mapping[str, float]]:
        return await self._now.poll()

    @one
    async def pause(self, keep_cache: bool) -> int:
        return await self._now.pause(keep_cache)

    @one
    async def resume(self) -> None:
        await self._now.replica.resume()

    @one
    async def expect(self, address: Address) -> None:
        await self._now.replica.expect(address)

    @one
    async def received(self) -> Sequence[Manifest]:
        return await self._now.replica.received()

    @one
    async def load(self, version: int) -> Loaded:
        return await self._now.replica.load(version)

    @one
    async def sleep(self) -> None:
        await self._now.replica.sleep()

    @one
    async def wake(self) -> None:
        await self._now.replica.wake()

    @one
    async def end(self) -> None:
        if self._serving is not None:
            await self._serving.close()

    @property
    def _now(self) -> Serving:
        assert self._serving is not None, "the replica was not started"
        return self._serving
