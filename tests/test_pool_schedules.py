"""A pool through random schedules of requests, deaths, hangs, publishes, pauses, joins and leaves."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.hostile import EXTENT, tries
from tests.pool_help import (
    COMMANDS,
    FOREVER,
    MODES,
    TIMEOUT,
    Fake,
    Scene,
    World,
    check,
    now,
    outcome,
    play,
    request,
    samples,
)
from treadle.handles import OnPublish
from treadle.types import Completion

TIMES = st.integers(0, 120).map(lambda quarters: quarters / 4)
REQUESTS = st.lists(
    st.tuples(
        TIMES,
        st.sampled_from(["", "group a", "group b"]),
        st.integers(1, 12),
        st.sampled_from([1, 1, 0]),  # priority
        st.sampled_from([None, None, None, 0.25, 2.0, 7.5]),  # cancelled after
    ),
    min_size=1,
    max_size=12,
)
EVENTS = st.lists(
    st.tuples(
        TIMES,
        st.one_of(
            st.tuples(st.sampled_from(["die", "freeze", "remove", "probe"]), st.integers(0, 3)),
            st.tuples(st.just("publish"), st.sampled_from(MODES), st.booleans()),
            st.tuples(
                st.just("abandon"),
                st.sampled_from(MODES),
                st.booleans(),
                st.booleans(),
                st.sampled_from([0.1, 0.6, 2.5]),
            ),
            st.tuples(st.sampled_from(["pause", "sleep"]), st.sampled_from([0.25, 3.0, 15.0])),
            st.tuples(st.sampled_from(["dies_in", "hangs_in"]), st.integers(0, 3), st.sampled_from(COMMANDS)),
            st.tuples(st.just("tamper"), st.integers(0, 3), st.sampled_from(["received", "load"])),
            st.tuples(st.just("add")),
        ),
    ),
    max_size=10,
)
SUPPLIES = st.sampled_from(["staged", "not staged", "none"])
WORLDS = st.builds(
    World,
    capacity=st.integers(1, 3),
    latency=st.sampled_from([0.25, 1.0, 1.5]),
    command=st.sampled_from([0.25, 1.0]),
    chunk=st.integers(1, 3),
    hops=st.sampled_from([0, 3, 12]),
    abort=st.sampled_from([0.0, 0.0, 0.75]),
    reports=st.booleans(),
    way=st.sampled_from([None, 0.0, 0.05]),
)


class Story:
    """One random schedule, played."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.versions, self.joined = scene, 0, 0
        self.held, self.probing = asyncio.Lock(), asyncio.Lock()

    async def happens(self, at: float, what: str, *how: Any) -> None:
        await asyncio.sleep(at)
        await outcome(getattr(self, what)(*how))

    def _one(self, number: int) -> Fake | None:
        alive = self.scene.world.alive
        return alive[number % len(alive)] if alive else None

    async def die(self, number: int) -> None:
        if fake := self._one(number):
            fake.die()

    async def freeze(self, number: int) -> None:
        if fake := self._one(number):
            fake.freeze()

    async def dies_in(self, number: int, command: str) -> None:
        if fake := self._one(number):
            fake.dies_in.add(command)

    async def hangs_in(self, number: int, command: str) -> None:
        if fake := self._one(number):
            fake.hangs_in.add(command)

    async def tamper(self, number: int, step: str) -> None:
        if fake := self._one(number):
            fake.tampered = step

    async def remove(self, number: int) -> None:
        slots = list(self.scene.pool._members)
        if slots:
            await self.scene.pool.remove(slots[number % len(slots)])

    async def add(self) -> None:
        self.joined += 1
        await self.scene.pool.add()

    async def publish(self, mode: OnPublish, staged: bool) -> None:
        self.versions += 1
        await self.scene.publish(self.versions, mode, staged)

    async def abandon(self, mode: OnPublish, staged: bool, sent: bool, patience: float) -> None:
        """A publish that is given up, as when its sender fails."""
        pool = self.scene.pool
        self.versions += 1
        shipment = self.scene.publish.shipment(self.versions, pool.receivers(), staged, sent)
        load = asyncio.ensure_future(pool.load(shipment, self.versions, mode))
        await asyncio.wait([load], timeout=patience)
        if load.done() and load.exception() is None:
            self.scene.publish.version = self.versions
        load.cancel()
        await asyncio.wait([load])

    async def pause(self, seconds: float) -> None:
        pool = self.scene.pool
        async with self.held:  # one pause after the other: they do not count
            await pool.pause()
            await self._nothing(seconds)
            await pool.resume()

    async def sleep(self, seconds: float) -> None:
        pool = self.scene.pool
        async with self.held:
            await pool.sleep()
            await self._nothing(seconds)
            await pool.wake()

    async def _nothing(self, seconds: float) -> None:
        """Nothing is sampled in this time."""
        before = self.scene.pool.stats()["tokens"]
        await asyncio.sleep(seconds)
        assert self.scene.pool.stats()["tokens"] == before

    async def probe(self, number: int) -> None:
        async with self.probing:  # there is a place for one
            if each := list(self.scene.pool.each().values()):
                asked = request(f"probe {number}", 2, priority=0)
                check(asked, await each[number % len(each)].generate(asked))

    async def asks(self, at: float, name: str, group: str, tokens: int, priority: int, patience: float | None) -> bool:
        """Whether it was served: else it was given up, or nobody is left."""
        await asyncio.sleep(at)
        asked = request(name, tokens, prefix=group, priority=priority)
        try:
            async with asyncio.timeout(patience):
                got = await outcome(self.scene.pool.generate(asked))
        except TimeoutError:
            return False
        if isinstance(got, Completion):
            check(asked, got)
            return True
        assert "no rollout engine is left" in str(got)
        assert self.joined or not self.scene.pool._members
        return False

    async def ends(self, work: Sequence[asyncio.Task[Any]]) -> None:
        """Nothing is tampered with any more; versions are published, as long as anyone is there, until all is done."""
        for fake in self.scene.world.made:
            fake.tampered = None
        for _ in range(60):
            if self.scene.pool._members:
                await outcome(self.scene.pool.someone())
            await outcome(self.publish("resume", True))
            _, left = await asyncio.wait(work, timeout=3 * TIMEOUT)
            if not left:
                break
        await asyncio.gather(*work)


def schedule(
    requests: Sequence[tuple[Any, ...]], events: Sequence[tuple[float, tuple[Any, ...]]]
) -> Callable[..., Any]:
    async def main(scene: Scene) -> None:
        story = Story(scene)
        asked = [
            asyncio.ensure_future(story.asks(at, f"{group or 'sample'}.{number}", group, *rest))
            for number, (at, group, *rest) in enumerate(requests)
        ]
        happened = [asyncio.ensure_future(story.happens(at, *event)) for at, event in events]
        await asyncio.sleep(40 * TIMEOUT)  # some wait for the end: a load that failed lets nothing go on
        await story.ends([*asked, *happened])
        await asyncio.sleep(2 * TIMEOUT)  # what was cancelled is over
        scene.settled()
        assert len(scene.pool._tasks) == 1  # the watch

    return main


@EXTENT
def test_whatever_happens_every_request_gets_its_tokens_or_one_clear_error(extent: int) -> None:
    @tries(150 * extent)
    @given(WORLDS, REQUESTS, EVENTS, st.integers(1, 3), st.sampled_from([0, 2, 50]), SUPPLIES)
    def tried(
        world: World, requests: list[Any], events: list[Any], replicas: int, restarts: int, supplies: str
    ) -> None:
        there = World(**{name: getattr(world, name) for name in ("capacity", "latency", "command", "chunk", "hops")})
        there.abort, there.reports, there.way = world.abort, world.reports, world.way

        async def main(scene: Scene) -> None:
            scene.publish.moved_on, scene.publish.staged = supplies == "none", supplies == "staged"
            await schedule(requests, events)(scene)

        play(main, there, replicas=replicas, restarts=restarts)

    tried()
    gc.collect()


def test_hundreds_of_requests_through_deaths_and_publishes() -> None:
    async def main(scene: Scene) -> None:
        asked = samples(300, tokens=10)
        tasks = [scene.ask(one) for one in asked]
        for version in range(1, 12):
            await asyncio.sleep(9.25)
            alive = [fake for fake in scene.world.alive if fake.inside]
            if version % 3 == 0 and alive:
                alive[0].die()
            await scene.publish(version, MODES[version % 3], staged=version % 2 == 0)
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        assert scene.pool.stats()["tokens"] == 3000
        assert now() < FOREVER
        scene.settled()

    play(main, World(capacity=8, reports=True), replicas=3, restarts=20)
