"""Prompts from CSV files: a header, then a row a record; fields in quotes may hold commas, quotes and line breaks.

Every cell is text. Columns as in `treadle.data.columns`; chat messages are JSON text in a cell.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import TYPE_CHECKING

from treadle.config import key
from treadle.data.columns import Layout, TableConfig, layout
from treadle.data.files import FilesConfig, Shard
from treadle.data.source import Order, Row
from treadle.data.text import Lines, TextSource
from treadle.errors import DataError

if TYPE_CHECKING:
    from treadle.data.rendering import Renderer

_LONGEST_FIELD = 1 << 24
"""Characters. What is longer is a quote that was never closed."""


class CsvConfig(TableConfig, FilesConfig):
    ending = ".csv"
    name: str = key("where prompts come from", default="csv")
    delimiter: str = key("what stands between two fields", default=",", min_length=1, max_length=1)


class Csv(TextSource[list[str]]):
    Config = CsvConfig

    def __init__(self, config: CsvConfig, renderer: Renderer, order: Order) -> None:
        """Raises DataError, with file and line, for the first row that cannot be used."""
        super().__init__(config, renderer, order)
        self._config = config
        self._header: list[str] = []
        self._layout: Layout | None = None
        csv.field_size_limit(_LONGEST_FIELD)  # of the whole process, and only ever raised
        for _ in self._scan():
            pass

    def _begin(self, lines: Lines, shard: Shard) -> None:
        line, header = next(self._records(lines, shard), (1, []))
        twins = sorted({name for name in header if header.count(name) > 1})
        if twins:
            raise DataError(f"{shard.path}:{line}: the column {twins[0]!r} stands twice in the header")
        if self._header and header and header != self._header:
            raise DataError(
                f"{shard.path}:{line}: the columns are {', '.join(header)}, those of {self._shards[0].name} are "
                f"{', '.join(self._header)}: all files of a data set have the same"
            )
        self._header = self._header or header

    def _records(self, lines: Lines, shard: Shard) -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(_text(lines), delimiter=self._config.delimiter, strict=True)
        while True:
            line = lines.number + 1
            try:
                record = next(reader, None)
            except UnicodeDecodeError as error:
                raise DataError(f"{shard.path}:{lines.number}: not UTF-8 text ({error.reason})") from None
            except csv.Error as error:
                raise DataError(
                    f"{shard.path}:{line}: the record that begins here is not CSV ({error}): look for a quote that is "
                    'not closed; a quote inside quotes is written twice, as in "say ""five"""'
                ) from None
            if record is None:
                return
            if record:  # else a blank line
                yield line, record

    def _row(self, record: list[str], shard: Shard, line: int) -> Row:
        if len(record) != len(self._header):
            raise DataError(
                f"{shard.path}:{line}: the row has {len(record)} fields, the header {len(self._header)}; a field that "
                f"holds {self._config.delimiter!r} must stand in quotes"
            )
        cells = dict(zip(self._header, record, strict=True))
        if self._layout is None:
            self._layout = layout(self._config, {name: (name,) for name in self._header}, cells, str(self._files.path))
        try:
            return self._layout.row(f"{shard.name}:{line}", cells)
        except ValueError as error:
            raise DataError(f"{shard.path}:{line}: {error}") from None


def _text(lines: Lines) -> Iterator[str]:
    for raw in lines:
        yield raw.decode("utf-8-sig" if lines.number == 1 else "utf-8")
