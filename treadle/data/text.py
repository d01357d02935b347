"""`TextSource`: rows of text files, checked once from end to end and then read wherever they stand.

Of the files only the places of every 32nd row are kept, so the memory is flat: 10 million rows take 10 MB.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO, Generic, TypeVar

from treadle.data.files import FilesConfig, Shard, digest
from treadle.data.source import Order, Row, RowSource
from treadle.errors import DataError

if TYPE_CHECKING:
    from treadle.data.rendering import Renderer

T = TypeVar("T")

_STRIDE = 32
"""Rows from one kept place to the next: what reading one row reads at most."""


class Lines:
    """The lines of a file from where it stands, and how far they have been read."""

    def __init__(self, file: BinaryIO, number: int = 0) -> None:
        self.offset = file.tell()  # bytes before the next line
        self.number = number  # of the last line read, counted from 1
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        while raw := self._file.readline():
            self.offset += len(raw)
            self.number += 1
            yield raw


class TextSource(RowSource, Generic[T]):
    """A subclass says how lines become records (`T`) and records rows, and calls `_scan` when it is made."""

    def __init__(self, config: FilesConfig, renderer: Renderer, order: Order) -> None:
        super().__init__(renderer, order)
        self._files = config
        self._shards = config.shards()
        self._digest = digest(self._shards)
        self._count = 0
        # Of every kept place: the number of the row that follows, its file, the bytes and lines before it.
        self._row_P, self._shard_P, self._offset_P, self._line_P = array("q"), array("q"), array("q"), array("q")

    @abstractmethod
    def _records(self, lines: Lines, shard: Shard) -> Iterator[tuple[int, T]]:
        """Records and the lines on which they begin. Raises DataError for what is not one."""

    @abstractmethod
    def _row(self, record: T, shard: Shard, line: int) -> Row:
        """Raises DataError, with file and line, for a record that cannot be used."""

    def _begin(self, lines: Lines, shard: Shard) -> None:
        """Read what stands before the first record."""

    def __len__(self) -> int:
        return self._count

    @property
    def fingerprint(self) -> str:
        return f"{self._files.path.name}, {len(self)} rows, digest {self._digest}"

    def row(self, number: int) -> Row:
        at = bisect_right(self._row_P, number) - 1
        shard = self._shards[self._shard_P[at]]
        if not shard.untouched():
            self._look_again()
        with shard.open() as file:
            file.seek(self._offset_P[at])
            records = self._records(Lines(file, self._line_P[at]), shard)
            line, record = next(islice(records, number - self._row_P[at], None))
        return self._row(record, shard, line)

    def _look_again(self) -> None:
        """Files were written since they were found: it goes on only if they are the same. Raises DataError."""
        self._shards = self._files.shards()
        if digest(self._shards) != self._digest:
            raise DataError(f"{self._files.path}: the data have changed since this run began to read them")

    def _scan(self) -> Iterator[tuple[Shard, int, Row]]:
        """Every row with its file and line; the first time, places are noted. Raises DataError where there is none."""
        note = not self._count
        for number, shard in enumerate(self._shards):
            with shard.open() as file:
                lines = Lines(file)
                self._begin(lines, shard)
                records, count, place = self._records(lines, shard), 0, (lines.offset, lines.number)
                for line, record in records:
                    yield shard, line, self._row(record, shard, line)
                    if note:
                        if count % _STRIDE == 0:
                            self._keep(number, *place)
                        self._count += 1
                    count, place = count + 1, (lines.offset, lines.number)
        if not self._count:
            raise DataError(f"{self._files.path}: the data set is empty")

    def _keep(self, shard: int, offset: int, line: int) -> None:
        self._row_P.append(self._count)
        self._shard_P.append(shard)
        self._offset_P.append(offset)
        self._line_P.append(line)
