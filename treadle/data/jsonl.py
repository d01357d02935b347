"""Prompts from a file of JSON lines: `{"prompt": "What is 2 + 3?", "answer": "5"}`.

`prompt` is a string or a list of messages (`{"role": …, "content": …}`); `answer` anything, for the reward; `id` a
string (default: file name and line); every other key becomes metadata. Blank lines are ignored.

The file is checked from end to end at the start, in one pass with flat memory: only where each row begins is kept.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from treadle.config import key
from treadle.data.source import Order, Row, RowSource, SourceConfig
from treadle.errors import DataError
from treadle.types import Message

if TYPE_CHECKING:
    import numpy as np

    from treadle.data.rendering import Renderer

_EXAMPLE = '{"prompt": "What is 2 + 3?", "answer": "5"}'


class JsonLinesConfig(SourceConfig):
    name: str = key("where prompts come from", default="jsonl")
    path: Path = key("file of JSON lines, each with the keys prompt, answer and, if wanted, id and more")


class JsonLines(RowSource):
    Config = JsonLinesConfig

    def __init__(self, config: JsonLinesConfig, renderer: Renderer, order: Order) -> None:
        """Raises DataError, with file and line, for the first row that cannot be used."""
        super().__init__(renderer, order)
        self._path = config.path
        self._index_file()

    def __len__(self) -> int:
        return len(self._start_R)

    @property
    def fingerprint(self) -> str:
        return f"{self._path.name}, {len(self)} rows, digest {self._digest}"

    def row(self, number: int) -> Row:
        try:
            with self._path.open("rb") as file:
                file.seek(int(self._start_R[number]))
                raw = file.readline()
        except OSError as error:
            raise self._unreadable(error) from None
        return _parsed(raw, self._path, int(self._line_R[number]))

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self._path}: the data file cannot be read: {error.strerror}")

    def _index_file(self) -> None:
        """One pass: check each row, note where it begins (`R` rows), digest the whole."""
        import numpy as np

        starts, lines, identities = array("q"), array("q"), array("q")
        digest, position = hashlib.blake2b(digest_size=8), 0
        try:
            with self._path.open("rb") as file:
                for line, raw in enumerate(file, 1):
                    digest.update(raw)
                    if raw.strip():
                        row = _parsed(raw, self._path, line)
                        starts.append(position)
                        lines.append(line)
                        identities.append(_hash(row.id))
                    position += len(raw)
        except OSError as error:
            raise self._unreadable(error) from None
        if not starts:
            raise DataError(f"{self._path}: the data set is empty; write one row a line, e.g. {_EXAMPLE}")
        self._start_R, self._line_R = np.asarray(starts), np.asarray(lines)
        self._digest = digest.hexdigest()
        self._refuse_twins(np.asarray(identities))

    def _refuse_twins(self, identity_R: np.ndarray) -> None:
        """An id is a row's identity. Only hashes of ids were kept; equal ones are compared in full."""
        import numpy as np

        order = np.argsort(identity_R, kind="stable")
        for at in np.flatnonzero(np.diff(identity_R[order]) == 0):
            one, other = int(order[at]), int(order[at + 1])
            if self.row(one).id == self.row(other).id:
                raise DataError(
                    f"{self._path}:{self._line_R[other]}: the id {self.row(one).id!r} is that of line "
                    f"{self._line_R[one]} already: ids must differ (or leave them out)"
                )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _parsed(raw: bytes, path: Path, line: int) -> Row:
    """Check one line. Raises DataError that names it, the fault and the mend."""

    def refuse(fault: str) -> NoReturn:
        raise DataError(f"{path}:{line}: {fault}; a row is e.g. {_EXAMPLE}") from None

    try:
        text = raw.decode("utf-8-sig")
        row = _DECODER.decode(text)
        if "\\u" in text:  # an escape such as \ud800 alone is no text, and no tokenizer takes it
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        refuse(f"not UTF-8 text ({error.reason} at byte {error.start})")
    except UnicodeEncodeError:
        refuse("an escape \\ud800 … \\udfff without its other half is not text")
    except json.JSONDecodeError as error:
        refuse(f"not JSON ({error.msg}, column {error.colno})")
    except (ValueError, RecursionError) as error:
        refuse(f"not usable JSON ({error})")
    if not isinstance(row, dict):
        refuse(f"the row is a {type(row).__name__}, not an object")
    if "prompt" not in row:
        refuse(f'the row has no key "prompt" (it has {", ".join(map(repr, row)) or "none"})')
    prompt, answer, name = row.pop("prompt"), row.pop("answer", None), row.pop("id", None)
    if name is not None and not (isinstance(name, str) and name):
        refuse(f'"id" is {name!r}, not a string')
    fault = _fault(prompt)
    if fault:
        refuse(fault)
    whole = prompt if isinstance(prompt, str) else tuple(prompt)
    return Row(f"{path.name}:{line}" if name is None else name, whole, answer, row)


def _fault(prompt: Any) -> str | None:
    """What is wrong with a prompt, or None."""
    if isinstance(prompt, str):
        return None if prompt.strip() else '"prompt" is empty'
    if not isinstance(prompt, list):
        return f'"prompt" is a {type(prompt).__name__}, not a string or a list of messages'
    for number, message in enumerate(prompt):
        if not _is_message(message):
            return f'message {number} of "prompt" is not an object with "role" and "content" as strings'
    if not any(message["content"].strip() for message in prompt):
        return '"prompt" is empty'
    return None


def _is_message(message: Message | Any) -> bool:
    return (
        isinstance(message, dict)
        and all(isinstance(message.get(name), str) for name in ("role", "content"))
        and bool(message["role"])
    )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return whole


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_twins)
