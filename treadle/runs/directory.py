"""`RunDirectory`: the files of a run by name, held by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from treadle.config.yaml_text import from_text
from treadle.errors import RunError
from treadle.runs.checkpoints import Checkpoints
from treadle.runs.files import PARTIAL, reading, write_aside, writing

HEADER = "# Resolved configuration of a treadle run.\n"
"""First line of `config.yaml`: by it a run is told from a directory that merely has such a file."""

FREE_KEYS = frozenset({"steps", "run.*", "controller.*", "*trainer.shard_ranks", "*trainer.cpu_offload"})
"""Keys (shell patterns) that may differ when a run is continued."""


class RunDirectory:
    """Names of a run's files. `open` makes or continues a run and holds its lock; `existing` only looks.

    ::

        with RunDirectory.open(Path("runs/first"), config_text) as directory:
            directory.metrics    # runs/first/metrics.jsonl
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "environment.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.samples = path / "samples"
        self.ledger = path / "ledger.sqlite"
        self.checkpoints = path / "checkpoints"
        self.checkpointed = path / "checkpointed"
        self.summary = path / "summary.json"
        self.log = path / "log.txt"
        self.curves = path / "curves.png"
        self.model = path / "model"
        self.trackers = path / "trackers"
        self.lock = path / "run.lock"
        self._held: IO[str] | None = None
        with reading(path, "Name another directory."):
            self.config.exists()  # a name that the file system cannot hold fails here, and not in some later look

    # ------------------------------------------------------------------ opening

    @classmethod
    def open(cls, path: Path, config_text: str, free: Collection[str] = FREE_KEYS) -> RunDirectory:
        """Make a new run, or continue the one that is there.

        `config_text` is the resolved configuration as YAML. Raises `RunError` where another process holds the run,
        where the directory holds something that is not a run, and where a key differs that is not in `free`.
        """
        directory = cls(path)
        directory._refuse_strangers()
        with writing(path):
            directory.samples.mkdir(parents=True, exist_ok=True)
            directory.checkpoints.mkdir(exist_ok=True)
            directory._held = directory._take_lock()
        try:
            directory._settle_config(config_text, free)
        except BaseException:
            directory.close()
            raise
        return directory

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """A run to look at, without its lock; `RunError` if there is none."""
        directory = cls(path)
        if not directory._is_run():
            what = "is not a run (it has no config.yaml written by a run)" if path.exists() else "does not exist"
            raise RunError(f"{path} {what}. Name the directory that was `run.dir` of a training run.")
        return directory

    def close(self) -> None:
        """Release the lock. The lock of a killed process is released by the system."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ checkpoints

    def mark_checkpointed(self) -> None:
        """Leave a mark, outside of `checkpoints/`, that this run can be continued."""
        if not self.checkpointed.exists():
            write_aside(self.checkpointed, b"This run has written a checkpoint. Without one it is not begun anew.\n")

    def refuse_loss(self, any_whole: bool) -> None:
        """`RunError` where a checkpoint was written and none is whole now: to begin anew would erase the records."""
        if not any_whole and (self.checkpointed.exists() or self.finished):
            raise RunError(
                f"{self.path}: its checkpoints are gone or damaged. Put them back, or name another run.dir, "
                "or remove the directory yourself."
            )

    # ------------------------------------------------------------------ looking

    @property
    def finished(self) -> bool:
        """The run came to its end. (A finished run goes on when `Recorder` opens it again, e.g. with more steps.)"""
        return self.summary.exists()

    @property
    def config_text(self) -> str:
        with reading(self.config, "Put back the configuration that the run was started with."):
            return self.config.read_text(encoding="utf-8").removeprefix(HEADER)

    def settings(self) -> dict[str, Any]:
        """The configuration by dotted key."""
        return leaves(from_text(self.config_text, str(self.config)))

    def read_summary(self) -> dict[str, Any] | None:
        """What the run wrote when it finished: at least `steps` (int) and `data_ended` (bool)."""
        if not self.finished:
            return None
        mend = "Remove it: the same command then goes on from the last checkpoint and writes it again."
        with reading(self.summary, mend):
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        if not isinstance(summary, dict) or [type(summary.get(k)) for k in ("steps", "data_ended")] != [int, bool]:
            raise RunError(f'{self.summary}: not a summary: "steps" and "data_ended" are expected in it. {mend}')
        return summary

    def samples_file(self, what: str, step: int) -> Path:
        """Where the samples of a step (`what` is "step") or of the evaluation after it ("evaluation") are."""
        return self.samples / f"{what}_{step:06d}.parquet"

    def samples_files(self, what: str) -> dict[int, Path]:
        """The files that `samples_file` names and that are there, by step; whatever else lies there is left out."""
        there = {path for path in self.samples.glob(f"{what}_*.parquet") if path.is_file()}
        numbers = (path.stem.removeprefix(f"{what}_") for path in there)
        return {n: p for n in map(int, filter(str.isdecimal, numbers)) if (p := self.samples_file(what, n)) in there}

    def holder(self) -> str | None:
        """The process that holds this run now, in words; None if none does."""
        if not self.lock.exists():
            return None
        with self._open_lock("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "another process"
        return None

    # ------------------------------------------------------------------ inside

    def _is_run(self) -> bool:
        if not self.config.is_file():
            return False
        with self.config.open(encoding="utf-8", errors="replace") as file:
            return file.readline() == HEADER

    def _refuse_strangers(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"run.dir: {self.path} is a file. Name a directory.")
        if not self.path.exists() or self._is_run():
            return
        # What `open` leaves behind when it is killed before the configuration is in place.
        own = {p.name for p in (self.samples, self.checkpoints, self.lock)} | {self.config.name + PARTIAL}
        strange = sorted({p.name for p in self.path.iterdir()} - own)
        if strange:
            raise RunError(
                f"run.dir: {self.path} is not empty and is not a run (it holds {strange[0]!r}). "
                "Name a new directory, or move those files away: nothing of yours is ever deleted."
            )

    def _open_lock(self, mode: str) -> IO[str]:
        if self.lock.is_dir():
            raise RunError(f"{self.lock}: a folder, and no lock of a run. Remove it.")
        return self.lock.open(mode, encoding="utf-8", errors="replace")

    def _take_lock(self) -> IO[str]:
        # A lock of the open file and not of a name: it ends with the process, however that ends.
        file = self._open_lock("a+")
        for _ in range(5):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)  # `holder` takes it for an instant when someone looks
                continue
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            return file
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RunError(f"{self.path} is in use by {holder}. Wait until it has ended, or name another run.dir.")

    def _settle_config(self, text: str, free: Collection[str]) -> None:
        if self._is_run():
            old, new = self.settings(), leaves(from_text(text, "config"))
            changed = [k for k in sorted(old.keys() | new.keys()) if old.get(k, _ABSENT) != new.get(k, _ABSENT)]
            fixed = [k for k in changed if not any(fnmatchcase(k, pattern) for pattern in free)]
            any_whole = Checkpoints.step(self.checkpoints) is not None
            if changed:
                self.refuse_loss(any_whole)
            if fixed and any_whole:  # else it begins anew, with nothing to lose
                lines = "".join(f"\n  {k}: {old.get(k, _ABSENT)} → {new.get(k, _ABSENT)}" for k in fixed)
                raise RunError(
                    f"{self.path} was started with another configuration:{lines}\n"
                    "Use the old values to continue it, or name another run.dir. "
                    f"Free to change: {', '.join(sorted(free))}."
                )
            if not changed:
                return
        write_aside(self.config, (HEADER + text).encode())


_ABSENT = "(absent)"


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaf values by dotted key: `{"a": {"b": 1}}` gives `{"a.b": 1}`."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {k: v for name, value in tree.items() for k, v in leaves(value, f"{prefix}.{name}".lstrip(".")).items()}
