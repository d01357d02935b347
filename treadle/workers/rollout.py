"""A rollout engine in a process of its own, behind the controller's verbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from treadle.controller.verbs import one
from treadle.errors import RolloutError
from treadle.rollout.remote import Asked, Heard, Serving
from treadle.rollout.replicas import Loaded, Replica
from treadle.weights.digest import Manifest
from treadle.weights.stream import Address


class RolloutWorker:
    """One replica. It is made when it has its name; its methods run beside what computes in this process.

    Where it shares devices with training it is one more role that takes turns there (`controller/host.py`), but cannot
    leave by a call that computes: the controller has it sleep before it asks training for anything.
    """

    def __init__(self, make: Callable[[str], Replica]) -> None:
        self._make = make
        self._serving: Serving | None = None
        self._awake = False

    @one
    async def start(self, name: str) -> None:
        self._awake = True
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
        self._awake = False

    @one
    def arrive(self) -> None:
        """As any call that computes does, this waits for what was asked before and has the role that is there leave."""

    @one
    async def wake(self) -> None:
        self._awake = True
        await self._now.replica.wake()

    def offload(self) -> None:
        """Training comes. Raises `RolloutError` if the engine is not asleep: both would be there at once."""
        if self._awake:
            raise RolloutError("the rollout engine is awake on the devices that training asks for")

    def onload(self) -> None:
        """`wake` does it."""

    @one
    async def end(self) -> None:
        if self._serving is not None:
            await self._serving.close()
        self._awake = False

    @property
    def _now(self) -> Serving:
        assert self._serving is not None, "the replica was not started"
        return self._serving
