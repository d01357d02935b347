"""Processes that send and receive weights, and weights of every kind, for the tests of weights/."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from treadle.errors import WeightSyncError
from treadle.weights.digest import Manifest
from treadle.weights.stream import Address, Landing, Receiving, Sent, Shipper

TRANSPORTS = ["shared_memory", "files", "broadcast"]
MAILBOXES = ["shared_memory", "files"]
M_MMAP_THRESHOLD, CLONE_NEWNS = -3, 0x20000  # of glibc
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def place_for(transport: str, directory: Path) -> str:
    """A new one: a port, or a directory that does not exist yet."""
    if transport == "broadcast":
        with socket.socket() as free:
            free.bind(("", 0))
            return f"127.0.0.1:{free.getsockname()[1]}"
    name = f"treadle-test-{os.getpid()}-{uuid4().hex[:8]}"
    return f"/dev/shm/{name}" if transport == "shared_memory" else str(directory / name)


def raw(tensor: Tensor) -> bytes:
    """Its bytes, row by row."""
    return tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def as_bits(tensor: Tensor) -> Tensor:
    """A copy, as flat integers."""
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(BITS[tensor.element_size()])


def fingerprint(tensor: Tensor) -> str:
    """What a tensor is, found out without treadle."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw(tensor)).hexdigest()}"


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    return [(name, fingerprint(tensor)) for name, tensor in tensors]


def of_bits(shape: Sequence[int], dtype: torch.dtype, make: torch.Generator) -> Tensor:
    """Any bits: numbers of every size, both zeros, infinities, NaNs of every payload."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8, generator=make).view(dtype).reshape(tuple(shape))


@cache
def some_weights(seed: int = 0) -> dict[str, Tensor]:
    """About 1 MB: bfloat16 and float32 by turns, one tensor of 360 kB, hundreds of tiny ones, scalars, empty ones.

    Made once: what a test changes is a copy.
    """
    make = torch.Generator().manual_seed(seed)
    found = {"embed.weight": of_bits((300, 300), torch.float32, make)}
    for layer in range(4):
        found[f"layers.{layer}.up"] = of_bits((100, 300), torch.bfloat16, make)
        found[f"layers.{layer}.norm"] = of_bits((300,), torch.float32, make)
        for number, shape in enumerate([(), (0,), (1,), (3,), (5, 2), (0, 4), (2, 1, 7)] * 6):
            found[f"layers.{layer}.{number}"] = of_bits(shape, (torch.float32, torch.bfloat16)[number % 2], make)
    found["quantised"] = of_bits((64, 33), torch.float8_e4m3fn, make)
    found["head.weight"] = of_bits((300, 100), torch.bfloat16, make).T
    return found


def flipped(tensor: Tensor, share: float, make: torch.Generator) -> Tensor:
    """A copy in which about this share of the elements has one other bit."""
    changed = tensor.clone(memory_format=torch.contiguous_format)
    bits = changed.view(-1).view(BITS[tensor.element_size()])
    chosen = torch.rand(bits.shape, generator=make) < share
    bits[chosen] ^= 1
    return changed


def stepped(weights: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """What an optimizer leaves: many tensors as they were, some a little changed, some all new."""
    make = torch.Generator().manual_seed(1000 + step)
    return {
        name: flipped(tensor, (0.0, 0.02, 1.0, 0.0)[(number + step) % 4], make)
        for number, (name, tensor) in enumerate(weights.items())
    }


@dataclass
class State:
    """What a process keeps between calls."""

    name: str
    landing: Landing
    shipper: Shipper = field(default_factory=Shipper)
    receiving: Receiving | None = None


@dataclass(frozen=True)
class Landed:
    """What a receiver has to say."""

    manifest: Manifest
    found: list[tuple[str, str]]  # names and fingerprints of what it was given, in that order
    seconds: float


class Worker:
    """A process of its own that runs functions of this file, one after the other."""

    def __init__(self, name: str) -> None:
        context = get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        self.process.start()
        theirs.close()
        self.owes = 0  # results

    def start(self, do: Callable[..., Any], *arguments: Any) -> None:
        self.owes += 1
        self._pipe.send((do, arguments))

    def result(self, timeout: float = 30.0) -> Any:
        """What the function gave or raised. Raises `EOFError` where the process died."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"{self.name} has hung for {timeout:g} s")
        outcome = self._pipe.recv()
        self.owes -= 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def call(self, do: Callable[..., Any], *arguments: Any) -> Any:
        self.start(do, *arguments)
        return self.result()

    def died(self) -> bool:
        self.process.join(30)
        return self.process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()


def _serve(pipe: Connection, name: str) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed is no longer counted
    state = State(name, Landing(name))
    while True:
        try:
            do, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(do(state, *arguments))
        except WeightSyncError as error:
            pipe.send(error)
        except Exception as error:  # not all of them can be pickled
            pipe.send(RuntimeError(repr(error)))


def fresh(state: State) -> None:
    """Forget what earlier tests left."""
    state.shipper.close()
    state.landing, state.shipper, state.receiving = Landing(state.name), Shipper(), None


def receive(state: State, address: Address) -> Landed:
    """Receive one publish as an engine does."""
    started = time.monotonic()
    receiving = state.landing.receive(address)
    while address.staged and receiving.manifest is None:
        time.sleep(0.001)
    found = fingerprints(receiving.tensors())
    manifest = receiving.manifest
    assert manifest is not None
    return Landed(dict(manifest), found, time.monotonic() - started)


def receive_and_die(state: State, address: Address) -> None:
    """Die as soon as the first tensor has come."""
    for _ in state.landing.receive(address).tensors():
        os.kill(os.getpid(), signal.SIGKILL)


def send(state: State, address: Address, seed: int) -> Sent:
    return state.shipper.send(some_weights(seed).items(), address)


def send_and_die(state: State, address: Address) -> None:
    """Die in the middle of a publish."""
    state.shipper.send(_dying(some_weights(), 100), address)


def _dying(weights: Mapping[str, Tensor], at: int) -> Iterator[tuple[str, Tensor]]:
    for number, pair in enumerate(weights.items()):
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair


def send_into_little_room(state: State, transport: str, directory: str) -> list[tuple[int, str]]:
    """How sending fails where there is room for 1, 2, … pages: in a file system in memory that this process alone sees
    or, where none can be mounted, with files of less than 4 pages, which are less than a bucket and at times a note."""
    mounted = _mounted(directory)
    weights = {str(number): torch.full((4096,), float(number)) for number in range(4)}  # 16 pages, and 5 of notes
    outcomes = []
    for pages in range(1, 16):
        if mounted:
            subprocess.run(["mount", "-o", f"remount,size={pages * 4096}", directory], check=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (pages % 4 * 4096, resource.RLIM_INFINITY))
        place, shipper = str(Path(directory) / "own"), Shipper()
        try:
            shipper.send(weights.items(), Address(transport, place, 0, ("a",), 16384, True, False, False, 1.0))
            outcomes.append((pages, "it was sent"))
        except WeightSyncError as error:
            outcomes.append((pages, str(error)))
        shipper.close()
        if os.path.exists(place):
            outcomes.append((pages, "it was left"))
    return outcomes


def _mounted(directory: str) -> bool:
    """Make the directory a small file system, in a name space of this process: it goes with it."""
    commands = [["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", "size=4096", "tmpfs", directory]]
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
        return False
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


def streamed(sizes: Iterable[int]) -> Iterator[tuple[str, Tensor]]:
    """Float32 tensors of so many bytes, made as they are asked for."""
    for number, size in enumerate(sizes):
        yield f"layer.{number}", torch.full((size // 4,), float(number))


def send_stream(state: State, address: Address, sizes: list[int]) -> int:
    """Bytes that sending took at most, over what the process had before."""
    before = _peak_from_now()
    state.shipper.send(streamed(sizes), address)
    return _peak() - before


def receive_stream(state: State, address: Address) -> int:
    """Bytes that receiving took at most; whoever loads is slow, and keeps nothing."""
    before = _peak_from_now()
    for _ in state.landing.receive(address).tensors():
        time.sleep(0.002)
    return _peak() - before


def _peak_from_now() -> int:
    """Start to look for the peak of this process's memory. Returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
