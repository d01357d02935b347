"""Devices that training and generation use by turns: who has them, and when they change hands.

    compute() ──► generation sleeps ──► training computes … and has nothing more to do
                                                             │
    generation() ◄── generation wakes ◄── training leaves ◄──┘  for a load: at once; for requests: after a while

Training goes first: its calls interrupt generation between two tokens, which waits with its tokens kept. A reward
model's wait until no request is left, or training has the devices anyway, but for no more than `_PATIENCE` hand-overs.
The program that makes these calls knows nothing of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Literal

from treadle.errors import WorkerError

Side = Literal["training", "generation"]
Move = Callable[[], Awaitable[None]]
_MOMENT = 1e-3  # seconds for which nobody waits
_PATIENCE = 10  # hand-overs for which requests go on; before the first one nobody knows how long that is


class Turns:
    """One for devices that are shared. Before `open` and after `close` nobody shares them, and nobody waits."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        """Hand-overs so far, and what they took."""
        self._side: Side | None = "generation"  # None: on the way from one to the other
        self._computing = 0  # calls of training, those that wait included
        self._patient: list[float] = []  # since when those of them that interrupt no request have been there
        self._loading = 0  # what generation must be awake for, those that wait included
        self._requests = 0  # that generation has not answered
        self._idle = 0.0  # since when training has had nothing to do
        self._going = 0.0  # since when requests go on: generation woke, or a load ended
        self._took = 0.0  # seconds of the last hand-over
        self._gates: dict[Side, asyncio.Event] = {"training": asyncio.Event(), "generation": asyncio.Event()}
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, sleep: Move, wake: Move, failed: Callable[[Exception], None]) -> None:
        """Generation has the devices now. `wake`: training leaves them before generation is there. `failed` is told of
        an error in either; nobody gets the devices after that."""
        self._task = asyncio.ensure_future(self._run(sleep, wake, failed))

    async def close(self) -> None:
        """Hand nothing over any more. Generation is to be ended next."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._let_go()

    @asynccontextmanager
    async def compute(self, patient: bool = False) -> AsyncIterator[None]:
        """A call of training; a `patient` one lets requests go on for a while. Raises `WorkerError` where the devices
        could not be handed over."""
        since = _now()
        self._computing += 1
        self._patient += [since] if patient else []
        self._changed.set()
        try:
            await self._until("training")
            yield
        finally:
            self._computing -= 1
            if patient:
                self._patient.remove(since)
            self._idle = _now()
            self._changed.set()

    @asynccontextmanager
    async def generation(self) -> AsyncIterator[None]:
        """What generation must be awake for from its beginning to its end. It waits for training, then training for
        it."""
        self._loading += 1
        self._changed.set()
        try:
            await self._until("generation")
            yield
        finally:
            self._loading -= 1
            self._going = _now()
            self._changed.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request: generation wakes for it some time, and sleeps whenever training has work."""
        self._requests += 1
        self._changed.set()
        try:
            yield
        finally:
            self._requests -= 1
            self._changed.set()

    async def _until(self, side: Side) -> None:
        while self._task is not None and self._side != side:
            if self._error is not None:
                raise WorkerError(f"the devices were not handed over: {self._error}") from self._error
            await self._gates[side].wait()

    async def _run(self, sleep: Move, wake: Move, failed: Callable[[Exception], None]) -> None:
        try:
            while True:
                if self._side == "generation":
                    if (left := self._wait()) is not None and left < _MOMENT:
                        await self._hand_over(sleep, "training")
                    else:
                        await self._news(left)
                elif (left := self._patience()) is not None and left < _MOMENT:
                    await self._hand_over(wake, "generation")
                else:
                    await self._news(left)
        except Exception as error:  # whatever it is: neither side can go on
            self._error = error
            self._let_go()
            failed(error)

    def _wait(self) -> float | None:
        """Seconds until generation should sleep, if nothing changes before; None: it should not."""
        if not self._computing or self._loading:
            return None
        if self._computing > len(self._patient) or not self._requests:
            return 0.0
        return max(self._going, min(self._patient)) + _PATIENCE * self._took - _now()

    def _patience(self) -> float | None:
        """Seconds until generation should wake, if nothing changes before; None: it should not.

        A step is a row of calls with short pauses. A load is its last part, and comes when training is done. Requests
        alone say nothing of that (above a staleness of 0 there always are some): they wait as long as a hand-over
        takes, so that a pause costs at most twice the least, whatever its length (the ski rental problem).
        """
        if self._computing or not (self._loading or self._requests):
            return None
        return 0.0 if self._loading else self._idle + self._took - _now()

    async def _hand_over(self, move: Move, side: Side) -> None:
        for gate in self._gates.values():
            gate.clear()
        self._side, began = None, _now()
        await move()
        self._going = _now()
        self._took = self._going - began
        self.count, self.seconds = self.count + 1, self.seconds + self._took
        self._side = side
        self._gates[side].set()

    def _let_go(self) -> None:
        """Whoever waits looks again."""
        for gate in self._gates.values():
            gate.set()

    async def _news(self, limit: float | None = None) -> None:
        """Until something changed, or so many seconds."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._changed.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()
