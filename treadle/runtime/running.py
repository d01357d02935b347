"""Running a coroutine to its end from anywhere, a notebook included."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, also from a notebook, whose thread has an event loop that is already running."""
    if not _inside_a_loop():
        return asyncio.run(main)
    outcome: Future[T] = Future()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def told() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        return await main

    def elsewhere() -> None:
        try:
            outcome.set_result(asyncio.run(told()))
        except BaseException as error:  # carried to the caller
            outcome.set_exception(error)

    thread = threading.Thread(target=elsewhere, name="treadle")
    thread.start()
    try:
        return outcome.result()
    except KeyboardInterrupt:  # the notebook's stop button: end as Ctrl-C does, books balanced
        loop, task = begun.result()
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
