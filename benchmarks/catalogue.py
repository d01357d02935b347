"""Every algorithm learns: `python -m benchmarks.catalogue [NAME…]` trains the tiny byte task of `examples/smoke.yaml`
with each, over seeds, and keeps the mean reward of the first and of the last steps in `docs/data/learning.json`, from
which `docs/algorithms.md` takes its table. All have the same budget: 64 samples a step, 30 steps, one learning rate.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import mean
from typing import Any

import click

import treadle
from treadle.errors import TrainingError
from treadle.runs.metrics import read_rows

ROOT = Path(__file__).parent.parent
FOUND = ROOT / "docs" / "data" / "learning.json"
ENDS = 3  # steps at either end that are averaged
SEEDS = (0, 1, 2)

Row = dict[str, Any]


def names() -> list[str]:
    """All algorithms of ours."""
    from treadle.config.plugins import Plugin

    return sorted(Plugin("treadle.algorithms").choices())


def learn(algorithm: str, seed: int, into: Path, model: Path = ROOT / "models" / "tiny", *more: str) -> Row:
    """One run; its reward before and after."""
    run = into / f"{algorithm}-{seed}"
    overrides = [f"model={model}", f"run.dir={run}", f"seed={seed}", "run.trackers=[]", "trainer.dtype=float32"]
    # The example's own section is for GRPO, so it is taken whole.
    overrides += [f"algorithm={{name: {algorithm}, group_size: 8}}", *more]
    if algorithm == "pass_at_k":  # whose answers pass or fail: those of one letter do
        overrides.append("sampling.max_tokens=1")
    # Under dynamic sampling a task that is solved ends the run: no group is left that says anything.
    solved = suppress(TrainingError) if algorithm == "dapo" else nullcontext()
    with solved:
        treadle.train(ROOT / "examples" / "smoke.yaml", overrides=overrides)
    rewards = [row["reward/mean"] for row in read_rows(run / "metrics.jsonl")]
    before, after = mean(rewards[:ENDS]), mean(rewards[-ENDS:])
    return {"algorithm": algorithm, "seed": seed, "before": round(before, 4), "after": round(after, 4)}


def keep(rows: Sequence[Row]) -> None:
    """Put rows into the file, in the place of those of the same algorithms and seeds."""
    old = json.loads(FOUND.read_text()) if FOUND.exists() else []
    known = {(row["algorithm"], row["seed"]): row for row in (*old, *rows)}
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(known[key]) for key in sorted(known))
    FOUND.write_text(f"[\n{lines}\n]\n")


@click.command(help=__doc__)
@click.argument("algorithms", nargs=-1)
@click.option("--seed", "seeds", multiple=True, type=int, default=SEEDS, show_default=True)
def main(algorithms: Sequence[str], seeds: Sequence[int]) -> None:
    for algorithm in algorithms or names():
        with tempfile.TemporaryDirectory() as folder:
            rows = [learn(algorithm, seed, Path(folder)) for seed in seeds]
        keep(rows)
        click.echo(f"{algorithm:<30} " + ", ".join(f"{r['before']:.3f} → {r['after']:.3f}" for r in rows))


if __name__ == "__main__":
    main()
