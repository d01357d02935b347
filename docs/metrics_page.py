"""Makes docs/metrics.md of the definitions in the code: `python docs/metrics_page.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treadle.config import plugin_class
from treadle.config.plugins import Plugin
from treadle.metrics import OURS, Metric

PAGE = Path(__file__).parent / "metrics.md"

_HEAD = """# Metrics

Made from the code by `make docs-metrics`: everything that a run writes into `metrics.jsonl` (one line a step) and
`evaluations.jsonl`. A value is null where there was nothing to measure.

*Counts once* says what a mean is over. It is one sum divided by one count over the whole step, however the work was
cut, and never a mean of means: **token**, a trained token (what an objective reports: of a row with signal);
**sequence**, a trajectory; **sample**; **group**, a prompt with its samples; **update**, an optimizer step; **step**,
one number a step; **max**, the largest counts. Names that begin with `time/` depend on the clock; with engines in
processes of their own, so do seconds among `publish/` and rates among `rollout/`.
"""

_PLACES = {
    "reward": "Rewards",
    "response": "Answers",
    "samples": "Samples",
    "data": "Data",
    "staleness": "Staleness",
    "advantage": "Advantages",
    "discrepancy": "Trainer against rollout engine",
    "correction": "Correction of the gap",
    "publish": "Publishing",
    "rollout": "Engines in processes of their own; engine: its place in the pool, from 0",
    "{role}": "Every trained role: policy, critic",
    "time": "Time",
    "evaluation": "Evaluation",
}


def page() -> str:
    """The text of docs/metrics.md."""
    parts = [_HEAD]
    for place, title in _PLACES.items():
        parts.append(_table(title, [m for m in OURS if m.name.partition("/")[0] == place]))
    parts += [_table(title, metrics) for title, metrics in _reported().items()]
    return "\n".join(parts)


def _reported() -> dict[str, list[Metric]]:
    """What algorithms declare, by whose it is."""
    names = list(Plugin("treadle.algorithms").choices())
    whose: dict[Metric, list[str]] = {}
    for name in names:
        for metric in plugin_class(name, "treadle.algorithms").metrics:
            whose.setdefault(metric, []).append(name)
    found: dict[str, list[Metric]] = {}
    for metric, having in whose.items():
        title = "Every algorithm" if having == names else f"With {', '.join(having)}"
        found.setdefault(title, []).append(metric)
    return found


def _table(title: str, metrics: Sequence[Metric]) -> str:
    cells = ((f"`{m.name}`", m.unit, m.weighting, m.definition) for m in metrics)
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join([f"## {title}\n", "| name | unit | counts once | definition |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
