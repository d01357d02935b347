"""Two programs that take turns, step by step, so that whatever else the machine does hits both alike.

The parent starts each program as a `Player` and asks for one step at a time. The program makes its first step by itself
(the warm-up), calls `Turns.done` after each, and is blocked on a pipe until its next turn: while one works, the other
does not compute. This file imports nothing beyond the standard library, for a peer runs it in its own environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------------- what both do


@dataclass(frozen=True)
class Job:
    """One training step, the same for both: `prompts` groups of `group` answers of at most `tokens` tokens."""

    prompts: int
    group: int
    tokens: int
    model: str = "models/smollm2"
    data: str = "examples/addition/train.jsonl"
    reward: Literal["sum", "spread"] = "spread"
    options: dict[str, Any] = field(default_factory=dict)  # of one side

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @staticmethod
    def given() -> Job:
        """The one on this program's command line."""
        return Job(**json.loads(sys.argv[1]))


def last_number(response: str, answer: str) -> float:
    """1 where the last number of the response is the answer. Of an untrained model many groups are all wrong."""
    found = re.findall(r"-?\d+", response)
    return float(bool(found) and found[-1] == answer)


def spread(response: str, answer: str) -> float:
    """A number in [0, 1) that differs between any two responses, so that every answer of every group trains."""
    return int.from_bytes(hashlib.blake2b(response.encode("utf-8", "replace"), digest_size=4).digest()) / 2**32


REWARDS: dict[str, Callable[[str, str], float]] = {"sum": last_number, "spread": spread}

LEARNING_RATE = 1e-9
"""Below what a float32 weight can show: answers keep the lengths that the model begins with, on both sides."""


# ---------------------------------------------------------------------- the program's end


class Turns:
    """Make it before anything prints: standard output becomes the way back to the parent, and prints go to its log."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        self._peak = 0
        os.dup2(2, 1)

    def done(self, facts: dict[str, Any]) -> None:
        """A step is made; returns when the next one is due. Ends the program where none is."""
        self.peak()
        answer = {**facts, "peak_bytes": self._peak + children_bytes()}
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()
        if not sys.stdin.readline():
            os._exit(0)  # no checkpoint, no export: nothing of this run is of use

    def peak(self) -> int:
        """The largest resident size of this process since the last call."""
        peak = status_bytes("self", "VmHWM")
        self._peak = max(self._peak, peak)
        Path("/proc/self/clear_refs").write_text("5")  # begin anew
        return peak


def children_bytes() -> int:
    """The largest resident sizes of the processes that this one started, summed."""
    found = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return sum(status_bytes(pid, "VmHWM") for pids in found for pid in pids)


def status_bytes(pid: str, name: str) -> int:
    """A size in `/proc/PID/status`, 0 where the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return 0 if found is None else 1024 * int(found.group(1))


# ---------------------------------------------------------------------- the parent's end


class Player:
    """A program that makes steps when told to."""

    def __init__(
        self, name: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*map(str, command)],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def warmed_up(self) -> dict[str, Any]:
        """Wait for the start and the first step."""
        return self._answer()

    def step(self) -> dict[str, Any]:
        """One step: what the program says of it, and the "seconds" it took as seen from here."""
        assert self._process.stdin is not None
        begin = time.perf_counter()
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        facts = self._answer()
        return {**facts, "seconds": time.perf_counter() - begin}

    def end(self) -> None:
        """Let the program end, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with self._process:
            self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}; see {self.log}")
        return json.loads(line)


def command(python: Path, module: str, job: Job) -> list[str | Path]:
    return [python, "-m", module, json.dumps(asdict(job))]


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold a file lock, if one is named, so that several benchmarks share a machine by turns."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
