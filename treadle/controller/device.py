"""Devices that several roles share by turns, and the thread that owns them."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import platform
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_CLOSE = 1 << 30  # a priority behind everything else
_PAUSE_SOFT = 1  # of omp_pause_resource_t
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of mallopt(3)


class LocalDevice:
    """This machine's cores (or its one GPU), used by one call at a time.

    All compute of in-process roles runs on one thread: two threads that each bring their own team of OpenMP threads
    would spin on the same cores. Smaller priorities go first, so learning overtakes generation between two of its
    steps, which then waits with its tokens kept.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            import torch

            threads = torch.get_num_threads()
        self._threads = threads
        self._waiting: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._work, name="treadle-device", daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T], priority: int = 1) -> T:
        """Run `call` on the device's thread when its turn comes; its exception is raised here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def deliver(value: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return  # the caller left; what was computed is of no use to anyone
            if error is None:
                done.set_result(value)  # type: ignore[arg-type]
            else:
                done.set_exception(error)

        def turn() -> None:
            value, error = None, None
            if done.cancelled():
                return
            try:
                value = call()
            except BaseException as raised:  # carried to the caller, whatever it is
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, value, error)

        self._waiting.put((priority, next(self._order), turn))
        return await done

    def stack(self) -> traceback.StackSummary:
        """Where its thread is in the call that it runs now; empty if it waits for one."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = traceback.extract_stack(frame) if frame is not None else []
        running = [i for i, f in enumerate(frames) if f.name == "turn" and f.filename == __file__]
        return traceback.StackSummary.from_list(frames[running[0] + 1 :] if running else [])

    def close(self) -> None:
        """Finish what is waiting and end the thread."""
        self._waiting.put((_CLOSE, next(self._order), None))
        self._thread.join()

    def _work(self) -> None:
        import torch

        keep_memory()
        torch.get_num_threads()  # the first question takes over what other threads have said, so it comes first
        torch.set_num_threads(self._threads)  # counted by thread, so it must be said on this one
        while (turn := self._waiting.get()[2]) is not None:
            turn()
            del turn  # or the last call's tensors would live until the next one


@contextmanager
def alone() -> Iterator[None]:
    """The calling thread computes by itself while this is open, and its team of OpenMP threads is ended.

    Once the threads of all teams, idle ones included, are more than the cores, libgomp lets each of them sleep where it
    would spin for a moment. Then a team is slow to begin, which took a quarter of the time of decoding.
    """
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        _end_team()
        # It counts for this thread alone; those that will come are to have what they would have had.
        restore = threading.Thread(target=torch.set_num_threads, args=(before,))
        restore.start()
        restore.join()
        yield
    finally:
        torch.set_num_threads(before)


def _end_team() -> None:
    """Give back the OpenMP threads of the calling thread."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for library in {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}:
        with suppress(AttributeError, OSError):  # of before OpenMP 5; replaced since it was loaded
            ctypes.CDLL(library).omp_pause_resource_all(_PAUSE_SOFT)


def keep_memory() -> None:
    """Have the C library keep what tensors give back, instead of returning it to the kernel page by page and asking for
    it again: that took 10 to 20 % of a training step on a CPU. The process stays as large as it ever was."""
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
        library.mallopt(parameter, value)
