"""Two runs beside each other: what `treadle diff A B` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.config.yaml_text import to_line
from treadle.inspector.screen import NOTHING, cell, line, number, status
from treadle.inspector.terminal import held_out
from treadle.runs.directory import RunDirectory
from treadle.runs.environment import changes
from treadle.runs.metrics import TIME, read_rows
from treadle.runs.text import readable

Row = dict[str, Any]
Pair = tuple[Any, Any]

ABSENT = "(absent)"


def show(one: Path, other: Path, last: int = 10, console: Console | None = None) -> None:
    """Print how two runs differ: configuration, code and machine, metrics, evaluations. `last` (≥ 1): the steps, of
    those that both have done, over which metrics are averaged.

    Raises `RunError` where one of them is no run or a file of it is damaged.
    """
    console = console if console is not None else Console()
    runs = RunDirectory.existing(one), RunDirectory.existing(other)
    steps = read_rows(runs[0].metrics), read_rows(runs[1].metrics)
    for name, run, rows in zip("AB", runs, steps, strict=True):
        line(console, f"{name}  {run.path}: {status(run)}, {rows[-1]['step'] if rows else 0} steps recorded", "bold")
    _configuration(console, *(run.settings() for run in runs))
    _environment(console, *(read_rows(run.environment) for run in runs))
    _evaluations(console, *(read_rows(run.evaluations) for run in runs))
    _metrics(console, *steps, last)


def _configuration(console: Console, one: Row, other: Row) -> None:
    pairs = {k: (one.get(k, ABSENT), other.get(k, ABSENT)) for k in sorted(one.keys() | other.keys()) if k != "run.dir"}
    differing = {k: (_yaml(a), _yaml(b)) for k, (a, b) in pairs.items() if a != b}
    _beside(console, f"configuration: {len(differing)} of {len(pairs)} keys differ", differing)


def _environment(console: Console, one: Sequence[Row], other: Sequence[Row]) -> None:
    for name, rows in (("A", one), ("B", other)):
        for before, after in pairwise(rows):
            changed = "; ".join(f"{k} {a} → {b}" for k, (a, b) in changes(_told(before), _told(after)).items())
            line(console, readable(f"{name} went on after step {after['step']} in another environment: {changed}"))
    if not one or not other:
        return line(console, "\ncode and machine: not recorded")
    differing = changes(_told(one[-1]), _told(other[-1]))
    return _beside(console, "code and machine: " + ("these differ" if differing else "the same"), differing)


def _told(row: Row) -> Row:
    """With each commit and whether files differ from it in one."""
    row = dict(row)
    for name, changed in (("commit", "changed"), ("project", "project_changed")):
        if row.pop(changed, False):
            row[name] = f"{row[name]} and changes"
    return row


def _metrics(console: Console, one: Sequence[Row], other: Sequence[Row], last: int) -> None:
    if not one or not other:
        return line(console, "\nmetrics: none to compare" if not one and not other else "\nmetrics: of one run only")
    common = sorted({row["step"] for row in one} & {row["step"] for row in other})[-last:]
    means = [_means(rows, common) for rows in (one, other)]
    ends = [rows[-1] for rows in (one, other)]
    span = f"steps {common[0]} to {common[-1]}, which both have done" if common else "no step that both have done"
    line(console, f"\nmetrics: last step (A {ends[0]['step']}, B {ends[1]['step']}), and mean over {span}", "bold")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("A last", "B last", "A mean", "B mean", "B - A", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    names = sorted({k for row in (*ends, *means) for k in row if k != "step"}, key=_order)
    for group, members in groupby(names, key=lambda k: k.rpartition("/")[0]):
        table.add_row(cell(console, group, "bold"))
        for name in members:
            pair = means[0].get(name), means[1].get(name)
            cells = [ends[0].get(name), ends[1].get(name), *pair, *_change(*pair)]
            label = Text("  ") + cell(console, name.rpartition("/")[2])
            table.add_row(label, *(cell(console, value) for value in cells))
    console.print(table)
    return None


def _order(name: str) -> tuple[bool, bool, str]:
    """Rewards first, times last."""
    return name.startswith(TIME), not name.startswith("reward/"), name


def _means(rows: Iterable[Row], steps: Sequence[int]) -> Row:
    """Of each metric over these steps, those left out in which it is not a number."""
    chosen = [row for row in rows if row["step"] in set(steps)]
    values = {name: [row[name] for row in chosen if _is_number(row.get(name))] for row in chosen for name in row}
    return {name: sum(found) / len(found) for name, found in values.items() if found}


def _evaluations(console: Console, one: Sequence[Row], other: Sequence[Row]) -> None:
    ends = [rows[-1] if rows else {} for rows in (one, other)]
    names = held_out([row for row in ends if row])
    if not names:
        return
    steps = ", ".join(f"{name} after step {row['step']}" for name, row in zip("AB", ends, strict=True) if row)
    line(console, f"\nlast evaluation: {steps}", "bold")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("A", "B", "B - A", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, label in names.items():
        pair = ends[0].get(name), ends[1].get(name)
        table.add_row(cell(console, label), *(cell(console, value) for value in (*pair, *_change(*pair))))
    console.print(table)


def _change(one: Any, other: Any) -> tuple[str, str]:
    """The difference, and how large it is beside the first."""
    if not _is_number(one) or not _is_number(other):
        return NOTHING, ""
    difference = float(other - one)
    percent = 100 * difference / abs(one) if one else 0.0
    relative = f"{percent:+.0f}%" if abs(percent) >= 100 else f"{percent:+.1f}%"
    return ("+" if difference > 0 else "") + number(difference), relative if 0.05 <= abs(percent) < 1e4 else ""


def _beside(console: Console, heading: str, pairs: Mapping[str, Pair]) -> None:
    line(console, f"\n{heading}", "bold")
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("A", overflow="fold")
    table.add_column("B", overflow="fold")
    for name, values in pairs.items():
        table.add_row(*(cell(console, value) for value in (name, *values)))
    if pairs:
        console.print(table)


def _yaml(value: Any) -> str:
    return ABSENT if value == ABSENT else to_line(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
