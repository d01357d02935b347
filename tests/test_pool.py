"""A pool of engines that die and hang: every request gets its very tokens, or one clear error."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pool_help import (
    A_LITTLE,
    TIMEOUT,
    VOCABULARY,
    Fake,
    Scene,
    World,
    all_of,
    check,
    died,
    now,
    outcome,
    play,
    request,
    samples,
    turns,
)
from treadle.errors import ReplicaLost, RolloutError
from treadle.rollout.progress import seed
from treadle.types import Completion

# ---------------------------------------------------------------------- places


@pytest.mark.parametrize("chunk", [1, 3])
def test_every_request_gets_its_tokens_and_nothing_is_left_of_it(chunk: int) -> None:
    async def main(scene: Scene) -> None:
        found = await all_of(scene, samples(20, tokens=7))
        assert {int(v) for got in found for v in got.version_C} == {0}
        assert scene.pool.stats()["tokens"] == 20 * 7
        assert scene.pool.stats()["waiting"] == 0
        scene.settled()

    play(main, World(chunk=chunk))


def test_as_many_as_fit_are_served_and_no_more() -> None:
    """Five places, two replicas: ten at once, the rest after them; `settled` holds the fakes' own count against it."""

    async def main(scene: Scene) -> None:
        started = now()
        asked = [scene.ask(one) for one in samples(25, tokens=4)]
        await asyncio.sleep(A_LITTLE)
        assert [fake.inside for fake in scene.world.made] == [5, 5]
        assert scene.pool.stats()["waiting"] == 15
        await asyncio.gather(*asked)
        assert now() - started == 3 * 4
        scene.settled()

    play(main, World(capacity=5))


def test_who_waits_goes_by_priority_and_then_by_arrival() -> None:
    async def main(scene: Scene) -> None:
        ended: list[str] = []

        async def one(name: str, priority: int) -> None:
            await scene.pool.generate(request(name, 1, priority=priority))
            ended.append(name)

        named = {"first": 5, "train 1": 1, "late": 9, "evaluation 1": 0, "train 2": 1, "evaluation 2": 0}
        await asyncio.gather(*(one(name, priority) for name, priority in named.items()))
        assert ended == ["first", "evaluation 1", "evaluation 2", "train 1", "train 2", "late"]

    play(main, World(capacity=1), replicas=1)


def test_a_continuation_keeps_its_turn() -> None:
    """What a dead replica served has waited already; it goes before those that came after it."""

    async def main(scene: Scene) -> None:
        first = scene.ask(request("first", 6))
        later = [scene.ask(one) for one in samples(3)]
        await asyncio.sleep(2.5)
        scene.at("0").die()
        await first
        assert not any(task.done() for task in later)
        await asyncio.gather(*later)

    play(main, World(capacity=1), replicas=1)


def test_a_conversation_waits_for_its_own_replica() -> None:
    async def main(scene: Scene) -> None:
        await scene.pool.generate(request("talk", 1))
        home = next(fake for fake in scene.world.made if "talk" in scene.pool._router._conversations)
        busy = scene.ask(request("other", 8, priority=0))
        await turns()
        assert home.inside == 1
        second = scene.ask(request("talk", 2))
        await asyncio.sleep(3)
        assert scene.pool.stats()["waiting"] == 1  # though the other replica is idle
        await asyncio.gather(busy, second)

    play(main, World(capacity=1))


def test_a_group_shares_a_replica() -> None:
    async def main(scene: Scene) -> None:
        asked = [scene.ask(one) for one in (*samples(4, group="a"), *samples(4, group="b"))]
        await turns()
        assert [fake.inside for fake in scene.world.made] == [4, 4]
        homes = scene.pool._router._conversations
        assert len({homes[f"a.{i}"] for i in range(4)}) == len({homes[f"b.{i}"] for i in range(4)}) == 1
        await asyncio.gather(*asked)

    play(main, World(capacity=6))


def test_cancelling_who_waits_and_who_runs_frees_the_place() -> None:
    async def main(scene: Scene) -> None:
        running, waiting, patient = (scene.ask(request(name, 50)) for name in ("running", "waiting", "patient"))
        await asyncio.sleep(3.5)
        waiting.cancel()
        await turns()
        assert scene.pool.stats()["waiting"] == 1
        running.cancel()
        await turns()
        assert scene.pool.stats()["waiting"] == 0
        assert scene.at("0").inside == 1
        check(request("patient", 50), await patient)
        assert running.cancelled()
        assert waiting.cancelled()
        scene.settled()

    play(main, World(capacity=1), replicas=1)


def test_a_place_is_free_when_the_engine_is_rid_of_the_request() -> None:
    """An engine takes its time to abort: until then it would be served beside the next one (`World.wrong` says so)."""

    async def main(scene: Scene) -> None:
        running, patient = scene.ask(request("running", 50)), scene.ask(request("patient", 2))
        await asyncio.sleep(1.5)
        running.cancel()
        started = now()
        await patient
        assert now() - started == 3 + 2
        await asyncio.sleep(3)
        scene.settled()

    play(main, World(capacity=1, abort=3.0), replicas=1)


@pytest.mark.parametrize("rounds", range(8))
def test_cancelling_at_any_moment_of_being_placed_leaks_nothing(rounds: int) -> None:
    async def main(scene: Scene) -> None:
        running, next_one = scene.ask(request("running", 1)), scene.ask(request("next", 5))
        await asyncio.sleep(1.0)  # the place becomes free at this very instant
        await turns(rounds)
        next_one.cancel()
        await asyncio.gather(running, next_one, return_exceptions=True)
        await turns()
        scene.settled()
        check(request("after", 3), await scene.pool.generate(request("after", 3)))

    play(main, World(capacity=1), replicas=1)


def test_requests_before_the_first_load_wait_for_it() -> None:
    async def main(scene: Scene) -> None:
        asked = samples(5)
        waiting = [scene.ask(one) for one in asked]
        await asyncio.sleep(10 * TIMEOUT)
        assert not any(task.done() for task in waiting)
        assert scene.pool.stats()["version"] == -1
        await scene.publish(3)
        for one, task in zip(asked, waiting, strict=True):
            got = await task
            check(one, got)
            assert set(got.version_C.tolist()) == {3}

    play(main, version=None)


def test_a_request_that_cannot_be_served_is_refused_before_it_waits() -> None:
    async def main(scene: Scene) -> None:
        with pytest.raises(RolloutError, match=r"sample 'bad'.*vocabulary"):
            await scene.pool.generate(request("bad", token_ids=(VOCABULARY,)))
        scene.settled()

    play(main, version=None)


# ---------------------------------------------------------------------- death


def test_a_request_outlives_its_replica() -> None:
    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=10)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(4.5)
        lost = scene.at("0").inside
        scene.at("0").die()
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        stats = scene.pool.stats()
        assert (stats["fenced"], stats["continued"]) == (1, lost)
        assert stats["tokens"] == 4 * 10  # none was sampled twice
        scene.settled()

    play(main, World(capacity=4))


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_death_in_every_place_continues_from_the_tokens_that_there_are(chunk: int) -> None:
    """One that dies again and again under one request: its pieces fit together."""

    async def main(scene: Scene) -> None:
        asked = request("survivor", 60)
        task = scene.ask(asked)
        for _ in range(5):
            while scene.pool.stats()["waiting"] or not (serving := [f for f in scene.world.alive if f.inside]):
                await asyncio.sleep(0.5)
            await asyncio.sleep(2.25)
            serving[0].die()
            await turns()
        got = await task
        check(asked, got)
        assert scene.pool.stats()["continued"] == 5
        positions = sorted(position for noise, position in scene.world.seeds if noise == asked.noise)
        assert len(set(positions)) == len(positions) == 6  # it got on between any two deaths
        scene.settled()

    play(main, World(chunk=chunk), restarts=9)


def test_a_continuation_has_a_seed_of_its_own_that_depends_on_noise_and_position_only() -> None:
    def seeds(cut: float) -> dict[tuple[int, int], int]:
        world = World()

        async def main(scene: Scene) -> None:
            task = scene.ask(request("sample", 12))
            await asyncio.sleep(cut)
            next(fake for fake in scene.world.made if fake.inside).die()
            await task

        play(main, world)
        return world.seeds

    assert seeds(3.5) == seeds(3.75)
    early, late = seeds(3.5), seeds(7.5)
    noise = request("sample").noise
    assert set(early) == {(noise, 0), (noise, 3)}
    assert set(late) == {(noise, 0), (noise, 7)}
    assert len({*early.values(), *late.values()}) == 3
    assert early[noise, 0] == late[noise, 0]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**62), st.integers(0, 2**62))
def test_a_seed_is_that_of_the_noise_and_the_position(noise: int, one: int, other: int) -> None:
    mine = seed(request("a", noise=noise, position=one))
    assert mine == seed(request("b", 3, noise=noise, position=one, priority=0))
    assert 0 <= mine < 2**63
    assert (mine == seed(request("a", noise=noise, position=other))) == (one == other)


@pytest.mark.parametrize("restarts", [0, 1, 4])
def test_no_more_replicas_are_started_than_may_be_and_then_everyone_gets_one_error(restarts: int) -> None:
    async def main(scene: Scene) -> list[Any]:
        tasks = [scene.ask(one) for one in samples(12, tokens=1000)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(1.5)
            for fake in scene.world.alive:
                fake.die()
        errors = [task.exception() for task in tasks]
        assert all(isinstance(error, RolloutError) for error in errors)
        assert {f"rollout.restarts={restarts}" in str(error) for error in errors} == {True}
        assert len(scene.world.made) == 2 + restarts
        with pytest.raises(RolloutError, match=r"rollout\.restarts"):
            await scene.pool.generate(request("later"))
        with pytest.raises(RolloutError, match=r"rollout\.restarts"):
            await scene.pool.someone()
        scene.settled()
        return errors

    play(main, restarts=restarts)


def test_who_waits_while_the_pool_is_paused_hears_of_its_end_too() -> None:
    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 50))
        await asyncio.sleep(2.5)
        await scene.pool.pause()
        scene.at("0").die()
        with pytest.raises(RolloutError, match=r"rollout\.restarts=0"):
            await task

    play(main, replicas=1, restarts=0)


def test_who_waits_for_a_replica_hears_that_none_will_come() -> None:
    async def main(scene: Scene) -> None:
        scene.at("0").dies_in.add("expect")
        scene.at("0").hangs_in.add("close")
        with pytest.raises(ReplicaLost):
            await scene.publish(1)
        with pytest.raises(RolloutError, match=r"rollout\.restarts=0"):
            await scene.pool.someone()

    play(main, replicas=1, restarts=0)


@pytest.mark.parametrize("rounds", range(10))
def test_being_cancelled_when_nobody_is_left_is_being_cancelled(rounds: int) -> None:
    async def main(scene: Scene) -> None:
        running, waiting = scene.ask(request("running", 50)), scene.ask(request("waiting", 50))
        await asyncio.sleep(2.5)
        scene.at("0").die()
        await turns(rounds)
        told = waiting.done()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert waiting.cancelled() != told
        scene.settled()

    play(main, World(capacity=1), replicas=1, restarts=0)


@pytest.mark.parametrize("rounds", range(8))
def test_a_replica_given_up_at_the_moment_it_is_chosen_is_not_used(rounds: int) -> None:
    """It hangs, and its end hangs too: whoever began there would wait for ever."""

    async def main(scene: Scene) -> None:
        running, waiting = scene.ask(request("running", 50)), scene.ask(request("waiting", 3))
        await asyncio.sleep(2.5)
        scene.at("0").freeze()
        scene.at("0").hangs_in.add("close")
        running.cancel()
        await turns(rounds)
        scene.pool._fence(scene.pool._members["0"], ReplicaLost("given up"))
        check(request("waiting", 3), await waiting)
        scene.settled()

    play(main, World(capacity=1), replicas=1)


@pytest.mark.parametrize("fault", ["dies", "hangs", "raises", "odd"])
def test_a_replacement_that_does_not_start_is_a_death_too(fault: str) -> None:
    """Whatever it raises: what went wrong reaches those who wait, who would wait for ever otherwise."""

    def prepare(fake: Fake) -> None:
        if not fake.name.endswith("-1"):
            if fault == "dies":
                fake.dies_in = {"start"}
            elif fault == "hangs":
                fake.hangs_in = {"start"}
            else:
                fake.raises_in = {"start": OSError("no GPU") if fault == "odd" else RolloutError("no model")}

    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 50))
        await asyncio.sleep(2.5)
        scene.at("0").die()
        said = {"dies": "died", "hangs": "start_timeout", "raises": "no model", "odd": "no GPU"}[fault]
        with pytest.raises(RolloutError, match=rf"rollout\.restarts=2.*{said}"):
            await task
        assert len(scene.world.made) == 3

    play(main, World(prepare=prepare), replicas=1, restarts=2)


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_replica_that_does_not_end_is_replaced_all_the_same(fault: str) -> None:
    def prepare(fake: Fake) -> None:
        if fault == "hangs":
            fake.hangs_in = {"close"} if fake.name == "0-1" else set()
        else:
            fake.raises_in = {"close": RuntimeError("zombie")}

    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 50))
        await asyncio.sleep(2.5)
        scene.at("0").freeze()
        check(request("one", 50), await task)

    play(main, World(prepare=prepare), replicas=1, restarts=1)


def test_an_engine_that_does_not_start_at_first_is_told_at_once() -> None:
    def prepare(fake: Fake) -> None:
        fake.hangs_in = {"start"} if fake.name.startswith("1") else set()

    async def main(scene: Scene) -> None: ...

    with pytest.raises(RolloutError, match=r"1-2 did not start.*rollout\.start_timeout, 50 s"):
        play(main, World(prepare=prepare))


GARBAGE = {
    "nan": "not finite",
    "outside": f"token {VOCABULARY}, outside the vocabulary",
    "unequal": "2 tokens and 3 log-probs",
    "early": r"before its time \(abort\)",
    "silent end": "before its time, and gave no reason",
    "cancelled": "dropped",
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_ends_its_request_with_one_clear_error_and_no_other(what: str) -> None:
    async def main(scene: Scene) -> None:
        scene.at("0").garbage = what
        tasks = [scene.ask(one) for one in samples(2)]
        bad, good = [await outcome(task) for task in tasks]
        if isinstance(bad, Completion):
            bad, good = good, bad
        assert isinstance(good, Completion)
        assert isinstance(bad, RolloutError)
        assert not isinstance(bad, ReplicaLost)
        assert re.search(rf"sample 'r\.\d'.*{GARBAGE[what]}|{GARBAGE[what]} sample 'r\.\d'", str(bad))
        assert died(scene) == 0
        scene.settled()

    play(main, World(capacity=1, chunk=2))


def test_an_engine_that_does_not_stop_is_stopped_at_what_was_asked() -> None:
    async def main(scene: Scene) -> None:
        scene.at("0").garbage = "too many"
        got = await scene.pool.generate(request("one", 8))
        check(request("one", 8), got)
        assert len(got.token_C) == 8

    play(main, World(chunk=5), replicas=1)


def test_a_stop_token_in_the_middle_of_a_piece_ends_the_request() -> None:
    async def main(scene: Scene) -> None:
        whole = await scene.pool.generate(request("one", 9))
        stop = int(whole.token_C[4])
        scene.at("0").garbage = "too many"  # it does not look out for what should stop it
        asked = request("one", 9, stop_token_ids=(stop,))
        got = await scene.pool.generate(asked)
        check(asked, got)
        assert (len(got.token_C), got.finish) == (5, "stop")

    play(main, World(chunk=3), replicas=1)


# ---------------------------------------------------------------------- hanging


def test_a_hung_replica_is_fenced_in_time_and_its_requests_go_on() -> None:
    async def main(scene: Scene) -> None:
        asked = samples(4, tokens=30)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(4.5)
        scene.at("0").freeze()
        started = now()
        while not died(scene):
            await asyncio.sleep(0.25)
        assert TIMEOUT - 1 <= now() - started <= 1.25 * TIMEOUT
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        assert died(scene) == 1
        scene.settled()

    play(main, World(capacity=2))


def test_pieces_with_nothing_in_them_are_no_sign_of_life() -> None:
    async def main(scene: Scene) -> None:
        scene.at("0").garbage = "empty"
        started = now()
        check(request("one", 3), await scene.pool.generate(request("one", 3)))
        assert died(scene) == 1
        assert now() - started < 2 * TIMEOUT

    play(main, replicas=1)


def test_a_replica_that_hangs_before_its_first_token_is_fenced() -> None:
    async def main(scene: Scene) -> None:
        await asyncio.sleep(20 * TIMEOUT)  # it had nothing to do: that is no hanging
        check(request("one", 3), await scene.pool.generate(request("one", 3)))
        assert died(scene) == 0
        await asyncio.sleep(20 * TIMEOUT)
        scene.at("0").freeze()
        asked = request("two", 3)
        task, started = scene.ask(asked), now()
        while not died(scene):
            await asyncio.sleep(0.25)
        assert TIMEOUT <= now() - started <= 1.25 * TIMEOUT
        check(asked, await task)

    play(main, World(latency=3.0), replicas=1)


@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_a_pool_that_is_held_is_not_taken_for_hung(how: str) -> None:
    async def main(scene: Scene) -> None:
        asked = samples(3, tokens=10)
        tasks = [scene.ask(one) for one in asked]
        await asyncio.sleep(4.5)
        await getattr(scene.pool, how)()
        await asyncio.sleep(50 * TIMEOUT)
        assert not any(task.done() for task in tasks)
        held = scene.pool.stats()["tokens"]
        await (scene.pool.resume() if how == "pause" else scene.pool.wake())
        assert scene.pool.stats()["tokens"] == held
        for one, task in zip(asked, tasks, strict=True):
            check(one, await task)
        assert died(scene) == 0
        scene.settled()

    play(main)


@pytest.mark.parametrize("how", ["pause", "sleep", "load"])
def test_answers_that_take_long_do_not_make_a_held_replica_look_hung(how: str) -> None:
    """Going on again takes a command, and that takes its time; the time that it was held does not count."""

    async def main(scene: Scene) -> None:
        task = scene.ask(request("one", 20))
        await asyncio.sleep(3.5)
        if how == "load":
            await scene.publish(1)
        else:
            await getattr(scene.pool, how)()
            await asyncio.sleep(TIMEOUT)
            await (scene.pool.resume() if how == "pause" else scene.pool.wake())
        check(request("one", 20), await task)
        assert died(scene) == 0

    play(main, World(command=0.8 * TIMEOUT, latency=0.5 * TIMEOUT), replicas=1)


def test_nothing_is_sampled_while_a_pool_is_paused() -> None:
    async def main(scene: Scene) -> None:
        tasks = [scene.ask(one) for one in samples(4, tokens=10)]
        await asyncio.sleep(0.75)  # the pause is done at the instant of the first token
        await scene.pool.pause()
        assert scene.world.commands("0-1")[-1] == "pause keep_cache=True"
        before = scene.pool.stats()["tokens"]
        late = scene.ask(request("late", 1))
        await asyncio.sleep(30)
        assert scene.pool.stats()["tokens"] == before
        assert not late.done()
        await scene.pool.resume()
        await asyncio.gather(late, *tasks)

    play(main, World(hops=10))


# ---------------------------------------------------------------------- each replica on its own


def test_each_replica_can_be_asked_on_its_own() -> None:
    async def main(scene: Scene) -> None:
        found = scene.pool.each()
        assert sorted(found) == ["0-1", "1-2"]
        for name, one in found.items():
            probe = asyncio.ensure_future(one.generate(request("probe", 3)))
            await asyncio.sleep(1.5)
            assert [fake.name for fake in scene.world.made if fake.inside] == [name]
            check(request("probe", 3), await probe)
        scene.settled()

    play(main)


def test_a_probe_does_not_wait_for_a_place() -> None:
    async def main(scene: Scene) -> None:
        tasks = [scene.ask(one) for one in samples(9, tokens=4)]
        await asyncio.sleep(1.5)
        probes = [one.generate(request("probe", 2, priority=0)) for one in scene.pool.each().values()]
        for got in await asyncio.gather(*probes):
            check(request("probe", 2), got)
        assert sum(task.done() for task in tasks) < 6
        await asyncio.gather(*tasks)
        scene.settled()

    play(main)


@pytest.mark.parametrize("moment", ["waiting", "running", "before"])
def test_a_probe_does_not_go_on_elsewhere(moment: str) -> None:
    async def main(scene: Scene) -> None:
        one = scene.pool.each()["0-1"]
        if moment == "waiting":
            busy = [scene.ask(s) for s in samples(4, tokens=8)]
            await turns()
        if moment == "before":
            await scene.pool.remove("0")
        probe = asyncio.ensure_future(one.generate(request("probe", 5)))
        await asyncio.sleep(1.5)
        if moment != "before":
            scene.at("0").die()
        with pytest.raises(ReplicaLost, match="0-1"):
            await probe
        if moment == "waiting":
            await asyncio.gather(*busy)
        scene.settled()

    play(main)


def test_a_probe_is_answered_before_its_replica_leaves() -> None:
    async def main(scene: Scene) -> None:
        tasks = [scene.ask(s) for s in samples(4, tokens=8)]
        await asyncio.sleep(1.5)
        probe = asyncio.ensure_future(scene.pool.each()["0-1"].generate(request("probe", 5)))
        await turns()
        await scene.pool.remove("0")
        check(request("probe", 5), await probe)
        await asyncio.gather(*tasks)

    play(main)


@pytest.mark.parametrize("patient", [True, False])
def test_a_probe_that_waits_holds_back_who_leaves(patient: bool) -> None:
    async def main(scene: Scene) -> None:
        await scene.pool.pause()
        probe = asyncio.ensure_future(scene.pool.each()["0-1"].generate(request("probe", 5)))
        await turns()
        remove = asyncio.ensure_future(scene.pool.remove("0"))
        await asyncio.sleep(TIMEOUT)
        assert not remove.done()
        if patient:
            await scene.pool.resume()
            check(request("probe", 5), await probe)
        else:
            probe.cancel()
        await remove

    play(main)


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("state", ["serving", "empty", "paused", "asleep", "loading", "draining", "replacing"])
def test_closing_ends_everything_at_once(state: str) -> None:
    async def main(scene: Scene) -> None:
        tasks = [scene.ask(one) for one in samples(7, tokens=50)]
        others: list[asyncio.Future[Any]] = []
        await asyncio.sleep(2.5)
        if state == "paused":
            await scene.pool.pause()
        elif state == "asleep":
            await scene.pool.sleep()
        elif state == "loading":
            scene.at("0").hangs_in.add("load")
            others.append(asyncio.ensure_future(scene.publish(1)))
            await asyncio.sleep(2)
        elif state == "draining":
            others.append(asyncio.ensure_future(scene.publish(1, "drain")))
            await asyncio.sleep(2)
        elif state == "replacing":
            scene.world.prepare = lambda fake: fake.hangs_in.add("start")
            for fake in scene.world.alive:
                fake.die()
            await turns()
            others.append(asyncio.ensure_future(scene.pool.someone()))
            others.append(asyncio.ensure_future(scene.pool.add()))
            await asyncio.sleep(2)
        await scene.pool.close()
        for task in (*tasks, *others):
            error = await outcome(task)
            assert isinstance(error, RolloutError)
        assert not scene.world.alive
        for refused in (scene.pool.generate(request("late")), scene.pool.add(), scene.pool.someone()):
            with pytest.raises(RolloutError, match="closed"):
                await refused
        with pytest.raises(RolloutError, match="closed"):
            await scene.pool.load(scene.publish.shipment(9, ()), 9, "drain")
        await scene.pool.close()
        scene.settled()

    play(main, version=None if state == "empty" else 0)


def test_closing_waits_until_engines_are_rid_of_their_requests() -> None:
    async def main(scene: Scene) -> None:
        tasks = [scene.ask(one) for one in samples(4, tokens=50)]
        await asyncio.sleep(2.5)
        await scene.pool.close()
        assert not scene.pool._tasks
        assert [fake.inside for fake in scene.world.made] == [0, 0]
        for task in tasks:
            assert isinstance(await outcome(task), RolloutError)

    play(main, World(abort=2.0))


def test_closing_is_told_to_who_waits_for_a_replica() -> None:
    async def main(scene: Scene) -> None:
        scene.world.prepare = lambda fake: fake.hangs_in.add("start")
        scene.at("0").dies_in.add("expect")
        with pytest.raises(ReplicaLost):
            await scene.publish(1)
        waiting = asyncio.ensure_future(scene.pool.someone())
        await asyncio.sleep(TIMEOUT)
        assert not waiting.done()
        await scene.pool.close()
        with pytest.raises(RolloutError, match="closed"):
            await waiting

    play(main, replicas=1)


def test_closing_waits_for_no_engine_that_does_not_end() -> None:
    async def main(scene: Scene) -> None:
        scene.at("0").hangs_in.add("close")
        started = now()
        await scene.pool.close()
        assert now() - started <= TIMEOUT

    play(main)
