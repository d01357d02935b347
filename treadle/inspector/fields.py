"""What can be asked of a recorded trajectory: fields to filter, sort and show by.

Each names the columns of the Parquet files that it needs; no other column is read.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.errors import ConfigError
from treadle.types import Provenance

if TYPE_CHECKING:
    import pyarrow as pa

PART = "reward."
"""Begins the field of a part of the reward: `reward.format`."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The trajectories in the samples file of a step, or of the evaluation after it."""

    step: int
    table: pa.Table
    version: int | None = None  # of the weights that the step started with

    def column(self, name: str) -> list[Any]:
        return self.table[name].to_pylist() if name in self.table.schema.names else [None] * self.table.num_rows

    def tokens(self, name: str) -> list[np.ndarray | None]:
        """A column of lists, one value a token."""
        if name not in self.table.schema.names:
            return [None] * self.table.num_rows
        lists = self.table[name].combine_chunks()
        ends = np.cumsum(lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
        parts = np.split(lists.flatten().to_numpy(zero_copy_only=False), ends[:-1])
        return [part if valid else None for part, valid in zip(parts, lists.is_valid().to_pylist(), strict=True)]


@dataclass(frozen=True, slots=True)
class Field:
    """One of these, or a part of the reward."""

    meaning: str
    columns: tuple[str, ...]
    values: Callable[[Rows], list[Any]]
    is_text: bool = False


def _plain(meaning: str, column: str, is_text: bool = True) -> Field:
    return Field(meaning, (column,), lambda rows: rows.column(column), is_text)


def _of_tokens(function: Callable[..., Any], *columns: str) -> Callable[[Rows], list[Any]]:
    """A function of a trajectory's tokens; None where one of the columns is."""

    def values(rows: Rows) -> list[Any]:
        found = zip(*(rows.tokens(column) for column in columns), strict=True)
        return [None if any(x is None for x in tokens) else function(*tokens) for tokens in found]

    return values


def _advantage(advantage_T: np.ndarray, trained_T: np.ndarray) -> float | None:
    return float(advantage_T[trained_T].mean()) if trained_T.any() else None


def _gap(over: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray, np.ndarray], float | None]:
    def gap(old_T: np.ndarray, sampling_T: np.ndarray) -> float | None:
        gap_T = np.abs(old_T - sampling_T)
        gap_T = gap_T[np.isfinite(gap_T)]
        return float(over(gap_T)) if gap_T.size else None

    return gap


def _version(version_T: np.ndarray) -> int | None:
    sampled = version_T[version_T >= 0]
    return int(sampled.min()) if sampled.size else None


def _staleness(rows: Rows) -> list[int | None]:
    oldest = _of_tokens(_version, "versions")(rows)
    trained = [state == "trained" for state in rows.column("state")]
    known = rows.version
    return [
        known - v if v is not None and known is not None and done else None
        for v, done in zip(oldest, trained, strict=True)
    ]


def _question(messages: str | None) -> str | None:
    """What the user asked first; a sample that failed early has nothing."""
    return next((str(m["content"]) for m in json.loads(messages or "[]") if m["role"] == "user"), None)


def _answer(text: str | None) -> str | None:
    """A text as it is, anything else as JSON."""
    found = json.loads(text or "null")
    return found if isinstance(found, str | None) else text


_GAP = ("old_logprobs", "sampling_logprobs")

FIELDS: Mapping[str, Field] = {
    "step": Field("training step that consumed it", (), lambda rows: [rows.step] * rows.table.num_rows),
    "sample": _plain("its id", "sample"),
    "trajectory": _plain("number within the sample", "trajectory", False),
    "group": _plain("number of the group", "group", False),
    "prompt": _plain("id of the prompt, the same in every epoch", "prompt"),
    "kind": _plain("train, baseline or evaluation", "kind"),
    "evaluation": _plain("way of sampling: sampled, greedy", "evaluation"),
    "state": _plain("how it ended in the books: trained, filtered, …", "state"),
    "why": _plain("why it was filtered, dropped, or failed", "why"),
    "ended": _plain("terminated, truncated or failed", "ended"),
    "reward": _plain("reward; reward.NAME: one of its parts", "reward", False),
    "tokens": Field(
        "sampled tokens", ("provenance",), _of_tokens(lambda p: int((p == Provenance.SAMPLED).sum()), "provenance")
    ),
    "length": Field("all tokens", ("provenance",), _of_tokens(len, "provenance")),
    "advantage": Field(
        "mean over trained tokens", ("advantages", "trained"), _of_tokens(_advantage, "advantages", "trained")
    ),
    "logprob": Field(
        "sampling log-prob, mean over sampled tokens",
        ("sampling_logprobs",),
        _of_tokens(lambda x: float(np.nanmean(x)) if np.isfinite(x).any() else None, "sampling_logprobs"),
    ),
    "discrepancy": Field("|trainer's - sampler's log-prob|, mean", _GAP, _of_tokens(_gap(np.mean), *_GAP)),
    "discrepancy.max": Field("the largest of these", _GAP, _of_tokens(_gap(np.max), *_GAP)),
    "version": Field("of the weights that sampled its oldest token", ("versions",), _of_tokens(_version, "versions")),
    "staleness": Field("versions that it was behind when trained", ("versions", "state"), _staleness),
    "question": Field(
        "what the user asked first", ("messages",), lambda r: [_question(m) for m in r.column("messages")], True
    ),
    "answer": Field(
        "what the data give as the answer", ("answer",), lambda r: [_answer(a) for a in r.column("answer")], True
    ),
    "response": _plain("the text of the response", "response"),
}


def field(name: str) -> Field:
    """The field of that name. Raises ConfigError with those there are."""
    if name in FIELDS:
        return FIELDS[name]
    if name.startswith(PART) and name != PART:
        part = name.removeprefix(PART)

        def parts(rows: Rows) -> list[Any]:
            return [None if found is None else dict(found).get(part) for found in rows.column("reward_parts")]

        return Field("part of the reward", ("reward_parts",), parts)
    near = difflib.get_close_matches(name, FIELDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FIELDS)}, {PART}NAME"
    raise ConfigError(f"there is no field {name!r:.80}; {hint}")


def values(rows: Rows, name: str) -> list[Any]:
    """A field of every row; what is not a number is None."""
    found = field(name).values(rows)
    return [None if isinstance(x, float) and not math.isfinite(x) else x for x in found]


def columns(names: Sequence[str]) -> list[str]:
    """The columns of a file that these fields need."""
    return list(dict.fromkeys(column for name in names for column in field(name).columns))
