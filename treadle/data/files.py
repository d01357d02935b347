"""The files of a data set: one, or the shards that a directory or a pattern names, in the order of their names."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from treadle.config import key
from treadle.data.source import SourceConfig
from treadle.errors import DataError

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z")


@dataclass(frozen=True, slots=True)
class Shard:
    """One file as it was when it was found. `name` is what ids of its rows begin with."""

    path: Path
    name: str
    stamp: tuple[int, int]  # bytes, and the time of the last change in ns

    def open(self) -> BinaryIO:
        """The file, to read. Raises DataError."""
        try:
            return self.path.open("rb")
        except OSError as error:
            raise unreadable(self.path, error) from None

    def untouched(self) -> bool:
        """Whether nobody has written it since it was found. Raises DataError if it is gone."""
        return _stamp(self.path) == self.stamp


class FilesConfig(SourceConfig):
    """Keys of sources that read files."""

    ending: ClassVar[str]  # of the files in a directory
    path: Path = key("a file, a directory of files, or a pattern in quotes, e.g. 'data/*.jsonl'")

    def shards(self) -> tuple[Shard, ...]:
        return shards(self.path, self.ending)

    def check(self) -> None:
        self.shards()


def shards(path: Path, suffix: str) -> tuple[Shard, ...]:
    """The file `path`; or all files `*suffix` in a directory, or all that match a pattern (`data/*.parquet`), by name.

    Raises DataError where there is none, or one is compressed.
    """
    if path.is_dir():
        root, found = path, [p for p in path.rglob(f"*{suffix}") if not p.name.startswith((".", "_"))]
    elif glob.has_magic(str(path)) and not path.exists():
        fixed = next(number for number, part in enumerate(path.parts) if glob.has_magic(part))
        root, found = Path(*path.parts[:fixed]), [Path(p) for p in glob.glob(str(path), recursive=True)]
    else:
        return (_shard(path, path.name),)
    names = {p.relative_to(root).as_posix(): p for p in found if p.is_file()}
    if not names:
        what = f"no file *{suffix} is in this directory" if path.is_dir() else "no file matches this pattern"
        raise DataError(f"{path}: {what}")
    return tuple(_shard(names[name], name) for name in sorted(names))


def digest(files: Sequence[Shard]) -> str:
    """Of names and contents."""
    whole = hashlib.blake2b(digest_size=8)
    for shard in files:
        with shard.open() as file:
            part = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))  # type: ignore[arg-type]
        whole.update(f"{shard.name}\n{part.hexdigest()}\n".encode())
    return whole.hexdigest()


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: the data file cannot be read: {error.strerror}")


def _shard(path: Path, name: str) -> Shard:
    if path.suffix in _COMPRESSED:
        raise DataError(f"{path}: the file is compressed, and rows are read at random: unpack it first")
    stamp = _stamp(path)
    if not path.is_file():
        raise DataError(f"{path}: not a file")
    return Shard(path, name, stamp)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return found.st_size, found.st_mtime_ns
