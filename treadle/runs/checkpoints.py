"""Checkpoints at step boundaries: written aside, forced to the disk, renamed into place.

`checkpoints/step_000012/` holds whatever its writer put there, and `manifest.json`: every file with its size and its
digest, written last. A directory whose manifest does not hold is not a checkpoint. Sizes are looked at each time,
digests (about a second a gigabyte) only when a checkpoint is chosen to go on from.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.errors import RunError
from treadle.runs.files import PARTIAL, disk_full, reading, says_full, sync, write_aside, writing

MANIFEST = "manifest.json"
STATE = "state.json"
DIGEST = "blake2b"

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run; the newest `keep` are kept."""

    def __init__(self, directory: Path, keep: int = 1) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must stay")
        self.directory = directory
        self.keep = keep
        self._damaged: set[Path] = set()  # by their digests
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            for stray in directory.glob(f"step_*{PARTIAL}"):
                shutil.rmtree(stray)  # of a process that was killed while it wrote

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """A new directory to fill; the checkpoint exists when the block ends without an error, and not before."""
        final = self.directory / f"step_{step:06d}"
        partial = final.with_name(final.name + PARTIAL)
        if self._whole(step, final):
            raise ValueError(f"{final}: this checkpoint exists; a whole one is never replaced")
        with writing(final):
            partial.mkdir()
        try:
            yield partial
            self._seal(partial, step)
            with writing(final):
                if final.exists():
                    shutil.rmtree(final)  # damaged: a whole one has been refused above
                partial.rename(final)
                sync(self.directory)
            self._damaged.discard(final)
        except BaseException as error:
            full = _full(partial, error)
            shutil.rmtree(partial, ignore_errors=True)
            if full:
                raise disk_full(final) from error
            raise
        self._prune()

    def latest(self) -> tuple[int, Path] | None:
        """Step and directory of the newest checkpoint that is whole to the byte; what `keep` does not ask for goes."""
        found, damaged = _search(self.directory)
        self._damaged |= damaged
        self._prune()
        return found

    @staticmethod
    def newest(directory: Path) -> tuple[int, Path] | None:
        """`latest` of a run that another process may hold: looks, and touches nothing."""
        return _search(directory)[0]

    @staticmethod
    def step(directory: Path) -> int | None:
        """Step of the newest checkpoint that is whole by the sizes of its files; None if there is none."""
        return next((step for step, path in _all(directory) if _fault(path, step) is None), None)

    # ------------------------------------------------------------------ inside

    def _seal(self, partial: Path, step: int) -> None:
        with writing(partial):
            files = sorted(p for p in partial.rglob("*") if p.is_file())
            for path in [*files, *(p for p in partial.rglob("*") if p.is_dir())]:
                sync(path)
            listed = {p.relative_to(partial).as_posix(): {"bytes": p.stat().st_size, DIGEST: _digest(p)} for p in files}
        write_aside(partial / MANIFEST, json.dumps({"step": step, "files": listed}, indent=1).encode())

    def _prune(self) -> None:
        """Remove what is older than the newest `keep` whole ones. A damaged newer one is left for people to look at."""
        whole = [step for step, path in _all(self.directory) if self._whole(step, path)][: self.keep]
        for step, path in _all(self.directory):
            if len(whole) == self.keep and step < whole[-1]:
                with writing(path):
                    shutil.rmtree(path)

    def _whole(self, step: int, path: Path) -> bool:
        return path not in self._damaged and _fault(path, step) is None


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """The loop's own state as JSON: floats come back bit for bit; NaN and what JSON does not have is a `ValueError`."""
    with writing(path):
        path.write_text(json.dumps(state, allow_nan=False, indent=1), encoding="utf-8")


def load_state(path: Path, *keys: str) -> dict[str, Any]:
    """What `save_state` wrote; `RunError` where it cannot be read or lacks one of `keys`."""
    mend = "Remove this checkpoint to go on from an older one."
    with reading(path, mend):
        state = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(state, dict) or not state.keys() >= set(keys):
        raise RunError(f"{path}: not the state of a checkpoint: {', '.join(keys)} are expected. {mend}")
    return state


def _all(directory: Path) -> list[tuple[int, Path]]:
    """Newest first, whole or not."""
    names = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in directory.glob("step_*"))
    return sorted(((int(match[1]), path) for match, path in names if match), reverse=True)


def _search(directory: Path) -> tuple[tuple[int, Path] | None, set[Path]]:
    """The newest checkpoint that is whole to the byte, and the damaged ones that are newer."""
    damaged: set[Path] = set()
    for step, path in _all(directory):
        fault = _fault(path, step, digests=True)
        if fault is None:
            return (step, path), damaged
        log.warning("checkpoint %s is ignored: %s", path, fault)
        damaged.add(path)
    return None, damaged


def _fault(path: Path, step: int, digests: bool = False) -> str | None:
    """What is wrong with a checkpoint; None if its manifest holds."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, written in manifest["files"].items():
            if (found := (path / name).stat().st_size) != written["bytes"]:
                return f"{name} has {found} bytes instead of {written['bytes']}"
            if digests and _digest(path / name) != written[DIGEST]:
                return f"{name} does not hold the bytes that were written"
        return None if manifest["step"] == step else f"its manifest is that of step {manifest['step']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, DIGEST).hexdigest()


def _full(partial: Path, error: BaseException) -> bool:
    """Whether a full disk broke the writing of a checkpoint.

    Libraries that write by native code raise errors of their own: safetensors with the system's words, torch without
    any; for the latter the disk itself is asked.
    """
    if isinstance(error, RunError) or not isinstance(error, Exception):
        return False
    in_words = os.strerror(errno.ENOSPC) in str(error)
    return says_full(error) or in_words or shutil.disk_usage(partial).free < 1 << 16
