"""Who is named when something is wrong: a `Group` over links that do as they are told, on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.virtual_clock import run
from treadle.controller.group import Group, Lost
from treadle.controller.host import Failure, failure
from treadle.controller.verbs import everywhere, one, sharded
from treadle.errors import ConfigError, WorkerError

LIMIT = 100.0


class Worker:
    @everywhere
    def weave(self, a: Any = None, b: Any = None) -> Any: ...
    @sharded
    def cut(self, whole: Any, other: Any = None) -> Any: ...
    @one
    def ask(self) -> Any: ...


class FakeLink:
    """`does`: what becomes of each call, by and by; the last one goes on."""

    def __init__(self, rank: int, does: Callable[[], Awaitable[Any]], state: Any = (False, "nothing")) -> None:
        self.rank, self.does, self.state = rank, does, state
        self.fate: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()
        self.sent: list[Any] = []
        self.shared: list[Any] = []
        self.refuses: Exception | None = None

    def send(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], ordered: bool
    ) -> Awaitable[Any]:
        if self.refuses is not None:
            raise self.refuses
        self.sent.append((method, tuple(args), dict(kwargs)))
        return self.does()

    async def status(self) -> Any:
        if self.state is None:
            await asyncio.Event().wait()
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def share(self, value: Any) -> Any:
        self.shared.append(value)
        return f"<{value}>"


def gives(value: Any, after: float = 0.0) -> Callable[[], Awaitable[Any]]:
    async def call() -> Any:
        await asyncio.sleep(after)
        return value

    return call


def dies(after: float = 0.0) -> Callable[[], Awaitable[Any]]:
    async def call() -> Any:
        await asyncio.sleep(after)
        raise Lost("killed")

    return call


def raised(error: BaseException, collective: bool = False) -> Failure:
    told = failure(error)
    return Failure(told.error, told.text, "Traceback: there", collective)


OK = gives(7)
NEVER = gives(None, after=1e6)
WAITS, ELSEWHERE = (True, "a.py:1 in meet"), (False, "b.py:2 in loop")
TORN, RESET = raised(ValueError("torn")), raised(RuntimeError("reset by peer"), collective=True)
Rank = tuple[Callable[[], Awaitable[Any]], Any]


ONE, LATE = "g.weave on rank 1 of 2: ", "no end within 100 s (controller.timeout): "
SPOILED = "a collective failed on rank 0 (RuntimeError: reset by peer): "
WAITING, MEET = "1 of 2 ranks wait in a collective", ", rank 0 at a.py:1 in meet"
LOOP, LEFT = "rank 1 is at b.py:2 in loop", ", which rank 1 has returned without joining"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        # a death is named before what it did to others, however late it is told
        ([(OK, None), (dies(), None)], f"{ONE}killed"),
        ([(gives(RESET), None), (dies(1.0), None)], f"{ONE}killed"),
        ([(gives(TORN), None), (dies(1.0), None)], f"{ONE}killed"),
        ([(gives(RESET), None), (NEVER, Lost("killed"))], f"{ONE}{SPOILED}rank 1 is at its end: killed; {WAITING}"),
        # then who failed by itself, before those that waited for it
        ([(gives(RESET), None), (gives(TORN, 1.5), None)], f"{ONE}ValueError: torn"),
        ([(NEVER, WAITS), (gives(TORN), None)], f"{ONE}ValueError: torn"),
        ([(gives(TORN), None), (gives(TORN), None)], "g.weave on rank 0 of 2: ValueError: torn"),
        # then who is missing
        ([(NEVER, WAITS), (NEVER, ELSEWHERE)], f"{ONE}{LATE}{LOOP}; {WAITING}{MEET}"),
        (
            [(NEVER, WAITS), (NEVER, None)],
            f"{ONE}{LATE}rank 1 is at a stop: its process does not answer; {WAITING}{MEET}",
        ),
        ([(NEVER, WAITS), (OK, None)], f"{ONE}{LATE}{WAITING}{MEET}{LEFT}"),
        ([(gives(RESET), None), (OK, None)], f"{ONE}{SPOILED}{WAITING}{LEFT}"),
        ([(gives(RESET), None), (NEVER, ELSEWHERE)], f"{ONE}{SPOILED}{LOOP}; {WAITING}"),
        ([(OK, None), (NEVER, ELSEWHERE)], f"{ONE}{LATE}{LOOP}"),
        (
            [(NEVER, ELSEWHERE)] * 6,
            f"g.weave on ranks 0, 1, 2, 3 and others of 6: {LATE}"
            + "; ".join(f"rank {rank} is at b.py:2 in loop" for rank in range(4)),
        ),
        # then all of them
        ([(NEVER, WAITS)] * 2, f"g.weave on ranks 0, 1 of 2: {LATE}2 of 2 ranks wait in a collective{MEET}"),
        ([(gives(RESET), None)] * 2, "g.weave on rank 0 of 2: RuntimeError: reset by peer"),
    ],
)
def test_who_is_named(ranks: list[Rank], message: str) -> None:
    async def main() -> None:
        links = [FakeLink(rank, does, state) for rank, (does, state) in enumerate(ranks)]
        group, other = (Group(name, Worker, links, timeout=LIMIT) for name in "gh")
        start = asyncio.get_running_loop().time()
        with pytest.raises(WorkerError) as caught:
            await group.weave()
        assert str(caught.value) == message
        assert asyncio.get_running_loop().time() - start <= LIMIT + 10
        sent = [len(link.sent) for link in links]
        for again in (group.weave, group.ask, other.weave):
            with pytest.raises(WorkerError) as caught:
                await again()
            assert str(caught.value) == message
        assert [len(link.sent) for link in links] == sent

    run(main())


def test_an_error_of_ours_is_itself_with_its_place_as_the_cause() -> None:
    async def main() -> None:
        links = [FakeLink(0, NEVER, WAITS), FakeLink(1, gives(raised(ConfigError("mend it"))))]
        with pytest.raises(ConfigError, match=r"^mend it$") as caught:
            await Group("g", Worker, links, timeout=LIMIT).weave()
        assert str(caught.value.__cause__) == "g.weave on rank 1 of 2, there:\nTraceback: there"

    run(main())


def test_one_rank_that_raised_goes_on_and_one_that_hung_does_not() -> None:
    async def main() -> None:
        link = FakeLink(0, gives(TORN))
        group = Group("g", Worker, [link], timeout=LIMIT)
        with pytest.raises(WorkerError, match="torn"):
            await group.weave()
        link.does = OK
        assert await group.weave() == 7
        link.does, link.state = NEVER, ELSEWHERE
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"rank 0 is at b.py:2"):
                await group.weave()
        assert len(link.sent) == 3

    run(main())


def test_one_of_several_that_raised_alone_goes_on() -> None:
    async def main() -> None:
        links = [FakeLink(0, gives(TORN)), FakeLink(1, OK)]
        group = Group("g", Worker, links, timeout=LIMIT)
        with pytest.raises(WorkerError, match=r"g.ask on rank 0 of 2: ValueError: torn"):
            await group.ask()
        links[0].does = OK
        assert await group.weave() == 7
        assert [len(link.sent) for link in links] == [2, 1]

    run(main())


def test_a_call_behind_one_that_breaks_the_ranks_ends_with_it() -> None:
    async def main() -> None:
        links = [FakeLink(0, NEVER, WAITS), FakeLink(1, dies(5.0))]
        group = Group("g", Worker, links, timeout=LIMIT)
        failing = asyncio.create_task(group.weave())
        await asyncio.sleep(1)
        links[1].does = NEVER
        start = asyncio.get_running_loop().time()
        with pytest.raises(WorkerError, match="killed"):
            await Group("h", Worker, links, timeout=LIMIT).weave()
        assert asyncio.get_running_loop().time() - start < 7
        with pytest.raises(WorkerError, match="killed"):
            await failing

    run(main())


def test_a_call_that_was_given_up_still_tells_of_its_failure() -> None:
    async def main() -> None:
        for does in (gives(TORN, 3.0), dies(3.0)):
            links = [FakeLink(0, NEVER, WAITS), FakeLink(1, does)]
            group = Group("g", Worker, links, timeout=LIMIT)
            given_up = asyncio.create_task(group.weave())
            await asyncio.sleep(1)
            given_up.cancel()
            links[1].does = NEVER
            with pytest.raises(WorkerError, match=r"g.weave on rank 1 of 2: (ValueError: torn|killed)"):
                await group.weave()
            assert asyncio.get_running_loop().time() % 1000 < LIMIT

    run(main())


def test_what_one_rank_was_not_told_ends_the_use_of_all() -> None:
    async def main() -> None:
        links = [FakeLink(0, NEVER, WAITS), FakeLink(1, OK)]
        links[1].refuses = TypeError("a lock")
        group = Group("g", Worker, links, timeout=LIMIT)
        with pytest.raises(TypeError, match="a lock"):
            await group.weave()
        with pytest.raises(WorkerError, match=r"g.weave on rank 1 of 2: it could not be told: a lock"):
            await group.weave()

    run(main())


class Whole:
    """Six rows; remembers what is cut out of it."""

    def __init__(self) -> None:
        self.taken: list[list[int]] = []

    def units(self, attention: float) -> Any:
        from treadle.types import Unit

        return [Unit([row], 1.0 + attention, row) for row in range(6)]

    def select(self, rows: Sequence[int]) -> str:
        self.taken.append(list(rows))
        return "rows " + " ".join(map(str, rows))

    def gather(self, rows: Sequence[Sequence[int]], results: Sequence[Any]) -> Any:
        return list(zip(map(list, rows), results, strict=True))


def test_what_several_ranks_get_is_shared_once_before_any_is_told() -> None:
    async def main() -> None:
        links = [FakeLink(rank, OK) for rank in range(3)]
        whole = Whole()
        group = Group("g", Worker, links, timeout=LIMIT)
        found = await group.cut(whole, other="state")
        assert found == list(zip(whole.taken, [7, 7, 7], strict=True))
        assert sorted(itertools.chain(*whole.taken)) == list(range(6))
        parts = [f"rows {' '.join(map(str, rows))}" for rows in whole.taken]
        assert [link.shared for link in links] == [["state", parts[0]], [parts[1]], [parts[2]]]
        assert [link.sent for link in links] == [[("cut", (f"<{part}>", "<state>"), {})] for part in parts]
        await group.weave("x", b="y")
        assert links[0].shared[2:] == ["x", "y"]
        assert all(link.sent[1] == ("weave", ("<x>", "<y>"), {}) for link in links)

    run(main())


def test_one_rank_gets_the_whole_as_it_is() -> None:
    async def main() -> None:
        link, whole = FakeLink(0, OK), Whole()
        assert await Group("g", Worker, [link], timeout=LIMIT).cut(whole) == 7
        assert link.sent == [("cut", (whole,), {})]
        assert (whole.taken, link.shared) == ([], [])

    run(main())


def test_virtual_time_costs_none() -> None:
    start = time.monotonic()
    run(asyncio.sleep(1e5))
    assert time.monotonic() - start < 1
