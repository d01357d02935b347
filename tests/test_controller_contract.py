"""What every back end of the controller promises: one suite, over this process and over Ray with 1, 2 and 4 ranks."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.batches import batches
from tests.ray_help import Loom, Rows, config, make
from treadle.batch import Batch
from treadle.controller.config import PoolConfig
from treadle.controller.device import LocalDevice
from treadle.controller.group import STEP
from treadle.controller.local import LocalGroup
from treadle.controller.ray import RayBackend
from treadle.errors import ConfigError, TrainingError, WorkerError
from treadle.handles import Learned


@dataclass
class Shed:
    """Two roles that share their ranks, and the event loop in which they were made."""

    ranks: int
    warp: Any
    weft: Any
    runner: asyncio.Runner
    local: bool

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(main, 60))


@pytest.fixture(
    scope="module", params=["local", *(pytest.param(f"ray-{n}", marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def shed(request: pytest.FixtureRequest) -> Iterator[Shed]:
    back_end, _, ranks = request.param.partition("-")
    with asyncio.Runner() as runner:
        if back_end == "local":
            device = LocalDevice(threads=1)
            yield Shed(1, LocalGroup(Loom(), device), LocalGroup(Loom(), device), runner, True)
            device.close()
            return
        request.getfixturevalue("ray_cluster")
        count = int(ranks)

        async def opened() -> tuple[RayBackend, Any, Any]:
            backend = await RayBackend.open(config(), {"all": PoolConfig(ranks=count, cpus=0.1, threads=1)})
            return backend, *[await backend.group(role, "all", Loom, make) for role in ("warp", "weft")]

        backend, warp, weft = runner.run(opened())
        yield Shed(count, warp, weft, runner, False)
        runner.run(backend.close())


# ---------------------------------------------------------------------- verbs


def test_a_verb_says_which_ranks_are_reached_and_whose_answer_it_is(shed: Shed) -> None:
    async def main() -> None:
        await shed.warp.noted()
        assert (await shed.warp.where())[:2] == (0, shed.ranks)
        await shed.warp.note("all")
        assert await shed.warp.note_one("first") == "rank 0"
        assert await shed.warp.noted() == [["all", "first"], *[["all"]] * (shed.ranks - 1)]
        assert await shed.warp.total(1.5) == 1.5 * shed.ranks

    shed.run(main())


def test_a_method_without_a_verb_cannot_be_called(shed: Shed) -> None:
    for name in ("__len__", "missing", "calls"):
        with pytest.raises((AttributeError, TypeError)):
            getattr(shed.warp, name)()


def test_keywords_and_defaults_are_those_of_the_method(shed: Shed) -> None:
    rows = Rows((1, 2, 3), (0, 1, 2), (0, 0, 0))

    async def main() -> None:
        assert await shed.warp.keywords(1) == (1, 0, 0)
        assert await shed.warp.keywords(b=2, a=1, c=3) == (1, 2, 3)
        assert [value for value, *_ in await shed.warp.double(times=5, rows=rows)] == [5, 10, 15]
        assert [value for value, *_ in await shed.warp.double(rows)] == [2, 4, 6]
        for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"d": 1}), ((1,), {"a": 1})):
            with pytest.raises(TypeError):
                await shed.warp.keywords(*args, **kwargs)
        assert await shed.warp.keywords(7) == (7, 0, 0)

    shed.run(main())


# ---------------------------------------------------------------------- sharded


def drawn(random: random.Random, count: int) -> Rows:
    """Rows of families of any size that lie in any order, some of them in bundles of two or three."""
    families, bundles = [], []
    while len(families) < count:
        size = min(random.randint(1, 6), count - len(families))
        family = 100 + len(families)
        families += [family] * size
        while len(bundles) < len(families):
            bundle = len(bundles)
            bundles += [bundle] * min(random.choice([1, 1, 2, 3]), len(families) - len(bundles))
    order = list(range(count))
    random.shuffle(order)
    values = [random.randint(0, 1000) for _ in range(count)]
    return Rows(tuple(values), tuple(bundles[i] for i in order), tuple(families[i] for i in order))


@pytest.mark.parametrize("count", [0, 1, 3, 7, 50])
def test_results_come_back_in_the_order_of_the_rows(shed: Shed, count: int) -> None:
    """Shuffled, interleaved, fewer than ranks, indivisible; what was bundled has met one rank."""
    chance = random.Random(count)

    async def main() -> None:
        for _ in range(1 if count == 0 else 6):
            rows = drawn(chance, count)
            found = await shed.warp.double(rows)
            assert [value for value, *_ in found] == [2 * value for value in rows.values]
            seen = {rank: values for _, rank, values in found}
            assert Counter(v for values in seen.values() for v in values) == Counter(rows.values)
            of = {
                bundle: {rank for (_, rank, _), b in zip(found, rows.bundles, strict=True) if b == bundle}
                for bundle in rows.bundles
            }
            assert all(len(ranks) == 1 for ranks in of.values())
            if len(of) >= 2 * shed.ranks:
                assert len(seen) == shed.ranks

    shed.run(main())


def test_fields_of_a_batch_come_back_in_its_order(shed: Shed) -> None:
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(batches())
    def check(batch: Batch) -> None:
        found = shed.run(shed.warp.annotate(batch, {"anything": 1}))
        assert torch.equal(found["twice_T"], 2.0 * batch.token_T)
        assert torch.equal(found["length_N"], batch.length_N)
        for bundle in batch.bundle_N.unique():
            assert len(found["rank_N"][batch.bundle_N == bundle].unique()) == 1
        learned = shed.run(shed.warp.learn(batch))
        assert isinstance(learned, Learned)
        assert learned.statistics["tokens"].value == pytest.approx(float(batch.token_T.float().mean()))
        assert torch.equal(learned.seen["twice_T"], 2.0 * batch.token_T)

    check()


# ---------------------------------------------------------------------- order


def test_coroutine_methods_run_beside_those_that_compute(shed: Shed) -> None:
    async def main() -> None:
        holding = asyncio.create_task(shed.warp.hold())
        await asyncio.sleep(0.05)
        assert not holding.done()
        assert await shed.warp.release() == "rank 0"
        assert await holding

    shed.run(main())


def test_calls_of_two_roles_meet_every_rank_in_one_order(shed: Shed) -> None:
    """Each has a collective of its own, and arguments of any size: crossed, they would hang or mix their sums."""
    chance = random.Random(0)

    async def call(group: Any, value: float) -> None:
        for _ in range(chance.randint(0, 5)):
            await asyncio.sleep(0)
        ballast = torch.zeros(chance.choice([1, 1000, 1_000_000]))
        assert await group.total(value, ballast, pause=chance.choice([0.0, 0.001])) == value * shed.ranks

    async def main() -> None:
        await shed.warp.noted()
        await shed.weft.noted()
        await asyncio.gather(*(call(chance.choice([shed.warp, shed.weft]), float(i)) for i in range(60)))
        for group in (shed.warp, shed.weft):
            calls = await group.noted()
            assert all(of_rank == calls[0] for of_rank in calls)
            assert len(calls[0]) > 10

    shed.run(main())


def test_calls_made_together_run_in_the_order_of_being_made(shed: Shed) -> None:
    async def main() -> None:
        await shed.warp.noted()
        await asyncio.gather(*(shed.warp.note(i) for i in range(20)))
        assert await shed.warp.noted() == [list(range(20))] * shed.ranks

    shed.run(main())


def test_a_call_that_was_given_up_leaves_the_others_in_order(shed: Shed) -> None:
    async def main() -> None:
        for wait in (0.0, 0.01, 0.05):
            given_up = asyncio.create_task(shed.warp.total(1.0, pause=0.1))
            behind = asyncio.create_task(shed.weft.total(2.0))
            await asyncio.sleep(wait)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            assert await shed.warp.total(3.0) == 3.0 * shed.ranks
            assert await behind == 2.0 * shed.ranks

    shed.run(main())


def test_what_cannot_be_sent_is_refused_and_the_next_call_goes_on(shed: Shed) -> None:
    lock = threading.Lock()  # in one process nothing is sent

    async def main() -> None:
        for args, kwargs in (((1, lock), {}), ((1,), {"ballast": lock})):
            if shed.local:
                assert await shed.warp.total(*args, **kwargs) == 1.0
            else:
                with pytest.raises(TypeError, match=r"[Cc]ould not serialize|cannot pickle"):
                    await shed.warp.total(*args, **kwargs)
        assert await shed.warp.total(4.0) == 4.0 * shed.ranks
        assert await shed.weft.total(5.0) == 5.0 * shed.ranks

    shed.run(main())


# ---------------------------------------------------------------------- errors that one rank alone can raise


def test_an_error_of_one_rank_arrives_and_the_next_call_goes_on(shed: Shed) -> None:
    async def main() -> None:
        STEP.set(17)
        with pytest.raises(TrainingError, match=r"^nothing left$") as ours:
            await shed.warp.fail_one(TrainingError("nothing left"))
        with pytest.raises(KeyError if shed.local else WorkerError) as other:
            await shed.warp.fail_one(KeyError("shuttle"))
        if not shed.local:  # in one process tracebacks lead there by themselves
            where = f"warp.fail_one on rank 0 of {shed.ranks} in step 17"
            assert str(other.value) == f"{where}: KeyError: 'shuttle'"
            for caught in (ours, other):
                assert str(caught.value.__cause__).startswith(f"{where}, there:\nTraceback")
                assert ", in fail_one\n" in str(caught.value.__cause__)
        if shed.ranks == 1:  # several that failed are done with: test_controller_failures.py
            with pytest.raises(ConfigError, match="no such pattern"):
                await shed.warp.fail_beside(ConfigError("no such pattern"))
            with pytest.raises(TrainingError, match="no thread"):
                await shed.warp.fail(TrainingError("no thread"), 0)
        assert await shed.warp.total(1.0) == shed.ranks

    shed.run(main())


def test_roles_of_a_rank_are_neighbours(shed: Shed) -> None:
    """Both roles of a rank are in one process."""

    async def main() -> None:
        assert await shed.warp.where() == await shed.weft.where()

    shed.run(main())


def test_a_lock_does_not_pickle() -> None:
    """What the test above rests on."""
    with pytest.raises(TypeError):
        pickle.dumps(threading.Lock())
