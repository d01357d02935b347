"""A run in the terminal: what `treadle inspect RUN` prints. Works on a running, a killed and a finished run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from treadle.inspector.samples import step_files
from treadle.inspector.screen import cell, line, number, status
from treadle.runs.directory import RunDirectory
from treadle.runs.ledger import read_totals
from treadle.runs.metrics import read_rows
from treadle.runs.samples import read_samples
from treadle.runs.text import readable

Row = dict[str, Any]

COLUMNS = {
    "reward/mean": "reward",
    "response/tokens": "tokens",
    "policy/loss": "loss",
    "policy/grad_norm": "grad norm",
    "policy/entropy": "entropy",
    "policy/kl_reference": "KL",
    "time/step": "seconds",
    "time/tokens_per_second": "tokens/s",
}
"""Metrics that are shown where a run has them, and as what."""

EVALUATION = re.compile(r"evaluation/(?P<way>[^/]+?)(?:/(?P<part>.+)|_(?P<other>tokens|failed))?")
"""Keys of `evaluations.jsonl`: mean reward of a way of sampling, a part of it, sampled tokens, share that failed."""

MOST_ROWS = 20  # of the table of metrics; more steps than that are thinned out evenly


def show(
    path: Path,
    step: int | None = None,
    limit: int = 8,
    console: Console | None = None,
    evaluation: bool = False,
) -> None:
    """Print metrics over steps, evaluations, the ledger and `limit` (≥ 0) samples of a step (default: the latest), or
    of the evaluation after it.

    Raises `RunError` where `path` is no run, a file of it is damaged, or the step has no samples.
    """
    if limit < 0:
        raise ValueError(f"limit={limit}: how many samples are shown cannot be negative")
    console = console if console is not None else Console()
    run = RunDirectory.existing(path)
    steps, evaluations = read_rows(run.metrics), read_rows(run.evaluations)
    line(console, f"{run.path}: {status(run)}, {steps[-1]['step'] if steps else 0} steps recorded", "bold")
    if steps:
        _metrics(console, steps)
    if evaluations:
        _evaluations(console, evaluations)
    if run.ledger.exists():
        totals = {name: n for name, n in read_totals(run.ledger).items() if n}
        line(console, "samples  " + "  ".join(f"{name} {n}" for name, n in totals.items()))
    if (summary := run.read_summary()) is not None:
        _summary(console, summary)
    files = step_files(run, step, evaluation)
    if step is None:
        # What a run drops after its last step lies in the file of a step that never was.
        last = steps[-1]["step"] if run.finished and steps else None
        step = max((n for n in files if last is None or n <= last), default=None)
    if step is not None:
        _samples(console, files[step], step, limit)


def conclude(path: Path, console: Console | None = None) -> None:
    """Print what training changed on the held-out prompts, and where to look next."""
    console = console if console is not None else Console()
    run = RunDirectory.existing(path)
    rows = read_rows(run.evaluations)
    if len(rows) > 1:
        table = Table("held-out", box=None)
        for heading in ("before", "after", "change"):
            table.add_column(heading, justify="right")
        for name, label in held_out((rows[0], rows[-1])).items():
            was, now = rows[0].get(name), rows[-1].get(name)
            change = f"{now - was:+.3f}" if isinstance(was, float | int) and isinstance(now, float | int) else None
            cells = (f"{x:.3f}" if isinstance(x, float | int) else x for x in (was, now))
            table.add_row(*(cell(console, text) for text in (label, *cells, change)))
        console.print(table)
    line(console, f"curves  {run.curves}")
    line(console, f"model   {run.model}")
    line(console, f"Next: treadle inspect {run.path} shows metrics, books and samples.")


def show_numbers(numbers: Row, console: Console | None = None) -> None:
    """Print metrics by name."""
    console = console if console is not None else Console()
    table = Table(box=None, show_header=False)
    for name, value in sorted(numbers.items()):
        table.add_row(cell(console, name), cell(console, value))
    console.print(table)


def _metrics(console: Console, rows: Sequence[Row]) -> None:
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    table = Table("step", *(COLUMNS[n] for n in names), title="training", title_justify="left", box=None)
    for row in _thinned(rows):
        table.add_row(str(row["step"]), *(cell(console, row.get(n)) for n in names))
    console.print(table)


def held_out(rows: Sequence[Row]) -> dict[str, str]:
    """What these evaluations found, by key, and its name for people: rewards, tokens, failures where there were any."""
    found: list[tuple[int, bool, str, str]] = []
    for name in {k for row in rows for k, value in row.items() if value or not k.endswith("_failed")}:
        if match := EVALUATION.fullmatch(name):
            way, part, other = match.group("way", "part", "other")
            rank = (None, "tokens", "failed").index(other)
            label = f"{way} {other or 'reward'}" + (f": {part}" if part else "")
            found.append((rank, way != "sampled", label, name))
    return {name: label for *_, label, name in sorted(found)}


def _evaluations(console: Console, rows: Sequence[Row]) -> None:
    names = held_out(rows)
    table = Table("step", title="evaluation", title_justify="left", box=None)
    for label in names.values():
        table.add_column(cell(console, label))
    for row in _thinned(rows):
        table.add_row(str(row["step"]), *(cell(console, row.get(n)) for n in names))
    console.print(table)


def _summary(console: Console, summary: Row) -> None:
    for name, value in summary.items():
        if not isinstance(value, dict):
            line(console, readable(f"{name}  {value if isinstance(value, str) else number(value)}"))


def _samples(console: Console, path: Path, step: int, limit: int) -> None:
    rows = read_samples(path, ["sample", "state", "why", "reward", "messages", "response"])
    line(console, f"step {step}: {min(limit, len(rows))} of {len(rows)} samples", "bold")
    for row in rows[:limit]:
        why = f" ({readable(row['why'], 200)})" if row["why"] else ""
        line(console, f"{readable(row['sample'])}  {row['state']}{why}  reward {number(row['reward'])}", "cyan")
        line(console, f"  prompt    {readable(_prompt(row['messages']), 300)}", "dim")
        line(console, f"  response  {readable(row['response'] or '', 600)}")


def _prompt(messages: str | None) -> str:
    """What the conversation began with; a sample that failed early has none."""
    found = [m["content"] for m in json.loads(messages or "[]") if m["role"] == "user"]
    return str(found[0]) if found else ""


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """At most `MOST_ROWS`, evenly spaced, the first and the last among them."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]
