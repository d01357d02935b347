"""Samples on disk: one Parquet file a step, one row a trajectory, one value a token in every list.

A failed sample that has no trajectory still has its row. Groups that were not trained have null where passes over
models would have put numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.errors import RunError
from treadle.runs.files import write_aside
from treadle.runs.ledger import State
from treadle.runs.text import storable
from treadle.types import Group, Kind, Sample, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from treadle.batch import Batch


@dataclass(frozen=True, slots=True)
class Ending:
    """A group and how it ended. `evaluation` names the evaluation it was for."""

    group: Group
    state: State
    why: str | None = None
    evaluation: str | None = None

    def samples(self) -> Iterator[tuple[Sample, State, str | None]]:
        """How each sample ended: a failed one as failed, a baseline of a trained group as baseline."""
        for sample in self.group.samples:
            if sample.failure is not None:
                yield sample, State.FAILED, sample.failure
            elif self.state == State.TRAINED and sample.kind == Kind.BASELINE:
                yield sample, State.BASELINE, self.why
            else:
                yield sample, self.state, self.why


@dataclass(frozen=True, slots=True)
class _Row:
    ending: Ending
    sample: Sample
    state: State
    why: str | None
    number: int  # of the trajectory within its sample
    trajectory: Trajectory | None
    packed: int | None  # its row in the batch


def write_samples(path: Path, endings: Sequence[Ending], batch: Batch | None = None) -> None:
    """Write the samples of one step. `batch` packs the trained groups, in the order they have here."""
    _write(path, _table(endings, batch))


def append_samples(path: Path, endings: Sequence[Ending]) -> None:
    """Add samples that were not trained to a file, which need not exist."""
    import pyarrow as pa

    there = [read_table(path)] if path.exists() else []
    _write(path, pa.concat_tables([*there, _table(endings, None)]))


def read_samples(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Rows as dicts, all columns or these. Raises `RunError` where the file is missing or damaged."""
    return read_table(path, columns).to_pylist(maps_as_pydicts="strict")


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """`read_samples` by column: no other column is read, and one that the file does not have is left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=list(columns) if columns is not None else None)
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def _table(endings: Sequence[Ending], batch: Batch | None) -> pa.Table:
    import pyarrow as pa

    rows = _rows(endings, batch)
    return pa.table({**_record_columns(rows), **_token_columns(rows), **_batch_columns(rows, batch)})


def _write(path: Path, table: pa.Table) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_aside(path, sink.getvalue().to_pybytes())


def _rows(endings: Sequence[Ending], batch: Batch | None) -> list[_Row]:
    rows: list[_Row] = []
    packed = 0
    for ending in endings:
        for sample, state, why in ending.samples():
            for number, trajectory in enumerate(sample.trajectories or (None,)):
                trains = batch is not None and state in (State.TRAINED, State.BASELINE) and trajectory is not None
                rows.append(_Row(ending, sample, state, why, number, trajectory, packed if trains else None))
                packed += trains
    if batch is not None and packed != len(batch):
        raise ValueError(f"the batch packs {len(batch)} trajectories, the trained groups have {packed}")
    return rows


# ---------------------------------------------------------------------- columns

_RECORD: dict[str, tuple[str, Callable[[_Row], Any]]] = {
    "sample": ("string", lambda r: r.sample.id),
    "trajectory": ("int32", lambda r: r.number),
    "group": ("int64", lambda r: r.ending.group.index),
    "prompt": ("string", lambda r: r.ending.group.prompt.id),
    "prompt_index": ("int64", lambda r: r.ending.group.prompt.index),
    "started_version": ("int32", lambda r: r.ending.group.started_version),
    "kind": ("string", lambda r: r.sample.kind.value),
    "evaluation": ("string", lambda r: r.ending.evaluation),
    "state": ("string", lambda r: r.state.value),
    "why": ("string", lambda r: None if r.why is None else storable(r.why)),
}
"""What every row has: column, Arrow type, value."""


_TRAJECTORY: dict[str, tuple[str, Callable[[Trajectory], Any]]] = {
    "ended": ("string", lambda t: t.ended.value),
    "temperature": ("float64", lambda t: t.temperature),
    "bundle": ("int64", lambda t: t.bundle),
    "branch_of": ("int32", lambda t: t.branch_of),
    "reward": ("float64", lambda t: None if t.reward is None else t.reward.value),
    "response": ("string", lambda t: storable(t.response)),
    "messages": ("string", lambda t: storable(json.dumps(t.messages, ensure_ascii=False, default=str))),
    "answer": ("string", lambda t: storable(json.dumps(t.prompt.answer, ensure_ascii=False, default=str))),
}
"""Null for a sample without trajectories."""

_TOKENS: dict[str, tuple[str, Callable[[Trajectory], np.ndarray]]] = {
    "token_ids": ("int64", lambda t: t.token_T),
    "provenance": ("uint8", lambda t: t.provenance_T),
    "versions": ("int32", lambda t: t.version_T),
    "sampling_logprobs": ("float32", lambda t: t.logprob_T),
}

_PASSES: dict[str, tuple[str, Callable[[Batch], Tensor | None]]] = {
    "trained": ("bool", lambda b: b.mask_T),
    "old_logprobs": ("float32", lambda b: b.old_logprob_T),
    "reference_logprobs": ("float32", lambda b: b.reference_logprob_T),
    "values": ("float32", lambda b: b.value_T),
    "advantages": ("float32", lambda b: b.advantage_T),
    "returns": ("float32", lambda b: b.return_T),
    "weights": ("float32", lambda b: b.weight_T),
}
"""What passes over models and the algorithm add."""


def _record_columns(rows: Sequence[_Row]) -> dict[str, pa.Array]:
    import pyarrow as pa

    trajectories = [r.trajectory for r in rows]
    columns = {name: pa.array([get(r) for r in rows], type_) for name, (type_, get) in _RECORD.items()}
    for name, (type_, get) in _TRAJECTORY.items():
        columns[name] = pa.array([None if t is None else get(t) for t in trajectories], type_)
    rewards = [None if t is None else t.reward for t in trajectories]
    parts = [None if r is None else list(r.parts.items()) for r in rewards]
    columns["reward_parts"] = pa.array(parts, pa.map_(pa.string(), pa.float64()))
    turns = [None if r is None else list(r.turns) for r in rewards]
    columns["turn_rewards"] = pa.array(turns, pa.list_(pa.float64()))
    columns["turn_ends"] = pa.array(
        [None if t is None else list(t.turn_ends) for t in trajectories], pa.list_(pa.int32())
    )
    return columns


def _token_columns(rows: Sequence[_Row]) -> dict[str, pa.Array]:
    have = [r.trajectory for r in rows if r.trajectory is not None]
    lengths = [None if r.trajectory is None else len(r.trajectory.token_T) for r in rows]
    return {name: _lists(lengths, (get(t) for t in have), type_) for name, (type_, get) in _TOKENS.items()}


def _batch_columns(rows: Sequence[_Row], batch: Batch | None) -> dict[str, pa.Array]:
    import pyarrow as pa

    packed = [] if batch is None else batch.length_N.tolist()
    lengths = [None if r.packed is None else packed[r.packed] for r in rows]
    columns = {}
    for name, (type_, get) in _PASSES.items():
        values_T = None if batch is None else get(batch)
        if values_T is None:
            columns[name] = _lists([None] * len(rows), [], type_)
        else:
            columns[name] = _lists(lengths, [values_T.numpy(force=True)], type_)
    bootstrap = batch.bootstrap_N.tolist() if batch is not None and batch.bootstrap_N is not None else None
    columns["bootstrap"] = pa.array(
        [None if bootstrap is None or r.packed is None else bootstrap[r.packed] for r in rows], pa.float64()
    )
    return columns


def _lists(lengths: Sequence[int | None], arrays: Iterable[np.ndarray], type_: str) -> pa.Array:
    """A column of lists cut from `arrays` laid end to end; null where the length is None."""
    import pyarrow as pa

    offsets = np.cumsum([0, *(n or 0 for n in lengths)], dtype=np.int32)
    values = np.concatenate([*arrays, np.empty(0, type_)]).astype(type_)
    null = pa.array([n is None for n in lengths], pa.bool_())
    assert offsets[-1] == len(values)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=null)
