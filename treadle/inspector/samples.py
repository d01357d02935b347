"""Recorded trajectories in a table, or as JSON lines: what `treadle inspect RUN --where …` prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.errors import RunError
from treadle.inspector.fields import FIELDS, PART, field
from treadle.inspector.query import Condition, Query, names, read, versions_of
from treadle.inspector.screen import line, number
from treadle.runs.directory import RunDirectory
from treadle.runs.samples import read_samples
from treadle.runs.text import encodable, readable

NARROWEST = 8  # columns of a text that is cut
COLUMNS = ("step", "sample", "prompt", "state", "reward", "tokens", "ended", "advantage", "response")


def show(
    path: Path,
    where: Sequence[str] = (),
    sort: str | None = None,
    columns: str | None = None,
    prompt: str | None = None,
    step: int | None = None,
    evaluation: bool = False,
    limit: int | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Print trajectories of all steps, or of one: those that fit, in order, at most `limit` (a table: 20 unless said).

    Raises ConfigError for what is no condition or field, `RunError` where `path` is no run or has no such step.
    """
    console = console if console is not None else Console()
    query = Query.parse(where, sort)
    if prompt is not None:
        query = replace(query, where=(*query.where, Condition("prompt", "=", prompt)))
    run = RunDirectory.existing(path)
    files = step_files(run, step, evaluation)
    shown = names(columns, "--columns") if columns is not None else COLUMNS
    if as_json and columns is None:
        shown = (*FIELDS, *(PART + part for part in _parts(files.values())))
    asked = {*shown, *query.sort, *(condition.name for condition in query.where)}
    versions = versions_of(run, files) if asked & {"staleness", "-staleness"} and not evaluation else {}
    found = query.select(files, versions)
    if as_json:
        for row in read(found[:limit], shown, versions):
            console.file.write(json.dumps(row, allow_nan=False) + "\n")
        return
    limit = 20 if limit is None else limit
    line(console, f"{run.path}: {min(limit, len(found))} of {len(found)} trajectories that fit", "bold")
    console.print(_table(console, shown, list(read(found[:limit], shown, versions))))


def step_files(run: RunDirectory, step: int | None, evaluation: bool) -> dict[int, Path]:
    """Files of samples by step; of one step if it is given. Raises `RunError` where there are none."""
    files = run.samples_files("evaluation" if evaluation else "step")
    if step is None:
        return files
    if step not in files:
        recorded = f"{min(files)} to {max(files)}" if files else "none yet"
        raise RunError(f"{run.path}: no samples of step {step}. Recorded steps: {recorded}.")
    return {step: files[step]}


def _table(console: Console, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a row. Where the terminal is too narrow, the widest texts are cut."""
    texts = {name for name in names if field(name).is_text}
    cells = [[_text(row[n]) if n in texts and row[n] is not None else number(row[n]) for n in names] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(names, *cells, strict=True)]
    while sum(widths) + len(widths) > console.width:
        widest = max((at for at, name in enumerate(names) if name in texts), key=lambda at: widths[at], default=None)
        if widest is None or widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name, width in zip(names, widths, strict=True):
        justify = "left" if name in texts else "right"
        table.add_column(Text(encodable(name, console.encoding)), justify=justify, no_wrap=True, max_width=width)
    for row in cells:
        table.add_row(*(Text(encodable(text, console.encoding)) for text in row))
    return table


def _text(value: Any) -> str:
    return readable(str(value), 400)


def _parts(files: Iterable[Path]) -> list[str]:
    """Names of the parts that rewards have."""
    rows = (row for file in files for row in read_samples(file, ["reward_parts"]))
    return sorted({part for row in rows for part in row["reward_parts"] or ()})
