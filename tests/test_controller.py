"""The controller's local back end: turns on a device, verbs, errors that arrive as themselves."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from treadle.controller.device import LocalDevice, alone
from treadle.controller.local import LocalGroup
from treadle.controller.verbs import everywhere, one, sharded


def test_calls_take_turns_on_one_thread_and_smaller_priorities_go_first() -> None:
    device, order, threads = LocalDevice(), [], set()
    begin = threading.Event()

    def call(name: str) -> str:
        threads.add(threading.get_ident())
        order.append(name)
        return name

    async def main() -> list[str]:
        blocked = asyncio.create_task(device.run(lambda: begin.wait(10), 5))
        await asyncio.sleep(0.05)  # it holds the device while the others queue
        named = {"decode 1": 1, "learn": 0, "decode 2": 1, "evaluate": 0}
        waiting = [asyncio.create_task(device.run(lambda n=n: call(n), p)) for n, p in named.items()]
        await asyncio.sleep(0)
        begin.set()
        await blocked
        return [await task for task in waiting]

    assert asyncio.run(main()) == ["decode 1", "learn", "decode 2", "evaluate"]
    device.close()
    assert order == ["learn", "evaluate", "decode 1", "decode 2"]
    assert len(threads) == 1


def test_an_exception_arrives_as_itself_and_the_device_goes_on() -> None:
    device = LocalDevice(threads=1)

    def fail() -> None:
        raise KeyError("culprit")

    async def main() -> int:
        with pytest.raises(KeyError, match="culprit") as caught:
            await device.run(fail)
        assert caught.traceback[-1].name == "fail"
        return await device.run(lambda: 7)

    assert asyncio.run(main()) == 7
    device.close()


def test_a_cancelled_call_that_has_not_begun_never_runs() -> None:
    device, ran, begin = LocalDevice(), [], threading.Event()

    async def main() -> None:
        blocked = asyncio.create_task(device.run(lambda: begin.wait(10)))
        given_up = asyncio.create_task(device.run(lambda: ran.append(1)))
        await asyncio.sleep(0.02)
        given_up.cancel()
        await asyncio.sleep(0)
        begin.set()
        await blocked

    asyncio.run(main())
    device.close()
    assert not ran


class Loom:
    """Any class will do: the controller knows nothing of RL."""

    def __init__(self) -> None:
        self.rows = 0

    @everywhere
    def weave(self, rows: int) -> int:
        self.rows += rows
        return self.rows

    @sharded
    def double(self, values: list[int]) -> list[int]:
        return [2 * v for v in values]

    @one
    def name(self) -> str:
        return "loom"

    def private(self) -> None: ...


def test_a_group_offers_the_methods_that_carry_a_verb() -> None:
    device = LocalDevice()
    group = LocalGroup(Loom(), device)

    async def main() -> tuple[int, list[int], str]:
        await group.weave(2)
        return await group.weave(rows=3), await group.double([1, 2]), await group.name()

    assert asyncio.run(main()) == (5, [2, 4], "loom")
    with pytest.raises(AttributeError, match=r"Loom\.private has no verb"):
        _ = group.private
    with pytest.raises(AttributeError):
        _ = group.missing
    device.close()


def test_the_loops_thread_computes_by_itself_and_others_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        device, others = LocalDevice(threads=2), []
        with alone():
            assert torch.get_num_threads() == 1
            assert asyncio.run(device.run(torch.get_num_threads)) == 2
            thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            with pytest.raises(ValueError, match="inside"), alone():
                raise ValueError("inside")
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        assert others == [3]
        device.close()
    finally:
        torch.set_num_threads(before)
