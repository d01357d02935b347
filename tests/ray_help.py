"""Workers for tests of the controller: classes that know nothing of RL, and what they are called with."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from treadle.batch import Batch
from treadle.controller.config import ControllerConfig, PoolConfig
from treadle.controller.host import Seat
from treadle.controller.ray import RayBackend
from treadle.controller.verbs import everywhere, one, sharded
from treadle.errors import ConfigError
from treadle.handles import Learned
from treadle.types import Mean, Unit


@dataclass(frozen=True)
class Rows:
    """Something shardable that is no batch: numbers, with the bundle and the family of each."""

    values: tuple[int, ...]
    bundles: tuple[int, ...]
    families: tuple[int, ...]

    def units(self, attention: float) -> list[Unit]:
        rows: dict[int, list[int]] = {}
        for row, bundle in enumerate(self.bundles):
            rows.setdefault(bundle, []).append(row)
        return [Unit(r, float(sum(1 + self.values[i] % 7 for i in r)), self.families[r[0]]) for r in rows.values()]

    def select(self, rows: Sequence[int]) -> Rows:
        return Rows(*(tuple(column[r] for r in rows) for column in (self.values, self.bundles, self.families)))

    def gather(self, rows: Sequence[Sequence[int]], results: Sequence[list[Any]]) -> list[Any]:
        whole: list[Any] = [None] * len(self.values)
        for mine, found in zip(rows, results, strict=True):
            assert len(mine) == len(found)
            for row, value in zip(mine, found, strict=True):
                assert whole[row] is None
                whole[row] = value
        return whole


class Stubborn(Exception):
    """Pickles, and cannot be made again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Unreadable:
    """Can be sent, and not read."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    if not sys.argv[0].endswith(("pytest", "__main__.py")):
        raise ImportError("no module of that name here")


class Loom:
    """A worker of one rank among others."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.calls: list[Any] = []
        self._go = threading.Event()

    @everywhere
    def where(self) -> tuple[int, int, int]:
        return self.rank, self.ranks, os.getpid()

    @everywhere
    def note(self, what: Any) -> None:
        self.calls.append(what)

    @one
    def note_one(self, what: Any) -> str:
        self.calls.append(what)
        return f"rank {self.rank}"

    @everywhere
    def noted(self) -> list[list[Any]]:
        """The calls of all ranks."""
        found: list[Any] = [self.calls] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(found, self.calls)
        self.calls = []
        return found

    @everywhere
    def total(self, value: float, ballast: Any = None, pause: float = 0.0) -> float:
        """Of the values of all ranks."""
        time.sleep(pause)
        self.calls.append(value)
        summed = torch.tensor([value], dtype=torch.float64)
        if self.ranks > 1:
            dist.all_reduce(summed)
        return float(summed)

    @everywhere
    def keywords(self, a: int, b: int = 0, *, c: int = 0) -> tuple[int, int, int]:
        return a, b, c

    @sharded
    def double(self, rows: Rows, times: int = 2) -> list[tuple[int, int, tuple[int, ...]]]:
        """Of each row: twice its value, the rank, and all values that this rank got."""
        return [(times * value, self.rank, rows.values) for value in rows.values]

    @sharded
    def annotate(self, batch: Batch, state: Mapping[str, Any] | None = None) -> Mapping[str, torch.Tensor]:
        rank_N = torch.full((len(batch),), self.rank)
        return {"twice_T": 2.0 * batch.token_T, "length_N": batch.length_N, "rank_N": rank_N}

    @sharded
    def learn(self, batch: Batch) -> Learned:
        seen = {"twice_T": 2.0 * batch.token_T}
        return Learned({"tokens": Mean(float(batch.token_T.sum()), float(len(batch.token_T)))}, seen)

    @everywhere
    def hold(self) -> bool:
        return self._go.wait(20)

    @everywhere
    async def release(self) -> str:
        await asyncio.sleep(0)
        self._go.set()
        return f"rank {self.rank}"

    # ------------------------------------------------------------------ what goes wrong

    @everywhere
    def fail(self, error: BaseException, rank: int, meet: bool = False) -> None:
        """`rank` raises; the others end, or wait for it in a collective."""
        if self.rank == rank:
            raise error
        if meet:
            self.total(1.0)

    @everywhere
    def stubborn(self, rank: int) -> None:
        if self.rank == rank:
            raise Stubborn("warp", "weft")

    @one
    def fail_one(self, error: BaseException) -> None:
        raise error

    @everywhere
    async def fail_beside(self, error: Exception) -> None:
        raise error

    @everywhere
    def end(self, rank: int, number: int = signal.SIGKILL, meet: bool = True) -> None:
        """A signal to itself. SIGKILL is also what the kernel sends where memory runs out."""
        if self.rank == rank:
            os.kill(os.getpid(), number)
            time.sleep(60)
        if meet:
            self.total(1.0)

    @everywhere
    def stuck(self, rank: int, meet: bool = True) -> None:
        while self.rank == rank:
            time.sleep(0.01)
        if meet:
            self.total(1.0)

    @everywhere
    def leave_out(self, rank: int) -> None:
        """All but one rank enter a collective."""
        if self.rank != rank:
            self.total(1.0)

    @everywhere
    def unsendable(self) -> Any:
        return threading.Lock()

    @one
    def spawn(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    @everywhere
    def take(self, what: Any) -> str:
        return type(what).__name__


def make(seat: Seat) -> Loom:
    return Loom(seat.rank, seat.ranks)


def make_on_one(seat: Seat) -> Loom:
    """Rank 1 cannot; the others wait for it."""
    if seat.rank == 1:
        raise ConfigError("no thread left for rank 1")
    dist.barrier()
    return make(seat)


def make_dying(seat: Seat) -> Loom:
    if seat.rank == seat.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return make(seat)


def config(**changes: Any) -> ControllerConfig:
    return ControllerConfig(backend="ray", **{"timeout": 60.0, "start_timeout": 120.0, **changes})


@asynccontextmanager
async def pool(ranks: int, **changes: Any) -> AsyncIterator[RayBackend]:
    """A pool named `all` for a while."""
    backend = await RayBackend.open(config(**changes), {"all": PoolConfig(ranks=ranks, cpus=0.1, threads=1)})
    try:
        yield backend
    finally:
        await backend.close()


def gone(pids: Sequence[int], within: float = 15.0) -> bool:
    """Whether these processes end."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
