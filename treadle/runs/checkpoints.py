"""Checkpoints at step boundaries: written aside, forced to the disk, renamed into place.

`checkpoints/step_000012/` holds whatever its writer put there, and `manifest.json`: every file with its size, written
last. A directory whose manifest does not hold is not a checkpoint.
"""

from __future__ import annotations

import errno
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
from treadle.runs.files import PARTIAL, disk_full, says_full, sync, write_aside, writing

MANIFEST = "manifest.json"
STATE = "state.json"

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run; the newest `keep` are kept."""

    def __init__(self, directory: Path, keep: int = 1) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must stay")
        self.directory = directory
        self.keep = keep
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            for stray in directory.glob(f"step_*{PARTIAL}"):
                shutil.rmtree(stray)  # of a process that was killed while it wrote
        self._prune()

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """A new directory to fill; the checkpoint exists when the block ends without an error, and not before."""
        final = self.directory / f"step_{step:06d}"
        partial = final.with_name(final.name + PARTIAL)
        if final.exists() and _fault(final, step) is None:
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
        except BaseException as error:
            full = _full(partial, error)
            shutil.rmtree(partial, ignore_errors=True)
            if full:
                raise disk_full(final) from error
            raise
        self._prune()

    def latest(self) -> tuple[int, Path] | None:
        """Step and directory of the newest checkpoint that is whole."""
        return self.newest(self.directory)

    @staticmethod
    def newest(directory: Path) -> tuple[int, Path] | None:
        """`latest` of a run that another process may hold: looks, and touches nothing."""
        for step, path in _all(directory):
            fault = _fault(path, step)
            if fault is None:
                return step, path
            log.warning("checkpoint %s is ignored: %s", path, fault)
        return None

    # ------------------------------------------------------------------ inside

    def _seal(self, partial: Path, step: int) -> None:
        with writing(partial):
            files = sorted(p for p in partial.rglob("*") if p.is_file())
            for path in [*files, *(p for p in partial.rglob("*") if p.is_dir())]:
                sync(path)
        sizes = {p.relative_to(partial).as_posix(): p.stat().st_size for p in files}
        write_aside(partial / MANIFEST, json.dumps({"step": step, "files": sizes}, indent=1).encode())

    def _prune(self) -> None:
        """Remove what is older than the newest `keep` whole ones. A damaged newer one is left for people to look at."""
        whole = [step for step, path in _all(self.directory) if _fault(path, step) is None][: self.keep]
        for step, path in _all(self.directory):
            if len(whole) == self.keep and step < whole[-1]:
                with writing(path):
                    shutil.rmtree(path)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """The loop's own state as JSON: floats come back bit for bit; NaN and what JSON does not have is a `ValueError`."""
    with writing(path):
        path.write_text(json.dumps(state, allow_nan=False, indent=1), encoding="utf-8")


def load_state(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: cannot be read: {error}. Remove this checkpoint to go on from an older one."
        ) from error


def _all(directory: Path) -> list[tuple[int, Path]]:
    """Newest first, whole or not."""
    names = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in directory.iterdir())
    return sorted(((int(match[1]), path) for match, path in names if match), reverse=True)


def _fault(path: Path, step: int) -> str | None:
    """What is wrong with a checkpoint; None if its manifest holds."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, size in manifest["files"].items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} bytes instead of {size}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)
    return None if manifest["step"] == step else f"its manifest is that of step {manifest['step']}"


def _full(partial: Path, error: BaseException) -> bool:
    """Whether a full disk broke the writing of a checkpoint.

    Libraries that write by native code raise errors of their own: safetensors with the system's words, torch without
    any; for the latter the disk itself is asked.
    """
    if isinstance(error, RunError) or not isinstance(error, Exception):
        return False
    in_words = os.strerror(errno.ENOSPC) in str(error)
    return says_full(error) or in_words or shutil.disk_usage(partial).free < 1 << 16
