"""Writing so that a kill or a full disk leaves the old file or the new one, never a half."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.errors import RunError

PARTIAL = ".partial"
"""Suffix of what is still being written; whoever finds one after a kill may remove it."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write into a `RunError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise failed_write(path, error) from error


@contextmanager
def reading(path: Path, mend: str) -> Iterator[None]:
    """Turn a failed read, or bytes that are not the text or JSON they should be, into a `RunError` that says `mend`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}. {mend}") from error


def failed_write(path: Path, error: Exception) -> RunError:
    return disk_full(path) if says_full(error) else RunError(f"{path}: cannot be written: {error}")


def says_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full(path: Path) -> RunError:
    return RunError(
        f"{path}: no space left on the disk. Free some and start the same command again: "
        "all that was recorded before is intact."
    )


def write_aside(path: Path, data: bytes) -> None:
    """Write a whole file beside `path`, force it to the disk and rename it into place."""
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


def sync(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
