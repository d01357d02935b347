"""Devices that training and generation share by turns, on virtual time: the order of things, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import virtual_clock
from tests.hostile import EXTENT, tries
from tests.pool_help import (
    MODES,
    TIMEOUT,
    Fake,
    Scene,
    World,
    all_of,
    check,
    now,
    outcome,
    play,
    request,
    samples,
)
from treadle.controller.host import Failure, Host
from treadle.controller.turns import Turns
from treadle.errors import ReplicaLost, WeightSyncError, WorkerError
from treadle.handles import OnPublish
from treadle.runtime.cluster import ClusterPool
from treadle.types import Completion
from treadle.workers.rollout import RolloutWorker


@dataclass
class Stage:
    """Turns between a training and a generation that are nothing but a clock."""

    turns: Turns = field(default_factory=Turns)
    takes: float = 2.0  # seconds of a hand-over
    told: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    failing: str = ""
    awake: bool = True

    def open(self) -> None:
        self.turns.open(self.sleep, self.wake, self.errors.append)

    async def sleep(self) -> None:
        await self._move("sleep")
        self.awake = False

    async def wake(self) -> None:
        self.awake = True
        await self._move("wake")

    async def compute(self, name: str, seconds: float = 1.0, patient: bool = False) -> None:
        async with self.turns.compute(patient):
            self.told.append(f"{now():g} {name}")
            assert not self.awake
            await asyncio.sleep(seconds)
            assert not self.awake

    async def load(self, seconds: float = 1.0) -> None:
        async with self.turns.generation():
            self.told.append(f"{now():g} load")
            assert self.awake
            await asyncio.sleep(seconds)
            assert self.awake

    async def _move(self, what: str) -> None:
        self.told.append(f"{now():g} {what}")
        await asyncio.sleep(self.takes)
        if what == self.failing:
            raise OSError("no memory")


def staged(main: Callable[[Stage], Coroutine[Any, Any, None]], **changes: Any) -> Stage:
    stage = Stage(**changes)

    async def whole() -> None:
        stage.open()
        try:
            async with asyncio.timeout(10_000):
                await main(stage)
        finally:
            await stage.turns.close()

    virtual_clock.run(whole())
    return stage


def test_a_step_is_one_turn_and_its_load_the_next() -> None:
    """Calls in a row, with pauses shorter than a hand-over: generation, which has requests, does not come between."""

    async def main(stage: Stage) -> None:
        with stage.turns.request():
            await asyncio.gather(stage.compute("reference"), stage.compute("old"))
            await asyncio.sleep(1.5)
            await stage.compute("step")
            await asyncio.sleep(1.5)
            await stage.compute("send")
            await stage.load()
            await asyncio.sleep(100)

    stage = staged(main)
    assert stage.told == ["0 sleep", "2 reference", "2 old", "4.5 step", "7 send", "8 wake", "10 load"]
    assert (stage.turns.count, stage.turns.seconds) == (2, 4.0)


def test_requests_wake_generation_once_training_was_idle_as_long_as_a_hand_over() -> None:
    async def main(stage: Stage) -> None:
        await stage.compute("step")  # until 3
        await asyncio.sleep(100)  # nobody asks for anything
        with stage.turns.request():  # training was idle long enough
            await asyncio.sleep(10)
            await stage.compute("step")  # at 113: it does not wait for the request
            await asyncio.sleep(10)

    assert staged(main).told == ["0 sleep", "2 step", "103 wake", "113 sleep", "115 step", "118 wake"]


def test_a_patient_call_waits_for_the_last_request() -> None:
    async def main(stage: Stage) -> None:
        await stage.compute("step")  # until 3
        with stage.turns.request():
            await asyncio.sleep(97)
            with stage.turns.request():
                score = asyncio.ensure_future(stage.compute("score", patient=True))
                await asyncio.sleep(5)
            await asyncio.sleep(5)
        await score

    assert staged(main).told == ["0 sleep", "2 step", "5 wake", "110 sleep", "112 score"]


def test_a_patient_call_goes_when_training_has_the_devices_anyway() -> None:
    """And generation waits for its end, as it does for that of any other."""

    async def main(stage: Stage) -> None:
        await stage.compute("step")  # until 3
        with stage.turns.request():
            await asyncio.sleep(97)
            score = asyncio.ensure_future(stage.compute("score", 5.0, patient=True))
            await asyncio.sleep(10)
            await stage.compute("step")
            await asyncio.gather(stage.load(), score)

    told = staged(main).told
    assert told == ["0 sleep", "2 step", "5 wake", "110 sleep", "112 score", "112 step", "117 wake", "119 load"]


def test_a_patient_call_waits_ten_hand_overs_at_most() -> None:
    """Requests may be those of answers that nobody waits for yet."""

    async def main(stage: Stage) -> None:
        await stage.compute("step")  # until 3; a hand-over takes 2
        with stage.turns.request():
            await asyncio.sleep(97)
            await stage.compute("score", patient=True)

    assert staged(main).told == ["0 sleep", "2 step", "5 wake", "120 sleep", "122 score"]


def test_while_a_load_goes_on_nobody_loses_patience() -> None:
    async def main(stage: Stage) -> None:
        await stage.compute("step")  # until 3
        with stage.turns.request():
            await asyncio.sleep(97)
            await asyncio.gather(stage.load(60.0), stage.compute("score", patient=True))

    assert staged(main).told == ["0 sleep", "2 step", "5 wake", "100 load", "180 sleep", "182 score"]


def test_training_waits_for_a_load_and_a_load_for_training() -> None:
    async def main(stage: Stage) -> None:
        await asyncio.gather(stage.compute("step", 3.0), stage.load(), stage.load(2.0))
        await asyncio.gather(stage.load(5.0), stage.compute("step"))

    told = staged(main).told
    assert told == ["0 load", "0 load", "2 sleep", "4 step", "7 step", "8 wake", "10 load"]


def test_who_leaves_while_waiting_is_forgotten() -> None:
    async def main(stage: Stage) -> None:
        loading = asyncio.ensure_future(stage.load(10.0))
        await asyncio.sleep(1)
        waiting = asyncio.ensure_future(stage.compute("never"))
        await asyncio.sleep(1)
        waiting.cancel()
        await loading
        await asyncio.sleep(10)
        assert stage.told == ["0 load"]
        moving = asyncio.ensure_future(stage.compute("never"))  # it leaves while devices change hands
        await asyncio.sleep(1)
        moving.cancel()
        await stage.load()
        assert stage.told == ["0 load", "20 sleep", "22 wake", "24 load"]

    staged(main)


@pytest.mark.parametrize("failing", ["sleep", "wake"])
def test_a_hand_over_that_fails_is_told_to_everyone(failing: str) -> None:
    async def main(stage: Stage) -> None:
        if failing == "wake":
            await stage.compute("a")
            errors = await asyncio.gather(stage.load(), stage.load(), return_exceptions=True)
        else:
            errors = await asyncio.gather(stage.compute("a"), stage.compute("b"), return_exceptions=True)
        for error in errors:
            assert isinstance(error, WorkerError)
            assert "the devices were not handed over: no memory" in str(error)
        with pytest.raises(WorkerError, match="not handed over"):
            await stage.compute("later")
        assert [str(error) for error in stage.errors] == ["no memory"]

    staged(main, failing=failing)


@pytest.mark.parametrize("at", [0.0, 1.0, 2.5, 4.0])
def test_close_in_mid_turn_leaves_nobody_waiting(at: float) -> None:
    async def main(stage: Stage) -> None:
        calls = [asyncio.ensure_future(call) for call in (stage.compute("step", 0.5), stage.load())]
        stage.awake = False  # nobody guards what is closed
        await asyncio.sleep(at)
        await stage.turns.close()
        _, left = await asyncio.wait(calls, timeout=10)
        assert not left
        for call in calls:
            call.exception()

    staged(main)


# ---------------------------------------------------------------------- in the process of a rank


class Role:
    """A worker that says what it does."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def offload(self) -> None:
        self.told.append(f"{self.name} leaves")

    def onload(self) -> None:
        self.told.append(f"{self.name} comes")

    def step(self) -> None:
        self.told.append(f"{self.name} computes")


def test_a_rank_has_one_role_on_its_devices_and_refuses_training_beside_an_engine_that_is_awake() -> None:
    """Whatever the controller asks for: the last line of defence."""
    told: list[str] = []

    async def main() -> None:
        host = Host(0, 1, 1, offload=True)
        for name in ("policy", "critic"):
            await host.build(name, lambda seat, name=name: Role(name, told))
        await host.build("rollout", lambda seat: RolloutWorker(lambda name: Fake(name, World(command=0.0))))
        assert told == ["policy leaves", "critic leaves"]
        await host.call(None, "rollout", "start", "0-1")
        refused = await host.call(0, "policy", "step")
        assert isinstance(refused, Failure)
        assert "the rollout engine is awake on the devices that training asks for" in str(refused.known())
        await host.call(None, "rollout", "sleep")
        told.clear()
        await host.call(1, "policy", "step")
        await asyncio.gather(
            *(host.call(n, *what) for n, what in ((2, ("critic", "step")), (3, ("rollout", "arrive"))))
        )
        assert told == [
            *("policy comes", "policy computes", "policy leaves"),
            *("critic comes", "critic computes", "critic leaves"),
        ]
        await host.call(None, "rollout", "wake")
        assert isinstance(await host.call(4, "critic", "step"), Failure)
        await host.call(None, "rollout", "end")  # an engine that is no more is in nobody's way
        assert await host.call(5, "critic", "step") is None
        await host.close()

    asyncio.run(main())


# ---------------------------------------------------------------------- with a pool of engines


@dataclass
class Training:
    """Ranks that compute, one call after the other, and finish what was begun though nobody waits for it any more."""

    world: World
    turns: Turns
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __call__(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        async with self.turns.compute():
            work = asyncio.ensure_future(self._work(seconds, then))
            self.tasks.add(work)
            work.add_done_callback(self.tasks.discard)
            await asyncio.shield(work)

    async def _work(self, seconds: float, then: Callable[[], None]) -> None:
        async with self.order:
            self.calls += 1
            self._alone()
            await asyncio.sleep(seconds)
            self._alone()
            then()

    async def left(self) -> None:
        """As `arrive`: behind whatever was asked before."""
        async with self.order:
            pass

    def _alone(self) -> None:
        if awake := [fake.name for fake in self.world.alive if not fake.asleep]:
            self.world.wrong.append(f"training computes while {awake} are awake")


Together = Callable[[Scene, Training], Coroutine[Any, Any, None]]


def together(main: Together, world: World, **changes: Any) -> None:
    """Run a program on a pool that shares its devices with training. Engines are elsewhere, as on a cluster."""
    turns = Turns()
    world.way = world.way if world.way is not None else 0.0

    def made(*arguments: Any) -> ClusterPool:
        pool = ClusterPool(*arguments)
        pool.turns = turns
        return pool

    async def whole(scene: Scene) -> None:
        training = Training(world, turns)
        world.arrive = training.left
        pool = scene.pool
        assert isinstance(pool, ClusterPool)
        pool.share()
        await main(scene, training)

    play(whole, world, restarts=0, kind=made, **changes)


async def publish(scene: Scene, training: Training, version: int, mode: OnPublish = "resume") -> None:
    """As the publisher does: the policy sends in a turn of its own, while the engines, asleep or not, receive."""
    shipment = scene.publish.shipment(version, scene.pool.receivers(), sent=False)
    await asyncio.gather(training(0.5, lambda: scene.publish.send(shipment)), scene.pool.load(shipment, version, mode))
    scene.publish.version = version


@pytest.mark.parametrize("mode", MODES)
def test_a_publish_is_sent_asleep_and_loaded_awake(mode: OnPublish) -> None:
    async def main(scene: Scene, training: Training) -> None:
        tasks = [scene.ask(one) for one in samples(4, tokens=30)]
        await asyncio.sleep(5.5)
        before = scene.pool.stats()["tokens"]
        await training(20.0)
        assert scene.pool.stats()["tokens"] == before
        await publish(scene, training, 1, mode)
        order = [c.partition(" ")[0] for c in scene.world.commands("0-1")]
        assert order[5:] == [
            "resume",
            "pause",
            "sleep",
            "expect",
            "received",
            "wake",
            "resume",
            "pause",
            "load",
            "resume",
        ]
        found = [await task for task in tasks]
        for one, got in zip(samples(4, tokens=30), found, strict=True):
            check(one, got)
            versions = set(got.version_C.tolist())
            assert versions == ({0} if mode == "drain" else {0, 1})
        assert scene.pool.stats()["turns"] == 2
        scene.settled()

    together(main, World())


def test_a_swap_into_sleeping_engines_is_still_refused() -> None:
    """By whoever else has them sleep."""

    async def main(scene: Scene, training: Training) -> None:
        await scene.pool.sleep()
        with pytest.raises(WeightSyncError, match="sleep; wake them before they load"):
            await scene.pool.load(scene.publish.shipment(1, scene.pool.receivers()), 1, "resume")

    together(main, World())


def test_a_probe_that_needs_the_policy_again_just_works() -> None:
    async def main(scene: Scene, training: Training) -> None:
        await training(1.0)
        await publish(scene, training, 1)
        for name, engine in scene.pool.each().items():
            asked = request(f"probe {name}", 2, priority=0)
            check(asked, await engine.generate(asked))
            await training(0.5)  # it answered otherwise than was foreseen
        await all_of(scene, samples(6))
        assert scene.pool.stats()["turns"] == 2 + 4

    together(main, World())


@pytest.mark.parametrize("fault", ["dies_in", "hangs_in", "raises_in"])
@pytest.mark.parametrize("command", ["pause", "sleep", "wake", "resume"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_lost_over_a_hand_over_ends_in_answers_or_one_error(command: str, fault: str, replicas: int) -> None:
    async def main(scene: Scene, training: Training) -> None:
        tasks = [scene.ask(one) for one in samples(4, tokens=10)]
        await asyncio.sleep(4.5)
        bad = scene.at("0")
        if fault == "raises_in":
            bad.raises_in[command] = OSError("no memory")
        else:
            getattr(bad, fault).add(command)
        began = now()
        done = await asyncio.gather(training(1.0), return_exceptions=True)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert now() - began < 5 * TIMEOUT
        if fault == "raises_in" and command in ("pause", "sleep"):
            assert "not handed over: no memory" in str(done[0])
        for one, got in zip(samples(4, tokens=10), answers, strict=True):
            if isinstance(got, Completion):
                check(one, got)
            else:
                assert replicas == 1 or fault == "raises_in"
                assert "no rollout engine is left" in str(got)
                assert ("no memory" if fault == "raises_in" else "rollout engine 0-1 d") in str(got)

    together(main, World(), replicas=replicas)


TIMES = st.integers(0, 120).map(lambda quarters: quarters / 4)
WORK = st.one_of(
    st.tuples(st.just("request"), st.integers(1, 12), st.sampled_from([None, None, 2.0, 7.5])),
    st.tuples(st.just("compute"), st.sampled_from([0.25, 1.0, 6.0]), st.sampled_from([None, None, 0.5, 3.0])),
    st.tuples(st.just("step"), st.lists(st.sampled_from([0.0, 0.5, 4.0]), max_size=4), st.sampled_from(MODES)),
    st.tuples(st.just("die"), st.integers(0, 2)),
    st.tuples(st.sampled_from(["dies_in", "hangs_in"]), st.integers(0, 2), st.sampled_from(["sleep", "wake", "pause"])),
)


@dataclass
class Story:
    """One random program."""

    scene: Scene
    training: Training
    learning: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: int = 0

    async def happens(self, at: float, what: str, *how: Any) -> None:
        await asyncio.sleep(at)
        await getattr(self, f"_{what}")(*how)

    async def _request(self, tokens: int, patience: float | None) -> None:
        asked = request(f"r {now()} {tokens}", tokens)
        got = await self._patient(self.scene.pool.generate(asked), patience)
        if isinstance(got, Completion):
            check(asked, got)
        elif got is not None:
            assert "no rollout engine is left" in str(got)

    async def _compute(self, seconds: float, patience: float | None) -> None:
        await self._patient(self.training(seconds), patience)

    async def _step(self, pauses: Sequence[float], mode: OnPublish) -> None:
        """Calls with pauses, then a publish and a probe of each engine."""
        async with self.learning:
            for pause in pauses:
                await self.training(0.5)
                await asyncio.sleep(pause)
            if self.scene.pool.receivers():
                self.version += 1
                done = await outcome(publish(self.scene, self.training, self.version, mode))
                assert done is None or "no rollout engine took it" in str(done)
                for engine in self.scene.pool.each().values():
                    asked = request(f"probe {now()}", 2, priority=0)
                    got = await outcome(engine.generate(asked))
                    if isinstance(got, Completion):
                        check(asked, got)
                    else:  # an engine that was given up meanwhile
                        assert isinstance(got, ReplicaLost)

    async def _die(self, which: int) -> None:
        if fakes := self.scene.world.alive:
            fakes[which % len(fakes)].die()

    async def _dies_in(self, which: int, command: str) -> None:
        self._fake(which).dies_in.add(command)

    async def _hangs_in(self, which: int, command: str) -> None:
        self._fake(which).hangs_in.add(command)

    def _fake(self, which: int) -> Fake:
        made = self.scene.world.made
        return made[which % len(made)]

    async def _patient(self, work: Awaitable[Any], patience: float | None) -> Any:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                return await outcome(work)


@EXTENT
def test_whatever_happens_they_are_never_there_together_and_nobody_waits_for_ever(extent: int) -> None:
    @tries(150 * extent)
    @given(
        st.lists(st.tuples(TIMES, WORK), min_size=1, max_size=14),
        st.integers(1, 3),
        st.sampled_from([0.0, 0.25, 2.0]),
        st.sampled_from([0.0, 0.1]),
    )
    def tried(works: list[Any], replicas: int, command: float, way: float) -> None:
        async def main(scene: Scene, training: Training) -> None:
            story = Story(scene, training)
            await asyncio.gather(*(story.happens(at, *what) for at, what in works))
            await asyncio.gather(*training.tasks)
            await training(1.0)  # both can have the devices after all that
            if scene.pool.receivers():
                await outcome(scene.pool.generate(request("last")))
            await asyncio.sleep(2 * TIMEOUT)
            scene.settled()

        together(main, World(command=command, way=way), replicas=replicas)

    tried()
