"""Learning curves of a configuration over seeds: `python -m benchmarks.learning examples/quickstart.yaml 0 1 2`.

Trains each seed into `runs/curves/NAME-SEED` (again: it goes on where it stopped), prints a table of held-out results
before and after, and draws all curves into `docs/images/NAME.png`. With `--algorithm gspo`, given several times, one
seed of each algorithm in the place of the configuration's own, drawn into `docs/images/algorithms.png`; with
`--with "rollout.name=vllm max_staleness=1"`, given several times, one seed under each of these overrides, drawn into
`docs/images/engines.png`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click

import treadle
from treadle.runs.metrics import read_rows

ROOT = Path(__file__).parent.parent


def train(config: Path, seed: int, into: Path) -> Path:
    """Train one seed; the run directory."""
    run = into / f"{config.stem}-{seed}"
    treadle.train(config, overrides=[f"seed={seed}", f"run.dir={run}"])
    return run


def gains(runs: list[Path], way: str) -> list[float]:
    """What each run's held-out accuracy gained, "sampled" or "greedy"."""
    rows = [read_rows(run / "evaluations.jsonl") for run in runs]
    return [r[-1][f"evaluation/{way}"] - r[0][f"evaluation/{way}"] for r in rows]


def table(runs: list[Path]) -> str:
    """Markdown: before and after of each run, minutes of its steps, and the mean gain with its spread."""
    lines = ["| run | sampled | greedy | minutes of steps |", "|---|---|---|---|"]
    for run in runs:
        first, *_, last = read_rows(run / "evaluations.jsonl")
        minutes = sum(row["time/step"] for row in read_rows(run / "metrics.jsonl")) / 60
        cells = (f"{first[f'evaluation/{w}']:.3f} → {last[f'evaluation/{w}']:.3f}" for w in ("sampled", "greedy"))
        lines.append(f"| {run.name} | {' | '.join(cells)} | {minutes:.1f} |")
    spread = {way: gains(runs, way) for way in ("sampled", "greedy")}
    cells = (f"{mean(g):+.3f} ± {stdev(g) if len(g) > 1 else 0.0:.3f}" for g in spread.values())
    return "\n".join([*lines, f"| mean gain ± sd | {' | '.join(cells)} | |"])


def draw(runs: list[Path], out: Path) -> None:
    """Training reward over steps and held-out accuracy before and after, one line a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes: Any
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for number, run in enumerate(runs):
        steps, tests = read_rows(run / "metrics.jsonl"), read_rows(run / "evaluations.jsonl")
        axes[0].plot([r["step"] for r in steps], [r["reward/mean"] for r in steps], f"C{number}", label=run.name)
        for way, style in (("sampled", "-"), ("greedy", "--")):
            found = [r[f"evaluation/{way}"] for r in tests]
            axes[1].plot([r["step"] for r in tests], found, f"C{number}o{style}")
    axes[0].set(title="training reward", xlabel="step", ylim=(0, 1.02))
    axes[1].set(title="held-out accuracy (sampled —, greedy - -)", xlabel="step")
    axes[0].legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def train_algorithm(config: Path, algorithm: str, into: Path) -> Path:
    """Train with another algorithm, its defaults and groups of 8; the run directory."""
    run = into / algorithm
    treadle.train(config, overrides=[f"algorithm={{name: {algorithm}, group_size: 8}}", f"run.dir={run}"])
    return run


def train_with(config: Path, overrides: str, into: Path) -> Path:
    """Train under overrides, written as on a command line; the run directory."""
    run = into / overrides.replace(" ", ",")
    treadle.train(config, overrides=[*overrides.split(), f"run.dir={run}"])
    return run


@click.command(help=__doc__)
@click.argument("config", type=click.Path(path_type=Path, exists=True))
@click.argument("seeds", nargs=-1, type=int)
@click.option("--algorithm", "algorithms", multiple=True)
@click.option("--with", "variants", multiple=True)
def main(config: Path, seeds: Sequence[int], algorithms: Sequence[str], variants: Sequence[str]) -> None:
    into = ROOT / "runs" / "curves"
    runs = [train_algorithm(config, name, into / "algorithms") for name in algorithms]
    runs += [train_with(config, overrides, into / "engines") for overrides in variants]
    runs = runs or [train(config, seed, into) for seed in seeds or (0, 1, 2)]
    name = "algorithms" if algorithms else "engines" if variants else config.stem
    draw(runs, ROOT / "docs" / "images" / f"{name}.png")
    click.echo(table(runs))


if __name__ == "__main__":
    main()
