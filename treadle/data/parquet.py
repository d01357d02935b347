"""Prompts from Parquet files. Columns as in `treadle.data.columns`; rows count from 0, as pandas and datasets count.

Parquet is made to be scanned, and prompts are drawn at random: at the start the rows are checked and laid out in a
scratch file, in small batches that can be read alone. It has no name and is gone with the process, however that ends;
it lies where temporary files lie (the variable TMPDIR says where) and takes about as much room as the data.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from treadle.config import key
from treadle.data.arrow import ArrowSource
from treadle.data.columns import TableConfig
from treadle.data.files import FilesConfig, Shard, digest
from treadle.data.source import Order
from treadle.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from treadle.data.rendering import Renderer

_CHECKED, _STORED = 1024, 64
"""Rows that are checked, and stored, together."""


class ParquetConfig(TableConfig, FilesConfig):
    ending = ".parquet"
    name: str = key("where prompts come from", default="parquet")

    def check(self) -> None:
        for shard in self.shards():
            with shard.open() as file:
                if file.read(4) != b"PAR1":
                    raise DataError(f"{shard.path}: not a Parquet file")


class Parquet(ArrowSource):
    Config = ParquetConfig

    def __init__(self, config: ParquetConfig, renderer: Renderer, order: Order) -> None:
        """Raises DataError, with file and row, for the first row that cannot be used."""
        super().__init__(config, renderer, order)
        self._path = config.path
        self._shards = config.shards()
        self._digest = digest(self._shards)
        self._scratch = _Scratch()
        self._first_B = array("q")  # of every stored batch: the number of its first row
        self._first_S = array("q")  # of every file, too
        self._count = 0
        for shard in self._shards:
            self._first_S.append(self._count)
            for batch in self._batches(shard):
                self._check(batch, str(shard.path), self._count - self._first_S[-1])
                self._store(batch)
        if not self._count:
            raise DataError(f"{config.path}: the data set is empty")

    def __len__(self) -> int:
        return self._count

    @property
    def fingerprint(self) -> str:
        return f"{self._path.name}, {len(self)} rows, digest {self._digest}"

    def _read(self, number: int) -> tuple[str, pa.RecordBatch]:
        import pyarrow as pa

        at, file = bisect_right(self._first_B, number) - 1, bisect_right(self._first_S, number) - 1
        with pa.ipc.open_stream(self._scratch[at], options=pa.ipc.IpcReadOptions(use_threads=False)) as stream:
            batch = stream.read_next_batch()
        return (
            f"{self._shards[file].name}:{number - self._first_S[file]}",
            batch.slice(number - self._first_B[at], 1),
        )

    def _batches(self, shard: Shard) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with shard.open() as file:
            try:
                # Not mapped and not buffered ahead: memory stays flat, however large a row group is.
                table = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
                self._check_names(table.schema_arrow.names, str(shard.path))
                for batch in table.iter_batches(_CHECKED, use_threads=False):
                    columns = [_plain(column) for column in batch.columns]
                    yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of a column's damaged name
                raise DataError(f"{shard.path}: not a Parquet file that can be read: {error}") from None

    def _store(self, batch: pa.RecordBatch) -> None:
        import pyarrow as pa

        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        for start in range(0, batch.num_rows, _STORED):
            part, sink = batch.slice(start, _STORED), pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
                stream.write_batch(part)
            self._scratch.append(sink.getvalue())
            self._first_B.append(self._count)
            self._count += part.num_rows


class _Scratch:
    """Pieces of bytes in a file without a name."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open as long as the source is)
        weakref.finalize(self, self._file.close)
        self._ends = array("q", [0])

    def append(self, piece: pa.Buffer) -> None:
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise DataError(
                f"{tempfile.gettempdir()}: no scratch file can be written here: {error.strerror}; make room, or set "
                "the variable TMPDIR to another directory"
            ) from None
        self._ends.append(self._ends[-1] + piece.size)

    def __getitem__(self, number: int) -> bytes:
        start, end = self._ends[number], self._ends[number + 1]
        return os.pread(self._file.fileno(), end - start, start)


def _plain(column: pa.Array) -> pa.Array:
    """Without what Python has no type for, or a batch cannot carry alone: categories, nanoseconds."""
    import pyarrow as pa

    if isinstance(column, pa.DictionaryArray):
        return column.dictionary_decode()
    if isinstance(column.type, pa.TimestampType) and column.type.unit == "ns":
        return column.cast(pa.timestamp("us", column.type.tz), safe=False)
    return column
