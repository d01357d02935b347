"""What goes wrong on a rank becomes one clear error within the limit, and nothing is left running."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.ray_help import Loom, Unreadable, config, gone, make, make_dying, make_on_one, pool
from treadle.controller.group import STEP
from treadle.errors import ConfigError, TreadleError, WorkerError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
LIMIT = 1.5  # seconds of a call
ASKED = 8.0  # more than it takes to find out who is to blame


async def fails(call: Awaitable[Any], message: str, kind: type[TreadleError] = WorkerError) -> TreadleError:
    start = time.monotonic()
    with pytest.raises(kind, match=message) as caught:
        await call
    assert time.monotonic() - start < LIMIT + ASKED
    return caught.value


async def fails_at_once(call: Awaitable[Any], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        await call
    assert time.monotonic() - start < 1.0


def broken(call: Callable[[Any], Awaitable[Any]], message: str, kind: type[TreadleError] = WorkerError) -> None:
    """On two ranks: the call fails so, other roles on these ranks too, from then on at once, and all processes end."""

    async def main() -> None:
        STEP.set(3)
        async with pool(2, timeout=LIMIT) as backend:
            warp = await backend.group("warp", "all", Loom, make)
            weft = await backend.group("weft", "all", Loom, make)
            pids = [pid for _, _, pid in await asyncio.gather(*(s.where() for s in await each(backend)))]
            pids.append(await warp.spawn())
            error = await fails(call(warp), message, kind)
            if kind is not WorkerError:
                assert re.search(r"warp\.\w+ on rank 1 of 2 in step 3, there:\nTraceback", str(error.__cause__))
            for group in (warp, weft):
                await fails_at_once(group.total(1.0), re.escape(str(error)))
                await fails_at_once(group.note_one(1), re.escape(str(error)))
                await fails_at_once(group.release(), re.escape(str(error)))
            with pytest.raises(WorkerError, match=re.escape(str(error))):
                await backend.group("late", "all", Loom, make)
            closing = time.monotonic()
        assert time.monotonic() - closing < 8
        assert gone(pids)

    asyncio.run(main())


async def each(backend: Any) -> list[Any]:
    return await backend.singles("heddle", "all", Loom, [make, make])


def test_one_that_is_killed() -> None:
    broken(lambda warp: warp.end(1), r"^warp\.end on rank 1 of 2 in step 3: The actor died")


def test_one_that_is_killed_where_no_other_waits_for_it() -> None:
    """As by the kernel, where memory has run out."""
    broken(lambda warp: warp.end(0, meet=False), r"^warp\.end on rank 0 of 2 in step 3: The actor died")


def test_one_that_is_stopped() -> None:
    said = (
        r"^warp\.end on rank 1 of 2 in step 3: no end within 1.5 s \(controller\.timeout\): rank 1 is at a stop: its "
    )
    said += r"process does not answer; 1 of 2 ranks wait in a collective, rank 0 at .*ray_help\.py:\d+ in total$"
    broken(lambda warp: warp.end(1, signal.SIGSTOP), said)


def test_one_that_is_stuck_in_python() -> None:
    said = r"^warp\.stuck on rank 1 of 2 in step 3: no end within 1.5 s .*rank 1 is at .*ray_help\.py:\d+ in stuck; "
    broken(lambda warp: warp.stuck(1), said + "1 of 2 ranks wait in a collective, rank 0 at .* in total$")


def test_one_that_is_stuck_where_no_other_waits_for_it() -> None:
    broken(lambda warp: warp.stuck(1, meet=False), r"^warp\.stuck on rank 1 of 2 .* rank 1 is at .* in stuck$")


def test_a_collective_that_one_never_joins() -> None:
    said = (
        r"^warp\.leave_out on rank 1 of 2 in step 3: no end within 1.5 s .*: 1 of 2 ranks wait in a collective, rank 0"
    )
    broken(lambda warp: warp.leave_out(1), said + r" at .* in total, which rank 1 has returned without joining$")


def test_one_that_raises_while_the_others_wait_for_it() -> None:
    said = r"^warp\.fail on rank 1 of 2 in step 3: ValueError: too short$"
    broken(lambda warp: warp.fail(ValueError("too short"), 1, meet=True), said)


def test_one_that_exits() -> None:
    broken(lambda warp: warp.fail(SystemExit(4), 1), r"^warp\.fail on rank 1 of 2 in step 3: SystemExit: 4$")


def test_an_error_of_ours_arrives_as_itself() -> None:
    broken(lambda warp: warp.fail(ConfigError("too long"), 1, meet=True), "^too long$", ConfigError)


def test_an_error_that_does_not_travel() -> None:
    broken(lambda warp: warp.stubborn(1), r"^warp\.stubborn on rank 1 of 2 in step 3: Stubborn: warp and weft$")


def test_a_coroutine_method_that_fails_on_all_ranks() -> None:
    broken(
        lambda warp: warp.fail_beside(OSError("no port")),
        r"^warp\.fail_beside on rank 0 of 2 in step 3: OSError: no port$",
    )


def test_an_argument_that_cannot_be_read_there() -> None:
    broken(lambda warp: warp.take(Unreadable()), r"^warp\.take on rank 0 of 2 in step 3: .*no module of that name here")


def test_a_result_that_cannot_be_sent() -> None:
    broken(lambda warp: warp.unsendable(), r"^warp\.unsendable on rank 0 of 2 in step 3: .*cannot pickle")


def test_a_failure_that_nobody_waits_for_any_more() -> None:
    async def given_up(warp: Any) -> None:
        failing = asyncio.create_task(warp.fail(ValueError("unheard"), 1, meet=True))
        await asyncio.sleep(0)
        failing.cancel()
        await warp.total(1.0)

    broken(given_up, r"^warp\.fail on rank 1 of 2 in step 3: ValueError: unheard$")


def test_calls_that_wait_behind_one_that_fails_fail_with_it() -> None:
    async def main() -> None:
        async with pool(2, timeout=60.0) as backend:
            warp, weft = [await backend.group(role, "all", Loom, make) for role in ("warp", "weft")]
            behind = asyncio.create_task(weft.total(1.0))
            failing = asyncio.create_task(warp.fail(ValueError("torn"), 1, meet=True))
            also = asyncio.create_task(weft.total(1.0))
            assert await behind == 2.0
            await fails(failing, "torn")
            await fails(also, r"warp\.fail on rank 1 of 2: ValueError: torn")

    asyncio.run(main())


def test_replicas_of_one_pool_die_alone() -> None:
    async def main() -> None:
        async with pool(2, timeout=LIMIT) as backend:
            first, second = await backend.singles("heddle", "all", Loom, [make, make])
            await fails(second.end(1, meet=False), r"^heddle\.end on rank 1 of 1: The actor died")
            await fails_at_once(second.where(), "died")
            assert (await first.where())[:2] == (0, 2)

    asyncio.run(main())


# ---------------------------------------------------------------------- starting


@pytest.mark.parametrize(
    ("factory", "message", "kind"),
    [
        (make_on_one, "^no thread left for rank 1$", ConfigError),
        (make_dying, "^start of warp on rank 1 of 2: The actor died", WorkerError),
    ],
)
def test_a_factory_that_fails_on_one_rank_is_named(factory: Any, message: str, kind: type[TreadleError]) -> None:
    """In the meantime the other rank waits for it in a collective."""

    async def main() -> None:
        async with pool(2) as backend:  # whose collectives wait for minutes
            pids = [pid for _, _, pid in await asyncio.gather(*(s.where() for s in await each(backend)))]
            error = await fails(backend.group("warp", "all", Loom, factory), message, kind)
            if kind is ConfigError:
                assert "start of warp on rank 1 of 2, there:\nTraceback" in str(error.__cause__)
            await fails_at_once(backend.group("weft", "all", Loom, make), message.strip("^$"))
        assert gone(pids)

    asyncio.run(main())


def test_a_factory_that_hangs_is_named() -> None:
    async def main() -> None:
        async with pool(2) as backend:
            backend._config = config(start_timeout=2.0)  # the pool itself may take longer to start
            said = (
                r"^start of warp on ranks 0, 1 of 2: no end within 2 s \(controller\.start_timeout\): rank 0 is at .*"
            )
            said += " in <lambda>; rank 1"
            await fails(backend.group("warp", "all", Loom, lambda seat: time.sleep(60)), said)

    asyncio.run(main())


@pytest.mark.parametrize("what", ["killed", "stopped", "stuck"])
def test_close_ends_everything_whatever_state_it_is_in(what: str) -> None:
    async def main() -> None:
        async with pool(2) as backend:
            warp = await backend.group("warp", "all", Loom, make)
            pids = [pid for _, _, pid in await asyncio.gather(*(s.where() for s in await each(backend)))]
            pids.append(await warp.spawn())
            if what == "stuck":
                call = asyncio.create_task(warp.stuck(1))
                await asyncio.sleep(0.2)
                call.cancel()
            else:
                os.kill(pids[1], signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            closing = time.monotonic()
        assert time.monotonic() - closing < 8
        assert gone(pids)

    asyncio.run(main())
