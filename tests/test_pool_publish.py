"""A pool of engines gets weights, sleeps, grows and shrinks, and loses some of them over it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from tests.pool_help import (
    A_LITTLE,
    COMMANDS,
    MODES,
    TIMEOUT,
    Fake,
    Scene,
    World,
    check,
    died,
    now,
    outcome,
    play,
    request,
    samples,
    turns,
)
from treadle.errors import ReplicaLost, RolloutError, WeightSyncError
from treadle.handles import OnPublish
from treadle.weights.shipment import MovedOn

# ---------------------------------------------------------------------- publishing


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_commands_come_in_their_order(mode: OnPublish, staged: bool) -> None:
    async def main(scene: Scene) -> Mapping[str, float]:
        task = scene.ask(request("one", 5))
        await asyncio.sleep(1.5)
        scene.world.log.clear()
        costs = await scene.publish(1, mode, staged)
        await task
        return costs

    world = World()
    costs = play(main, world)
    pause = f"pause keep_cache={mode == 'continue'}"
    staging = ["expect", "received", pause, "load", "resume", "close"]
    for name in ("0-1", "1-2"):
        assert world.commands(name) == (staging if staged else [pause, "expect", "load", "resume", "close"])
    assert costs == {"pause": 0.75 if staged else 1.0, "load": 1.0, "readback": 2.0, "digest": 3.0}


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_versions_are_exact_to_the_token(mode: OnPublish, reports: bool, moment: float) -> None:
    """Also of tokens that are sampled at the very instant at which the pause is done (`moment` 0.25), and of those
    that were still under way."""

    async def main(scene: Scene) -> None:
        asked = samples(6, tokens=9)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(2 + moment)
        await scene.publish(1, mode)
        await asyncio.sleep(1 + moment)
        await scene.publish(2, mode)
        seen = set()
        for one, task in zip(asked, tasks, strict=True):
            got = await task
            check(one, got)
            assert list(got.version_C) == sorted(got.version_C)
            seen |= set(got.version_C.tolist())
            if mode == "drain":
                assert len(set(got.version_C.tolist())) == 1
        assert len(seen) > 1
        scene.settled()

    play(main, World(capacity=2, reports=reports, hops=12))


@pytest.mark.parametrize("continued", [False, True])
def test_an_engine_s_own_account_of_versions_counts(continued: bool) -> None:
    """It knows better: here it goes on for a while under the old weights, as no engine of ours does. Its account is of
    what it sampled, not of what it was given to continue."""

    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 12 if continued else 9))
        if continued:
            await asyncio.sleep(3.5)
            first = scene.at("0")
            first.die()
            while scene.at("0") is first or not scene.at("0").inside:
                await asyncio.sleep(0.25)
        await asyncio.sleep(2.5)
        await scene.publish(1)
        fake = scene.at("0")
        fake.version, fresh = 0, fake.version
        await asyncio.sleep(2)
        fake.version = fresh
        got = await task
        check(request("one", 12 if continued else 9), got)
        assert list(got.version_C) == ([0] * 7 + [1] * 5 if continued else [0] * 5 + [1] * 4)

    play(main, World(reports=True), replicas=1)


def test_an_account_of_versions_is_of_the_tokens_of_that_engine_alone() -> None:
    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 12))
        await asyncio.sleep(2.5)
        await scene.publish(1)
        await asyncio.sleep(2.5)
        next(fake for fake in scene.world.made if fake.inside).die()
        await asyncio.sleep(2.5)
        await scene.publish(2)
        got = await task
        check(request("one", 12), got)
        assert set(got.version_C.tolist()) == {0, 1, 2}

    play(main, World(reports=True))


def test_drain_lets_those_that_run_finish_while_new_ones_wait() -> None:
    async def main(scene: Scene) -> None:
        old = samples(3, tokens=10)
        tasks = [scene.ask(one) for one in old]
        await asyncio.sleep(2.5)
        publish = asyncio.ensure_future(scene.publish(1, "drain"))
        await asyncio.sleep(1)
        new = samples(3, tokens=4, group="new")
        later = [scene.ask(one) for one in new]
        for one, task in zip(old, tasks, strict=True):
            got = await task
            check(one, got)
            assert set(got.version_C.tolist()) == {0}
        await publish
        for one, task in zip(new, later, strict=True):
            got = await task
            check(one, got)
            assert set(got.version_C.tolist()) == {1}
        scene.settled()

    play(main)


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("fault", ["die", "freeze"])
def test_drain_goes_on_when_a_replica_is_lost_meanwhile(fault: str, restarts: int) -> None:
    """What it served goes on elsewhere, before the swap: both replicas are full, so it has to wait there."""

    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=20)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(2.5)
        publish = asyncio.ensure_future(scene.publish(1, "drain"))
        await asyncio.sleep(3)
        getattr(scene.at("0"), fault)()
        for one, task in zip(asked, tasks, strict=True):
            got = await task
            check(one, got)
            assert set(got.version_C.tolist()) == {0}
        await publish
        got = await scene.pool.generate(request("after"))
        assert set(got.version_C.tolist()) == {1}

    play(main, restarts=restarts)


def test_drain_ends_when_nobody_is_left_who_could_finish() -> None:
    """The requests keep their tokens, and go on under the weights that a replacement gets."""

    async def main(scene: Scene) -> None:
        asked = samples(3, tokens=20)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(2.5)
        publish = asyncio.ensure_future(scene.publish(1, "drain"))
        await asyncio.sleep(3)
        for fake in scene.world.alive:
            fake.die()
        with pytest.raises(ReplicaLost, match="version 1"):
            await publish
        await scene.pool.someone()
        await scene.publish(1, "drain")
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)

    play(main)


def test_a_drain_that_is_given_up_lets_new_requests_begin() -> None:
    async def main(scene: Scene) -> None:
        old = scene.ask(request("old", 100))
        await asyncio.sleep(1.5)
        publish = asyncio.ensure_future(scene.publish(1, "drain"))
        await asyncio.sleep(3)
        publish.cancel()
        got = await scene.pool.generate(request("new", 3))
        assert set(got.version_C.tolist()) == {0}
        await old

    play(main, replicas=1)


def test_a_paused_pool_cannot_be_drained_of_what_is_in_flight() -> None:
    async def main(scene: Scene) -> None:
        await scene.pool.pause()
        await scene.publish(1, "drain")  # nothing is in flight
        await scene.pool.resume()
        task = scene.ask(request("one", 10))
        await asyncio.sleep(2.5)
        await scene.pool.pause()
        with pytest.raises(RolloutError, match="paused"):
            await scene.publish(2, "drain")
        await scene.publish(3, "resume")
        await asyncio.sleep(5 * TIMEOUT)
        assert not task.done()  # a load does not undo a pause
        await scene.pool.resume()
        got = await task
        check(request("one", 10), got)
        assert set(got.version_C.tolist()) == {1, 3}

    play(main)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_replica_lost_over_a_publish_does_not_stop_it(command: str, fault: str, staged: bool) -> None:
    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=12)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(2.5)
        bad = scene.at("0")
        (bad.dies_in if fault == "dies" else bad.hangs_in).add(command)
        started = now()
        await scene.publish(1, "resume", staged)
        assert now() - started < 2.5 * TIMEOUT
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        assert died(scene) == (1 if staged or command != "received" else 0)
        got = await scene.pool.generate(request("after"))
        assert set(got.version_C.tolist()) == {1}
        scene.settled()

    play(main)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.parametrize("command", ["expect", "received", "pause", "load"])
def test_a_publish_that_nobody_survives_fails_and_the_next_one_works(command: str, fault: str) -> None:
    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 12))
        await asyncio.sleep(2.5)
        for fake in scene.world.alive:
            (fake.dies_in if fault == "dies" else fake.hangs_in).add(command)
        with pytest.raises(ReplicaLost, match="version 1"):
            await scene.publish(1)
        await scene.pool.someone()
        await scene.publish(2)
        check(request("one", 12), await task)
        got = await scene.pool.generate(request("after"))
        assert set(got.version_C.tolist()) == {2}

    play(main)


@pytest.mark.parametrize("command", ["pause", "load"])
def test_a_publish_that_nobody_survives_leaves_the_old_version_to_be_served(command: str) -> None:
    """By replacements that were given it, and by those that the shipment did not go to."""

    async def main(scene: Scene) -> None:
        tasks = [scene.ask(one) for one in samples(2, tokens=12)]
        await asyncio.sleep(2.5)
        scene.at("0").dies_in.add(command)
        with pytest.raises(ReplicaLost, match="version 1"):
            await scene.pool.load(scene.publish.shipment(1, scene.at("0").receivers), 1, "resume")
        assert scene.at("1").name == "1-2"
        for one, task in zip(samples(2, tokens=12), tasks, strict=True):
            got = await task
            check(one, got)
            assert set(got.version_C.tolist()) == {0}
        for fake in scene.world.alive:
            fake.dies_in.add(command)
        with pytest.raises(ReplicaLost, match="version 2"):
            await scene.publish(2)
        assert set((await scene.pool.generate(request("after"))).version_C.tolist()) == {0}

    play(main)


def test_a_waiting_request_goes_on_with_who_was_not_asked_to_load() -> None:
    async def main(scene: Scene) -> None:
        scene.at("0").dies_in.add("load")
        scene.world.prepare = lambda fake: fake.hangs_in.add("start")
        load = scene.pool.load(scene.publish.shipment(1, scene.at("0").receivers), 1, "resume")
        publish = asyncio.ensure_future(outcome(load))
        await asyncio.sleep(0.8)  # the gate is shut
        task = scene.ask(request("one", 3))
        assert isinstance(await publish, ReplicaLost)
        opened = now()
        assert set((await task).version_C.tolist()) == {0}
        assert now() - opened == 3.0  # it began at once, not when the next thing happened

    play(main)


def test_a_call_that_cannot_be_cancelled_is_not_waited_for() -> None:
    async def main(scene: Scene) -> None:
        fake = scene.at("0")
        fake.stubborn = True
        fake.hangs_in.add("pause")
        started = now()
        await scene.publish(1)
        assert now() - started < 1.5 * TIMEOUT
        await asyncio.sleep(10 * TIMEOUT)

    play(main)


def test_a_replica_that_dies_after_it_took_the_weights_is_not_brought_back() -> None:
    """One answers at once and dies while the other one is still loading."""

    async def main(scene: Scene) -> None:
        tasks = [scene.ask(one) for one in samples(4, tokens=12)]
        await asyncio.sleep(2.5)
        quick, slow = scene.at("0"), scene.at("1")
        await slow._turn.acquire()  # so its answers come later
        publish = asyncio.ensure_future(scene.publish(1, staged=False))
        await asyncio.sleep(A_LITTLE)
        slow._turn.release()
        while "load" not in scene.world.commands(quick.name)[3:]:
            await asyncio.sleep(A_LITTLE)
        slow_load = asyncio.ensure_future(slow._turn.acquire())
        await asyncio.sleep(0.25)
        quick.die()
        await asyncio.sleep(1)
        assert await slow_load
        slow._turn.release()
        await publish
        assert scene.at("0") is not quick
        for one, task in zip(samples(4, tokens=12), tasks, strict=True):
            check(one, await task)
        scene.settled()

    play(main)


def test_a_replica_without_the_new_version_does_not_serve() -> None:
    """It was not among those that the shipment went to."""

    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=12)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(2.5)
        await scene.pool.load(scene.publish.shipment(1, scene.at("1").receivers), 1, "resume")
        assert died(scene) == 1
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        assert set((await scene.pool.generate(request("after"))).version_C.tolist()) == {1}

    play(main)


def test_weights_that_arrived_otherwise_leave_the_old_version_serving_where_they_are_staged() -> None:
    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 20))
        await asyncio.sleep(2.5)
        scene.at("1").tampered = "received"
        before = now()
        with pytest.raises(WeightSyncError, match=r"version 1: 'weight' in rollout engine 1-2 differs"):
            await scene.publish(1)
        got = await task
        check(request("one", 20), got)
        assert set(got.version_C.tolist()) == {0}
        assert now() - before == 17.5  # it was not stopped for a moment
        scene.at("1").tampered = None
        await scene.publish(2)
        assert set((await scene.pool.generate(request("after"))).version_C.tolist()) == {2}

    play(main)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", ["tampered", "refused"])
def test_nothing_is_generated_with_weights_that_were_loaded_otherwise(
    mode: OnPublish, staged: bool, fault: str
) -> None:
    async def main(scene: Scene) -> None:
        asked = samples(3, tokens=20)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(2.5)
        if fault == "tampered":
            scene.at("1").tampered = "load"
        else:
            scene.at("1").raises_in["load"] = WeightSyncError("rollout engine 1-2 differs by a shape")
        with pytest.raises(WeightSyncError, match=r"rollout engine 1-2 differs"):
            await scene.publish(1, mode, staged)
        before, late = scene.pool.stats()["tokens"], scene.ask(request("late", 2))
        await scene.pool.pause()
        await scene.pool.resume()  # that is no way round it
        await scene.pool.sleep()
        await scene.pool.wake()
        await asyncio.sleep(20 * TIMEOUT)
        assert scene.pool.stats()["tokens"] == before
        assert died(scene) == 0
        assert not late.done()
        scene.at("1").tampered = None
        scene.at("1").raises_in.clear()
        await scene.publish(2, "drain", staged)  # what is in flight cannot finish on weights that are lost
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        assert set((await late).version_C.tolist()) == {2}
        scene.settled()

    play(main)


def test_weights_that_are_never_sent_whole_can_be_given_up() -> None:
    """The sender fails, and whoever publishes ends the load; while it is staged the old version goes on serving."""

    async def main(scene: Scene) -> None:
        shipment = scene.publish.shipment(1, scene.pool.receivers(), sent=False)
        load = asyncio.ensure_future(scene.pool.load(shipment, 1, "resume"))
        await asyncio.sleep(10 * TIMEOUT)
        assert not load.done()
        assert died(scene) == 0  # who waits for the trainer does not hang
        load.cancel()
        await turns()
        assert load.cancelled()
        assert set((await scene.pool.generate(request("one"))).version_C.tolist()) == {0}
        await scene.publish(2)

    play(main)


@pytest.mark.parametrize("staged", [True, False])
def test_loading_may_take_as_long_as_the_sender_does(staged: bool) -> None:
    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 12))
        await asyncio.sleep(2.5)
        shipment = scene.publish.shipment(1, scene.pool.receivers(), staged, sent=False)
        load = asyncio.ensure_future(scene.pool.load(shipment, 1, "resume"))
        await asyncio.sleep(3 * TIMEOUT)
        scene.publish.send(shipment)
        await load
        check(request("one", 12), await task)
        assert died(scene) == 0

    play(main)


def test_an_engine_takes_a_shipment_and_nothing_else() -> None:
    async def main(scene: Scene) -> None:
        for weights in (None, []):
            with pytest.raises(WeightSyncError, match=r"version 1.*shipment"):
                await scene.pool.load(weights, 1, "resume")

    play(main)


def test_loads_sleeps_and_adds_take_turns() -> None:
    async def main(scene: Scene) -> None:
        asked = samples(6, tokens=15)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(1.5)
        await asyncio.gather(
            scene.publish(1),
            scene.pool.sleep(),
            scene.pool.wake(),
            scene.pool.add(),
            scene.publish(2),
            scene.pool.add(),
        )
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        for slot in ("0", "1"):
            order = [c for c in scene.world.commands(scene.at(slot).name) if not c.startswith("pause")]
            loads = ["expect", "received", "load", "resume"]
            assert order == ["start", *loads, *loads, "sleep", "wake", "resume", *loads]
        assert {fake.version for fake in scene.world.alive} == {2}
        assert len(scene.pool.each()) == 4
        scene.settled()

    play(main)


# ---------------------------------------------------------------------- sleep


def test_a_sleeping_pool_keeps_its_tokens_and_refuses_weights() -> None:
    async def main(scene: Scene) -> None:
        asked = samples(5, tokens=10)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(4.5)
        await scene.pool.sleep()
        await scene.pool.sleep()  # once is enough
        assert all(fake.asleep for fake in scene.world.made)
        assert scene.world.commands("0-1")[-2:] == ["pause keep_cache=False", "sleep"]
        with pytest.raises(WeightSyncError, match="sleep"):
            await scene.publish(1)
        await scene.pool.resume()
        late = scene.ask(request("late"))
        await asyncio.sleep(5 * TIMEOUT)
        assert not late.done()
        await scene.pool.wake()
        await scene.pool.wake()
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        check(request("late"), await late)
        assert died(scene) == 0
        scene.settled()

    play(main)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.parametrize("command", ["pause", "sleep", "wake", "resume"])
def test_a_replica_lost_over_sleep_is_replaced(command: str, fault: str) -> None:
    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=10)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(4.5)
        bad = scene.at("0")
        (bad.dies_in if fault == "dies" else bad.hangs_in).add(command)
        await scene.pool.sleep()
        await asyncio.sleep(TIMEOUT)
        assert all(fake.asleep for fake in scene.world.alive)
        await scene.pool.wake()
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        assert died(scene) == 1
        assert len(scene.pool.each()) == 2
        scene.settled()

    play(main)


def test_a_replica_that_comes_while_the_pool_sleeps_sleeps_too() -> None:
    """It takes no memory that someone else counts on, and is given weights when all are woken."""

    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=10)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(4.5)
        await scene.pool.sleep()
        scene.at("0").die()
        added = await scene.pool.add()
        await asyncio.sleep(5 * TIMEOUT)
        assert [fake.asleep for fake in scene.world.alive] == [True] * 3
        assert scene.publish.asked == []
        await scene.pool.wake()
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        assert sorted(scene.publish.asked) == sorted([scene.at("0").receivers, scene.at(added).receivers])
        assert len(scene.pool.each()) == 3
        scene.settled()

    play(main)


# ---------------------------------------------------------------------- who joins and who leaves


def test_a_replica_that_joins_is_supplied_and_serves() -> None:
    async def main(scene: Scene) -> None:
        tasks = [scene.ask(one) for one in samples(6, tokens=20)]
        await asyncio.sleep(1.5)
        slot = await scene.pool.add()
        await turns()
        assert scene.at(slot).inside == 2
        assert scene.publish.asked == [scene.at(slot).receivers]
        for one, task in zip(samples(6, tokens=20), tasks, strict=True):
            check(one, await task)
        scene.settled()

    play(main)


def test_a_replica_that_joins_a_paused_pool_is_paused() -> None:
    async def main(scene: Scene) -> None:
        await scene.pool.pause()
        name = scene.at(await scene.pool.add()).name
        assert scene.world.commands(name)[-2:] == ["pause keep_cache=False", "load"]
        await scene.pool.resume()
        assert scene.world.commands(name)[-1] == "resume"

    play(main)


@pytest.mark.parametrize("when", [0.1, 0.35, 0.6, 0.85, 1.1, 1.35])
@pytest.mark.parametrize("staged", [True, False])
def test_a_pool_that_is_resumed_while_a_replica_joins_lets_that_finish(when: float, staged: bool) -> None:
    """What is about to load must not begin to generate (`World.wrong`), and must not be left paused either."""

    async def main(scene: Scene) -> None:
        scene.publish.staged = staged
        await scene.pool.pause()
        add = asyncio.ensure_future(scene.pool.add())
        await asyncio.sleep(when)
        await scene.pool.resume()
        name = scene.at(await add).name
        assert scene.world.commands(name)[-1] == "resume"
        found = await scene.pool.each()[name].generate(request("probe"))
        check(request("probe"), found)
        assert died(scene) == 0

    play(main)


def test_a_replica_that_cannot_be_supplied_waits_for_the_next_publish() -> None:
    async def main(scene: Scene) -> None:
        scene.publish.moved_on = True
        slot = await scene.pool.add()
        tasks = [scene.ask(one) for one in samples(6, tokens=20)]
        await asyncio.sleep(5.5)
        assert scene.at(slot).inside == 0
        await scene.publish(1)
        await turns()
        assert scene.at(slot).inside == 2
        await asyncio.gather(*tasks)

    play(main)


def test_weights_that_nobody_needs_any_more_are_not_sent() -> None:
    """A supply that comes too late says so at once: else its sender would wait for receivers that never come."""

    async def main(scene: Scene) -> None:
        for version, receivers in ((0, scene.at("0").receivers), (0, ("nobody-0",))):
            with pytest.raises(MovedOn):
                await scene.pool.feed(scene.publish.shipment(version, receivers))
        scene.publish.moved_on = True
        slot = await scene.pool.add()
        with pytest.raises(MovedOn):
            await scene.pool.feed(scene.publish.shipment(7, scene.at(slot).receivers))
        await scene.pool.sleep()
        with pytest.raises(MovedOn):
            await scene.pool.feed(scene.publish.shipment(0, scene.at(slot).receivers))

    play(main)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("fault", ["dies", "hangs", "tampered"])
@pytest.mark.parametrize("command", ["expect", "received", "pause", "load", "resume"])
def test_a_replacement_that_does_not_take_its_weights_is_replaced(command: str, fault: str, staged: bool) -> None:
    def prepare(fake: Fake) -> None:
        if fake.name == "0-2":
            if fault == "tampered":
                fake.tampered = command
            else:
                (fake.dies_in if fault == "dies" else fake.hangs_in).add(command)

    async def main(scene: Scene) -> None:
        asked = request("one", 12)
        task = scene.ask(asked)
        scene.publish.staged = staged
        await asyncio.sleep(2.5)
        scene.at("0").die()
        check(asked, await task)
        shows = command in ("received", "load") if fault == "tampered" else True
        assert died(scene) == (2 if shows and (staged or command != "received") else 1)
        scene.settled()

    play(main, World(prepare=prepare), replicas=1)


def test_a_replica_that_could_not_be_added_is_no_part_of_the_pool() -> None:
    def prepare(fake: Fake) -> None:
        fake.raises_in = {"start": OSError("no GPU")} if fake.name == "1-2" else {}

    async def main(scene: Scene) -> None:
        with pytest.raises(OSError, match="no GPU"):
            await scene.pool.add()
        await turns()
        assert list(scene.pool._members) == ["0"]
        assert scene.world.commands("1-2")[-1] == "close"
        assert await scene.pool.add() == "1"
        assert len(scene.world.made) == 3

    play(main, World(prepare=prepare), replicas=1)


def test_a_replica_that_leaves_finishes_what_it_serves_and_takes_nothing_new() -> None:
    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=10)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(2.5)
        leaving = scene.at("0")
        remove = asyncio.ensure_future(scene.pool.remove("0"))
        late = scene.ask(request(asked[0].id, 3))  # of a conversation that was there
        await asyncio.sleep(4)
        assert (leaving.inside, leaving.gone.is_set()) == (2, False)
        await remove
        assert leaving.gone.is_set()
        assert [task.done() for task in tasks].count(True) >= 2
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        await late
        assert died(scene) == scene.pool.stats()["continued"] == 0
        assert list(scene.pool._members) == ["1"]
        assert len(scene.world.made) == 2
        scene.settled()

    play(main)


@pytest.mark.parametrize("fault", ["die", "freeze"])
def test_a_replica_that_is_lost_while_it_leaves_is_not_replaced(fault: str) -> None:
    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=20)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(2.5)
        leaving = scene.at("0")
        remove = asyncio.ensure_future(scene.pool.remove("0"))
        await asyncio.sleep(2)
        getattr(leaving, fault)()
        await remove
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        assert list(scene.pool._members) == ["1"]
        assert len(scene.world.made) == 2
        scene.settled()

    play(main)


@pytest.mark.parametrize("mode", MODES)
def test_a_publish_reaches_a_replica_that_leaves(mode: OnPublish) -> None:
    """What it still serves goes on with the weights of all others, or is waited for."""

    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=12)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(2.5)
        remove = asyncio.ensure_future(scene.pool.remove("0"))
        await asyncio.sleep(1)
        await scene.publish(1, mode)
        for one, task in zip(asked, tasks, strict=True):
            got = await task
            check(one, got)
            assert set(got.version_C.tolist()) == ({0} if mode == "drain" else {0, 1})
        await remove

    play(main)


def test_drain_does_not_wait_for_a_replica_that_only_waits_to_leave() -> None:
    """What a dead one served has nobody to go on with: the one that is left takes nothing new."""

    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 20))
        await asyncio.sleep(2.5)
        serving, idle = ("0", "1") if scene.at("0").inside else ("1", "0")
        publish = asyncio.ensure_future(scene.publish(1, "drain"))
        await asyncio.sleep(2)
        remove = asyncio.ensure_future(scene.pool.remove(idle))
        await asyncio.sleep(1)
        scene.at(serving).die()
        await outcome(publish)
        await remove
        await scene.pool.someone()
        await scene.publish(2)
        check(request("one", 20), await task)

    play(main)


def test_a_paused_or_closed_pool_holds_those_that_leave_too() -> None:
    async def main(scene: Scene) -> None:
        tasks = [scene.ask(one) for one in samples(4, tokens=12)]
        await asyncio.sleep(2.5)
        leaving = scene.at("0")
        remove = asyncio.ensure_future(scene.pool.remove("0"))
        await scene.pool.pause()
        before = scene.pool.stats()["tokens"]
        await asyncio.sleep(5 * TIMEOUT)
        assert scene.pool.stats()["tokens"] == before
        await scene.pool.close()
        await remove
        assert leaving.gone.is_set()
        for task in tasks:
            with pytest.raises(RolloutError, match="closed"):
                await task

    play(main)


def test_when_the_last_replica_leaves_who_waits_is_told() -> None:
    async def main(scene: Scene) -> None:
        running, waiting = scene.ask(request("running", 5)), scene.ask(request("waiting", 5))
        await asyncio.sleep(1.5)
        await scene.pool.remove("0")
        check(request("running", 5), await running)
        with pytest.raises(RolloutError, match="all were removed"):
            await waiting
        await scene.pool.add()
        check(request("again", 5), await scene.pool.generate(request("again", 5)))

    play(main, World(capacity=1), replicas=1)


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("when", [0.0, 0.1, 0.3, 0.6, 0.9, 1.1, 1.4])
def test_a_replica_may_leave_before_it_has_come(when: float, stubborn: bool) -> None:
    """A stubborn one is ended, and then is there all the same: starting it was nothing that could be stopped."""

    def prepare(fake: Fake) -> None:
        fake.stubborn = stubborn

    async def main(scene: Scene) -> None:
        add = asyncio.ensure_future(scene.pool.add())
        await asyncio.sleep(when)
        await scene.pool.remove("1")
        await outcome(add)
        fake = scene.world.made[1]
        assert fake.gone.is_set()
        assert scene.world.commands(fake.name)[-1] == "close"
        assert list(scene.pool._members) == ["0"]
        check(request("one"), await scene.pool.generate(request("one")))

    play(main, World(prepare=prepare), replicas=1)


@pytest.mark.parametrize("staged", [True, False])
def test_nobody_leaves_in_the_middle_of_a_publish(staged: bool) -> None:
    """Its sender counts on every receiver."""

    async def main(scene: Scene) -> None:
        scene.world.log.clear()
        publish = asyncio.ensure_future(scene.publish(1, staged=staged))
        await asyncio.sleep(A_LITTLE)
        await scene.pool.remove("0")
        await publish

    world = World()
    play(main, world)
    pause = "pause keep_cache=False"
    assert world.commands("0-1") == (
        ["expect", "received", pause, "load", "resume", "close"]
        if staged
        else [pause, "expect", "load", "resume", "close"]
    )


def test_a_slot_that_nobody_has_cannot_be_removed() -> None:
    async def main(scene: Scene) -> None:
        with pytest.raises(RolloutError, match=r"no rollout engine 7 .*0, 1"):
            await scene.pool.remove("7")

    play(main)
