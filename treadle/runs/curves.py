"""`curves.png`: what a run learned, in one picture."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.runs.directory import RunDirectory
from treadle.runs.files import write_aside
from treadle.runs.metrics import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

WINDOW = 5  # steps of the running mean drawn over noisy curves

REWARD = "reward/mean"
EVALUATION = re.compile(r"evaluation/(?!.*_(?:tokens|failed)$)([^/]+)")
"""Keys of `evaluations.jsonl` that are drawn: the mean reward of each way of sampling."""
LENGTH = "response/tokens"
OPTIMISER = ("policy/grad_norm", "policy/entropy", "policy/loss")
"""The first of them that a run has makes the fourth panel."""


def draw(run: RunDirectory) -> Path:
    """Draw training reward, evaluations, response length and the optimiser's health into the run directory."""
    # The object interface alone: pyplot would set up a backend and keep state for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, evaluations = read_rows(run.metrics), read_rows(run.evaluations)
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(run.path.name)
    reward, evaluation, length, health = figure.subplots(2, 2).flat
    _curve(reward, "Training reward", "mean reward", steps, REWARD)
    _evaluations(evaluation, evaluations)
    _curve(length, "Response length", "tokens", steps, LENGTH)
    shown = next((k for k in OPTIMISER if any(k in row for row in steps)), OPTIMISER[0])
    _curve(health, shown.removeprefix("policy/").replace("_", " ").capitalize(), shown, steps, shown)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_aside(run.curves, image.getvalue())
    return run.curves


def _curve(axes: Axes, title: str, label: str, rows: Sequence[Row], key: str) -> None:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    if len(points) > 2 * WINDOW:
        window = [points[max(0, i - WINDOW + 1) : i + 1] for i in range(len(points))]
        axes.plot([x for x, _ in points], [y for _, y in points], color="C0", alpha=0.3, linewidth=1)
        means = [(w[-1][0], sum(y for _, y in w) / len(w)) for w in window]
        _line(axes, means, f"mean of {WINDOW} steps", "C0")
        axes.legend(frameon=False)
    else:
        _line(axes, points, None, "C0")
    _finish(axes, title, label, bool(points))


def _evaluations(axes: Axes, rows: Sequence[Row]) -> None:
    names = sorted({k for row in rows for k in row if EVALUATION.fullmatch(k)})
    for at, name in enumerate(names):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        _line(axes, points, name.removeprefix("evaluation/"), f"C{at}")
        for x, y in (points[:1] + points[-1:])[-2:]:
            axes.annotate(f"{y:.2f}", (x, y), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8)
    if names:
        axes.margins(y=0.15)
        axes.legend(frameon=False)
    _finish(axes, "Evaluation on problems kept apart", "mean reward", bool(names))


def _line(axes: Axes, points: Sequence[tuple[float, float]], label: str | None, colour: str) -> None:
    marker = "o" if len(points) <= 30 else None
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, label=label, marker=marker, markersize=3)


def _finish(axes: Axes, title: str, label: str, any_points: bool) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if any_points:
        axes.locator_params(axis="x", integer=True)
    else:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color="grey")
