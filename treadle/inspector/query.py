"""Choosing recorded trajectories: conditions, order, and reading no more of the files than these need.

A condition is a field, a comparison and a value: `reward < 0.5`, `ended = truncated`, `response ~ therefore`,
`advantage != null`. There is no more to the language; several conditions must all hold.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle.inspector.fields import Rows, columns, field, values
from treadle.runs.directory import RunDirectory
from treadle.runs.metrics import read_rows
from treadle.runs.samples import read_table

_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "~": lambda whole, part: part in whole,
}
_CONDITION = re.compile(rf"\s*([^\s<>=!~]+)\s*({'|'.join(_COMPARISONS)})\s*(.*?)\s*", re.DOTALL)
_OPEN = 64  # files whose fields are in memory at a time, at most
_EXAMPLE = "write one comparison, as 'reward < 0.5', 'ended = truncated', 'response ~ some words' or 'why != null'"


@dataclass(frozen=True, slots=True)
class Condition:
    """What a field must be. A field that is null fits `= null` and nothing else."""

    name: str
    comparison: str
    value: float | str | None

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises ConfigError that says what is wrong with `text`."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(f"--where {text!r:.80}: not a condition; {_EXAMPLE}")
        name, comparison, given = match.groups()
        try:
            is_text = field(name).is_text
        except ConfigError as error:
            raise ConfigError(f"--where {text!r:.80}: {error}") from None
        if given == "null" and comparison in ("=", "==", "!="):
            return cls(name, comparison, None)
        possible = ("=", "==", "!=", "~") if is_text else tuple(c for c in _COMPARISONS if c != "~")
        if comparison not in possible:
            kind = "text" if is_text else "a number"
            raise ConfigError(f"--where {text!r:.80}: {name} is {kind}; compare it by {' '.join(possible)}")
        return cls(name, comparison, _unquoted(given) if is_text else _number(text, name, given))

    def fits(self, found: Any) -> bool:
        if self.value is None:
            return (found is None) == (self.comparison != "!=")
        return found is not None and _COMPARISONS[self.comparison](found, self.value)


@dataclass(frozen=True, slots=True)
class Found:
    """A trajectory, by the file that it is in and its row there."""

    step: int
    path: Path
    row: int


@dataclass(frozen=True, slots=True)
class Query:
    """`sort` holds names of fields, first things first; "-reward" is the largest first. Null comes last."""

    where: tuple[Condition, ...] = ()
    sort: tuple[str, ...] = ()

    @classmethod
    def parse(cls, where: Sequence[str] = (), sort: str | None = None) -> Query:
        by = names(sort, "--sort") if sort is not None else ()
        return cls(tuple(Condition.parse(text) for text in where), by)

    def select(self, files: Mapping[int, Path], versions: Mapping[int, int] | None = None) -> list[Found]:
        """All trajectories that fit, in order; `files` by step."""
        needed = [condition.name for condition in self.where] + [name.removeprefix("-") for name in self.sort]
        found: list[tuple[list[Any], Found]] = []
        for step in sorted(files):
            if not all(c.fits(step) for c in self.where if c.name == "step"):
                continue
            rows = _read(files[step], step, needed, versions)
            fitting = self._fitting(rows)
            keys = [values(rows, name.removeprefix("-")) for name in self.sort]
            found += [([key[row] for key in keys], Found(step, files[step], row)) for row in fitting]
        for at, name in reversed(list(enumerate(self.sort))):  # a stable sort by the last key first
            known = [pair for pair in found if pair[0][at] is not None]
            known.sort(key=lambda pair: pair[0][at], reverse=name.startswith("-"))
            found = known + [pair for pair in found if pair[0][at] is None]
        return [one for _, one in found]

    def _fitting(self, rows: Rows) -> list[int]:
        fitting = list(range(rows.table.num_rows))
        for condition in self.where:
            column = values(rows, condition.name)
            fitting = [row for row in fitting if condition.fits(column[row])]
        return fitting


def names(text: str, option: str) -> tuple[str, ...]:
    """Names of fields that commas part. Raises ConfigError for one that is none."""
    found = tuple(name.strip() for name in text.split(","))
    for name in found:
        try:
            field(name.removeprefix("-") if option == "--sort" else name)
        except ConfigError as error:
            raise ConfigError(f"{option} {text!r:.80}: {error}") from None
    return found


def read(found: Sequence[Found], fields: Sequence[str], versions: Mapping[int, int] | None = None) -> Iterator[Any]:
    """These fields of these trajectories, as `{name: value}`, in their order."""
    tables: dict[Path, dict[str, list[Any]]] = {}
    for one in found:
        if one.path not in tables:
            if len(tables) == _OPEN:
                tables.clear()
            rows = _read(one.path, one.step, fields, versions)
            tables[one.path] = {name: values(rows, name) for name in fields}
        yield {name: column[one.row] for name, column in tables[one.path].items()}


def versions_of(run: RunDirectory, files: Mapping[int, Path]) -> dict[int, int]:
    """The version of the weights that each step started with: that of its oldest token, and how stale that was."""
    behind = {row["step"]: row.get("staleness/max") for row in read_rows(run.metrics)}
    found = {}
    for step, path in files.items():
        if (stale := behind.get(step)) is None:
            continue
        rows = _read(path, step, ["version", "state"], None)
        trained = [v for v, s in zip(values(rows, "version"), values(rows, "state"), strict=True) if s == "trained"]
        if oldest := [version for version in trained if version is not None]:
            found[step] = min(oldest) + int(stale)
    return found


def _read(path: Path, step: int, fields: Sequence[str], versions: Mapping[int, int] | None) -> Rows:
    return Rows(step, read_table(path, columns(fields)), (versions or {}).get(step))


def _number(text: str, name: str, given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise ConfigError(f"--where {text!r:.80}: {name} is a number, {given!r:.40} is none; {_EXAMPLE}") from None


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
