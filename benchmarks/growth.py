"""How the cost of a step grows: `make bench-growth`, or `python -m benchmarks.growth` (`--only length` for one curve).

Time and memory of real steps (`treadle_steps.py`: `treadle.train`, one program a point) on small random Llama models
against one size at a time, each doubled four times while the others stay; and the time of what a step costs beside the
models (`records.py`). Times are CPU seconds of one thread, so that other work on the machine does not count. Exponents
are slopes of least squares through the logarithms of the three largest points, so 1 is linear; what is paid once,
however large the step, makes them smaller, never larger.

Everything found is kept in `runs/benchmarks/growth.json`, a curve at a time; the table is printed and
`docs/images/growth.png` is drawn from all that is there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import click

from benchmarks.turns import ROOT, Job, Player, command, locked

HOME = ROOT / "runs" / "benchmarks"
FOUND = HOME / "growth.json"
PICTURE = ROOT / "docs" / "images" / "growth.png"

STEPS = 3  # that are timed at each point, after one that is not

TIMES = ("generation_cpu", "training_cpu")
BYTES = ("generation_bytes", "training_bytes")

Point = dict[str, float]
"""What one step costs: CPU seconds by stage, and the most bytes by stage beyond those before the first step."""

FRUGAL = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""What is freed goes back to the system at once, or memory that a stage finds lying about would not count."""


# ---------------------------------------------------------------------- exponents


def exponent(curve: Mapping[float, float], points: int = 3) -> float:
    """Slope of least squares through the logarithms of the largest points of a curve; x and y above 0."""
    chosen = [(log(x), log(y)) for x, y in sorted(curve.items())[-points:]]
    mean_x, mean_y = (sum(values) / len(values) for values in zip(*chosen, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in chosen) / sum((x - mean_x) ** 2 for x, _ in chosen)


# ---------------------------------------------------------------------- models and prompts


@dataclass(frozen=True)
class Size:
    """A Llama with heads of 64, half as many for keys and values, and a vocabulary of 8,192."""

    layers: int = 6
    hidden: int = 256

    def make(self) -> Path:
        """Its directory; made once."""
        out = HOME / f"llama-{self.layers}x{self.hidden}"
        if (out / "config.json").exists():
            return out
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from examples.make_models import byte_tokenizer

        tokenizer: Any = byte_tokenizer()
        config = LlamaConfig(
            vocab_size=8192,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 128,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(out)
        tokenizer.save_pretrained(out)
        return out

    @property
    def parameters(self) -> int:
        """Of its matrices."""
        h = self.hidden
        return 8192 * h + self.layers * (3 * h * h + 3 * h * 3 * h)


def prompts(tokens: int) -> Path:
    """Different prompts of so many bytes, which are its tokens."""
    out = HOME / f"prompts-{tokens}.jsonl"
    texts = (f"{number:06d} ".ljust(tokens, "x") for number in range(4096))
    out.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    return out


# ---------------------------------------------------------------------- curves of whole steps


@dataclass(frozen=True)
class Step:
    """A point of a curve: `x` is what its axis counts."""

    x: int
    prompts: int = 2
    group: int = 4
    tokens: int = 64
    prompt_tokens: int = 32
    size: Size = field(default_factory=Size)
    rows: int = 128  # decoded together at most

    def job(self) -> Job:
        options = {"data.chat": "false", "rollout.max_sequences": self.rows, "trainer.dtype": "float32", "threads": 1}
        model, data = str(self.size.make()), str(prompts(self.prompt_tokens))
        return Job(self.prompts, self.group, self.tokens, model, data, options=options)


DOUBLED = (1, 2, 4, 8, 16)
SIZES = (Size(4, 128), Size(6, 256), Size(8, 384), Size(10, 512), Size(12, 640))

CURVES: dict[str, tuple[str, list[Step]]] = {
    "sequences": ("sequences in flight", [Step(x=8 * k, prompts=2 * k) for k in DOUBLED]),
    "length": ("tokens of an answer", [Step(x=64 * k, tokens=64 * k) for k in DOUBLED]),
    "group": ("samples of a group", [Step(x=4 * k, group=4 * k, prompt_tokens=256) for k in DOUBLED]),
    "model": ("parameters", [Step(x=s.parameters, size=s) for s in SIZES]),
    "waiting": ("requests, 16 at a time", [Step(x=32 * k, prompts=8 * k, tokens=16, rows=16) for k in DOUBLED]),
}


def run(step: Step, lock: Path | None) -> Point:
    """The least that one of the timed steps of one program took."""
    with locked(lock):
        program = command(Path(sys.executable), "benchmarks.treadle_steps", step.job())
        player = Player("treadle", program, HOME / "growth.log", FRUGAL)
        player.warmed_up()
        found = [player.step() for _ in range(STEPS)]
        player.end()
    return {name: min(facts[name] for facts in found) for name in (*TIMES, *BYTES)}


# ---------------------------------------------------------------------- everything, kept


def read() -> dict[str, Any]:
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def keep(name: str, curve: Mapping[int, Any]) -> None:
    FOUND.write_text(json.dumps({**read(), name: {str(x): y for x, y in curve.items()}}, indent=1))


def curves(name: str) -> dict[str, dict[float, float]]:
    """A curve of whole steps by what was measured; what is next to nothing is left out."""
    found = {float(x): point for x, point in read().get(name, {}).items()}
    named = {what: {x: point[what] for x, point in found.items()} for what in (*TIMES, *BYTES)}
    least = {**dict.fromkeys(TIMES, 1e-4), **dict.fromkeys(BYTES, 1e6)}
    return {what: {x: y for x, y in curve.items() if y > least[what]} for what, curve in named.items()}


def costs() -> dict[str, dict[str, dict[float, float]]]:
    """CPU seconds of `records.py`, by axis and name."""
    from benchmarks.records import COSTS

    found: dict[str, dict[str, dict[float, float]]] = {}
    for cost in COSTS:
        if curve := read().get(cost.name):
            found.setdefault(cost.axis, {})[cost.name] = {float(x): y for x, y in curve.items()}
    return found


def table() -> str:
    """Markdown: what each curve reached, and its exponents."""
    lines = [
        "| | from, to | generation | training | memory, generation | memory, training |",
        "|---|---|---|---|---|---|",
    ]
    for name, (axis, steps) in CURVES.items():
        if not (found := curves(name))["training_cpu"]:
            continue
        cells = [_cell(found[what]) for what in TIMES] + [_cell(found[what], memory=True) for what in BYTES]
        lines.append(f"| {axis} | {_short(steps[0].x)}, {_short(steps[-1].x)} | {' | '.join(cells)} |")
    lines += ["", "| beside the models | from, to | at the largest | exponent |", "|---|---|---|---|"]
    for axis, named in costs().items():
        for name, curve in named.items():
            ends = f"{_short(min(curve))}, {_short(max(curve))} {axis}"
            lines.append(f"| {name} | {ends} | {curve[max(curve)]:.3f} s | {exponent(curve):.2f} |")
    return "\n".join(lines)


def _cell(curve: Mapping[float, float], memory: bool = False) -> str:
    """The largest point and the exponent."""
    if len(curve) < 3:
        return "–"
    largest = curve[max(curve)]
    shown = f"{largest / 1e6:.0f} MB" if memory else f"{largest:.2f} s"
    return f"{shown}, **{exponent(curve):.2f}**"


def _short(x: float) -> str:
    return f"{x / 1e6:.1f} M" if x >= 1e6 else f"{x:,.0f}"


def draw() -> None:
    """Two rows of small panels: times above, memory below; what is beside the models at the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(2, len(CURVES) + 1)
    for column, (name, (axis, _)) in enumerate(CURVES.items()):
        found = curves(name)
        for axes, names, unit, scale in ((panels[0][column], TIMES, "CPU s", 1), (panels[1][column], BYTES, "MB", 1e6)):
            for what in names:
                _line(axes, {x: y / scale for x, y in found[what].items()}, what.partition("_")[0])
            _finish(axes, axis, f"{unit} a step" if column == 0 else "")
    for axis, named in costs().items():
        axes = panels[0 if axis == "trajectories" else 1][-1]
        for curve in named.values():
            axes.plot(list(curve), list(curve.values()), color="grey", linewidth=1)
        _finish(
            axes, "trajectories of a step" if axes is panels[0][-1] else "samples, steps of a run", "CPU s, no model"
        )
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=90)


def _line(axes: Any, curve: Mapping[float, float], label: str) -> None:
    if len(curve) >= 3:
        axes.plot(list(curve), list(curve.values()), marker="o", markersize=3, label=f"{label} {exponent(curve):.2f}")


def _finish(axes: Any, x: str, y: str) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)


@click.command(help=__doc__)
@click.option("--only", multiple=True, help=f"curves to measure: {', '.join(CURVES)}, records; none: all")
@click.option("--show", is_flag=True, help="measure nothing: only the table and the picture of what is there")
@click.option("--lock", type=click.Path(path_type=Path), help="hold this file's lock during each point")
def main(only: Sequence[str], show: bool, lock: Path | None) -> None:
    os.chdir(ROOT)
    HOME.mkdir(parents=True, exist_ok=True)
    chosen = [] if show else [name for name in (*CURVES, "records") if not only or name in only]
    for name in chosen:
        if name == "records":
            _records(lock)
            continue
        curve: dict[int, Point] = {}
        for step in CURVES[name][1]:
            curve[step.x] = run(step, lock)
            click.echo(f"{name} {step.x}: {json.dumps({k: round(v, 4) for k, v in curve[step.x].items()})}", err=True)
        keep(name, curve)
    click.echo(table())
    draw()


def _records(lock: Path | None) -> None:
    import torch

    from benchmarks.records import COSTS, measured

    torch.set_num_threads(1)
    for cost in COSTS:
        with locked(lock), tempfile.TemporaryDirectory() as scratch:
            found = measured(cost, cost.sizes, Path(scratch))
        click.echo(f"{cost.name}: {json.dumps({k: round(v, 5) for k, v in found.items()})}", err=True)
        keep(cost.name, found)


if __name__ == "__main__":
    main()
