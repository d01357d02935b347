"""Ranks for tests: processes that stay, in which functions run side by side over gloo."""

from __future__ import annotations

import faulthandler
import multiprocessing
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

START = 180.0  # seconds for all processes to have torch imported
AFTER = 3.0  # that other ranks have to say something, too, once one has failed


class Failed(AssertionError):
    """Some ranks raised, died or hung; the message has their tracebacks."""


class Ranks:
    """Up to `count` processes, started at the first use, and again after a failure.

    Each call runs in a process group of its own, so nothing is left of an earlier one.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._links: list[Connection] = []
        self._calls = 0

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """What `function(*args)` returns on each of the first `ranks` processes. Raises `Failed`."""
        assert 1 <= ranks <= self.count
        if not self._processes:
            self._start()
        self._calls += 1
        store = str(self._home / f"store{self._calls}")
        call = cloudpickle.dumps((function, args, ranks, store, timeout))
        for link in self._links[:ranks]:
            link.send_bytes(call)
        told = self._answers(self._links[:ranks], timeout + AFTER)
        if len(told) == ranks and all(fine for fine, _ in told.values()):
            return [told[rank][1] for rank in range(ranks)]
        said = {rank: text for rank, (fine, text) in told.items() if not fine}
        stuck = {r: (self._home / f"stack{r}").read_text() for r in range(ranks) if r not in told}
        codes = {rank: self._processes[rank].exitcode for rank in stuck}
        self.close()
        parts = [f"rank {rank}:\n{text}" for rank, text in said.items()]
        parts += [f"rank {r} did not end in {timeout:g} s (exit code {codes[r]}):\n{t}" for r, t in stuck.items()]
        raise Failed("\n".join(parts))

    def close(self) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            shutil.rmtree(self._home)
        self._processes, self._links = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._home = Path(tempfile.mkdtemp(prefix="spmd"))
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, str(self._home)), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        if len(self._answers(self._links, START)) < self.count:
            self.close()
            raise Failed(f"{self.count} processes did not start within {START:g} s")

    def _answers(self, links: list[Connection], timeout: float) -> dict[int, tuple[bool, Any]]:
        """By rank; incomplete where a rank failed, died, or took too long."""
        told: dict[int, tuple[bool, Any]] = {}
        waiting, end = {link: rank for rank, link in enumerate(links)}, time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for link in wait(list(waiting), left):
                assert isinstance(link, Connection)
                rank = waiting.pop(link)
                try:
                    told[rank] = cloudpickle.loads(link.recv_bytes())
                except EOFError:
                    told[rank] = (False, "died")
                if not told[rank][0]:
                    end = min(end, time.monotonic() + AFTER)
        return told


def _serve(rank: int, link: Connection, home: str) -> None:
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    assert transformers.__version__
    torch.set_num_threads(1)
    link.send_bytes(cloudpickle.dumps((True, None)))
    while True:
        try:
            call = link.recv_bytes()
        except EOFError:
            return
        function, args, ranks, store, timeout = cloudpickle.loads(call)
        with (Path(home) / f"stack{rank}").open("w") as stack, warnings.catch_warnings():
            warnings.simplefilter("error")
            faulthandler.dump_traceback_later(timeout, file=stack)
            try:
                limit = timedelta(seconds=10 * timeout)  # longer than ours: who hangs is to say where
                dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
                answer = (True, function(*args))
                dist.destroy_process_group()
                _clear_sharding_prop_cache()  # it remembers meshes of the group that is gone
            except BaseException:
                answer = (False, traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()
        link.send_bytes(cloudpickle.dumps(answer))
