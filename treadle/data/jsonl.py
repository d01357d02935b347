"""Prompts from files of JSON lines: `{"prompt": "What is 2 + 3?", "answer": "5"}`.

`prompt` is a string or a list of messages (`{"role": …, "content": …}`); `answer` anything, for the reward; `id` a
string (default: file name and line); every other key becomes metadata. Blank lines are ignored.

The files are checked from end to end at the start, in one pass with flat memory.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from treadle.config import key
from treadle.data.columns import Layout
from treadle.data.files import FilesConfig, Shard
from treadle.data.source import Order, Row
from treadle.data.strict_json import decode
from treadle.data.text import Lines, TextSource
from treadle.errors import DataError

if TYPE_CHECKING:
    from treadle.data.rendering import Renderer

_EXAMPLE = '{"prompt": "What is 2 + 3?", "answer": "5"}'


class JsonLinesConfig(FilesConfig):
    ending = ".jsonl"
    name: str = key("where prompts come from", default="jsonl")
    prompt: str = key("key of the prompts", default="prompt", min_length=1)
    answer: str = key("key of the answers; rows without it have none", default="answer", min_length=1)


class JsonLines(TextSource[bytes]):
    Config = JsonLinesConfig

    def __init__(self, config: JsonLinesConfig, renderer: Renderer, order: Order) -> None:
        """Raises DataError, with file and line, for the first row that cannot be used."""
        super().__init__(config, renderer, order)
        self._layout = Layout(tuple(config.prompt.split(".")), tuple(config.answer.split(".")))
        self._names = {shard.name for shard in self._shards}
        given = array("q", (_hash(row.id) for shard, line, row in self._scan() if row.id != f"{shard.name}:{line}"))
        self._refuse_twins(given)

    def _records(self, lines: Lines, shard: Shard) -> Iterator[tuple[int, bytes]]:
        return ((lines.number, raw) for raw in lines if raw.strip())

    def _row(self, record: bytes, shard: Shard, line: int) -> Row:
        def refuse(fault: object) -> NoReturn:
            raise DataError(f"{shard.path}:{line}: {fault}; a row is e.g. {_EXAMPLE}") from None

        try:
            cells = decode(record.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            refuse(f"not UTF-8 text ({error.reason} at byte {error.start})")
        except ValueError as error:
            refuse(error)
        if not isinstance(cells, dict):
            refuse(f"the row is a {type(cells).__name__}, not an object")
        prompt, name = self._layout.prompt[0], cells.pop("id", None)
        if prompt not in cells:
            refuse(f'the row has no key "{prompt}" (it has {", ".join(map(repr, cells)) or "none"})')
        if name is not None and not (isinstance(name, str) and name):
            refuse(f'"id" is {name!r}, not a string')
        place = f"{shard.name}:{line}"
        if name is not None and name != place and self._is_place(name):
            refuse(f'"id" is {name!r}, which is how rows without an id are called')
        try:
            return self._layout.row(place if name is None else name, cells)
        except ValueError as error:
            refuse(error)

    def _is_place(self, name: str) -> bool:
        file, _, line = name.rpartition(":")
        return file in self._names and line.isdecimal()

    def _refuse_twins(self, hashes: array[int]) -> None:
        """An id is a row's identity. Only hashes of ids were kept; rows of equal ones are read again and compared."""
        import numpy as np

        hash_R = np.frombuffer(hashes, np.int64)
        hash_R.sort()
        twins = set(hash_R[1:][hash_R[1:] == hash_R[:-1]].tolist())
        seen: dict[str, str] = {}
        for shard, line, row in self._scan() if twins else ():
            if _hash(row.id) not in twins:
                continue
            if row.id in seen:
                raise DataError(
                    f"{shard.path}:{line}: the id {row.id!r} is that of {seen[row.id]} already: ids must differ (or "
                    "leave them out)"
                )
            seen[row.id] = f"{shard.name}:{line}"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
