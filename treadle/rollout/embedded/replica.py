"""The embedded engine as one of a pool's replicas: in a process of its own, with its own copy of the weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from treadle.rollout.embedded.engine import CAPACITY, EmbeddedEngine
from treadle.rollout.replicas import Loaded, Piece
from treadle.weights.digest import Manifest, describe
from treadle.weights.stream import Address, Landing, Receiving

if TYPE_CHECKING:
    from treadle.handles import Device, Weights
    from treadle.types import TokenRequest

_POLL = 0.002  # seconds between two looks whether weights have arrived


class EmbeddedReplica:
    """A `Replica`. Its weights are taken, and looked at again after a load, by their names in a checkpoint."""

    def __init__(self, name: str, engine: EmbeddedEngine, device: Device, held: Callable[[], Weights]) -> None:
        """`held`: every tensor of the engine's model by its name in a checkpoint."""
        self.name, self.capacity, self.receivers = name, CAPACITY, (f"{name}-0",)
        self._engine, self._device, self._held = engine, device, held
        self._landing = Landing(self.receivers[0])
        self._receiving: Receiving | None = None
        self._keep_cache = False

    async def start(self) -> None:
        """It runs already."""

    async def stream(self, request: TokenRequest, seed: int) -> AsyncIterator[Piece]:
        """Tokens as they are sampled; their noise is the request's own. Leaving the iteration ends the request."""
        heard: asyncio.Queue[tuple[int, float, str | None]] = asyncio.Queue()
        answer = asyncio.ensure_future(self._engine.generate(request, lambda *token: heard.put_nowait(token)))
        token: asyncio.Task[tuple[int, float, str | None]] | None = None
        try:
            while True:
                token = asyncio.ensure_future(heard.get())
                await asyncio.wait([answer, token], return_when=asyncio.FIRST_COMPLETED)
                if not token.done():
                    answer.result()  # an error: the last token was heard before
                    return
                number, logprob, finish = token.result()
                yield Piece([number], [logprob], finish)
                if finish is not None:
                    return
        finally:
            tasks = [answer] if token is None else [answer, token]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def expect(self, address: Address) -> None:
        if self._receiving is not None:
            self._receiving.give_up()
        self._receiving = self._landing.receive(address)

    async def received(self) -> Sequence[Manifest]:
        assert self._receiving is not None
        while (manifest := self._receiving.manifest) is None:
            await asyncio.sleep(_POLL)
        return [manifest]

    async def load(self, version: int) -> Loaded:
        """Load what was expected, and digest what the model then holds. The engine must be paused."""
        assert self._receiving is not None
        receiving, started = self._receiving, time.perf_counter()
        await self._engine.load(receiving.tensors(), version, "continue" if self._keep_cache else "resume")
        loaded = time.perf_counter()
        held = await self._device.run(partial(_digested, self._held), 0)
        return Loaded([held], loaded - started, time.perf_counter() - loaded, receiving.digest_seconds)

    async def pause(self, keep_cache: bool) -> None:
        self._keep_cache = keep_cache
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    def stats(self) -> Mapping[str, float]:
        found = self._engine.stats()
        return {"queue": found["queue"], "running": found["running"]}

    async def close(self) -> None:
        await self._engine.close()


def _digested(held: Callable[[], Weights]) -> Manifest:
    return {name: describe(tensor) for name, tensor in held()}
