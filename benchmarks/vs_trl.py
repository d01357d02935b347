"""The whole GRPO step against TRL's, on the same machine, by turns: `make bench-trl`, or

    python -m benchmarks.vs_trl --shape 6x8x32 --shape 8x8x128

Two programs, each in its own environment, take turns step by step (`turns.py`), so that other work on the machine hits
both alike; the ratio is the median over rounds of the two times of a round. Model, data, group size, token limit, loss
(no KL, one update), learning rate and reward are the same. So are the lengths of answers, for the learning rate is too
small to change a weight. `--lengths full` makes every answer exactly as long as the limit.

treadle runs with its defaults, TRL with what `--tune` found fastest (`FASTEST`) at the same gradient precision.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import click

from benchmarks.turns import ROOT, Job, Player, command, locked

Round = dict[str, dict[str, Any]]
"""Facts of one step of each side, by its name."""

OURS, PEER = "treadle", "TRL"
PYTHON = {OURS: Path(sys.executable), PEER: ROOT / ".cache" / "trl" / "bin" / "python"}
MODULE = {OURS: "benchmarks.treadle_steps", PEER: "benchmarks.trl_steps"}
LOGS = ROOT / "runs" / "benchmarks"

FASTEST: dict[str, Any] = {"precision": "float32", "micro": 16}
"""TRL's options where nothing else is asked for."""

CANDIDATES: list[dict[str, Any]] = [
    *({"micro": micro} for micro in (0, 24, 8)),
    {"continuous": True},
    {"compile": True},
    {"precision": "autocast"},
    {"precision": "bfloat16"},
]
"""What `--tune` tries against `FASTEST`, each laid over it."""

NEVER = "<filename>"
"""A token of SmolLM2 that an answer has with a probability of about 1e-7: as the end token it ends none."""


# ---------------------------------------------------------------------- running


def player(side: str, job: Job, name: str) -> Player:
    if not PYTHON[side].exists():
        raise SystemExit(f"{PYTHON[side]} is missing: `make bench-trl` makes TRL's environment")
    return Player(side, command(PYTHON[side], MODULE[side], job), LOGS / f"{name}.log")


def alternate(sides: Mapping[str, Callable[[], Player]], rounds: int, lock: Path | None) -> list[Round]:
    """`rounds` steps of each side by turns, after one step of each that is not counted."""
    found: list[Round] = []
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for side, start in sides.items():
            with locked(lock):
                players[side] = start()
                stack.callback(players[side].end)
                players[side].warmed_up()
        for number in range(rounds):
            with locked(lock):
                found.append({side: p.step() for side, p in players.items()})
            seconds = "   ".join(f"{side} {facts['seconds']:.1f} s" for side, facts in found[-1].items())
            click.echo(f"round {number + 1}: {seconds}", err=True)
    return found


def endless(model: str) -> str:
    """A directory with the same model whose answers do not end before their limit."""
    source, out = ROOT / model, LOGS / "endless"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in source.iterdir():
        (out / file.name).symlink_to(file)
    vocabulary = {t["content"]: t["id"] for t in json.loads((source / "tokenizer.json").read_text())["added_tokens"]}
    for name, changes in {
        "generation_config.json": {"eos_token_id": vocabulary[NEVER]},
        "config.json": {"eos_token_id": vocabulary[NEVER]},
        "tokenizer_config.json": {"eos_token": NEVER},
    }.items():
        (out / name).unlink()
        (out / name).write_text(json.dumps({**json.loads((source / name).read_text()), **changes}))
    return str(out)


# ---------------------------------------------------------------------- reporting


def ratios(rounds: Sequence[Round]) -> list[float]:
    """How many times as many samples a second treadle made, by round."""
    return [r[PEER]["seconds"] / r[OURS]["seconds"] for r in rounds]


def table(job: Job, rounds: Sequence[Round]) -> str:
    """Markdown: a line a side, medians over rounds, and the ratio with its range."""
    lines = [
        f"{job.prompts} prompts × {job.group} samples × ≤ {job.tokens} tokens, {len(rounds)} rounds",
        "",
        "| | samples/s | s a step | generation | training | tokens an answer | tokens/s | trained rows | peak memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for side in rounds[0]:
        of = {name: [r[side][name] for r in rounds] for name in rounds[0][side]}
        seconds, tokens = median(of["seconds"]), mean(of["tokens"])
        cells = [
            f"{job.samples / seconds:.2f}",
            f"{seconds:.1f}",
            f"{median(of['generation']):.1f} s",
            f"{median(of['training']):.1f} s",
            f"{tokens:.1f}",
            f"{median(t * job.samples / s for t, s in zip(of['tokens'], of['seconds'], strict=True)):.0f}",
            f"{mean(of['with_signal']):.0%}",
            f"{max(of['peak_bytes']) / 1e9:.2f} GB",
        ]
        lines.append(f"| {side} | {' | '.join(cells)} |")
    if {OURS, PEER} <= rounds[0].keys():
        found = sorted(ratios(rounds))
        lines += ["", f"Samples/s, treadle ÷ TRL: {median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f} by round)"]
    return "\n".join(lines)


def tune(job: Job, candidates: Sequence[dict[str, Any]], rounds: int, lock: Path | None) -> str:
    """Markdown: what each candidate setting of TRL takes for a step, and how many times what `FASTEST` takes."""
    lines = ["| TRL | s a step | generation | training | peak memory | ÷ fastest |", "|---|---|---|---|---|---|"]
    for changes in candidates:
        jobs = {"candidate": replace(job, options={**FASTEST, **changes}), "fastest": replace(job, options=FASTEST)}
        found = alternate({name: partial(player, PEER, j, f"trl-{name}") for name, j in jobs.items()}, rounds, lock)
        for name, facts in found[-1].items():
            named = ", ".join(f"{key}={value}" for key, value in jobs[name].options.items())
            cells = (f"{median(r[name][what] for r in found):.1f}" for what in ("seconds", "generation", "training"))
            ratio = median(r[name]["seconds"] / r["fastest"]["seconds"] for r in found)
            lines.append(f"| {named} | {' | '.join(cells)} | {facts['peak_bytes'] / 1e9:.2f} GB | {ratio:.2f} |")
        click.echo("\n".join(lines[-2:]), err=True)
    return "\n".join(lines)


def shape(text: str) -> tuple[int, int, int]:
    """`6x8x32`: prompts, samples of each, tokens of an answer at most."""
    try:
        prompts, group, tokens = map(int, text.split("x"))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a shape; write it as 6x8x32") from None
    return prompts, group, tokens


@click.command(help=__doc__)
@click.option("--shape", "shapes", multiple=True, default=["6x8x32", "8x8x128"], help="prompts x group x tokens")
@click.option("--rounds", default=5, help="steps of each side")
@click.option("--lengths", type=click.Choice(["natural", "full"]), default="natural")
@click.option("--reward", type=click.Choice(["sum", "spread"]), default="spread", help="sum: many groups train nothing")
@click.option("--peer", multiple=True, metavar="KEY=VALUE", help="options of TRL, see trl_steps.py")
@click.option("--ours", multiple=True, metavar="KEY=VALUE", help="configuration keys of treadle")
@click.option("--tune", "tuning", is_flag=True, help="TRL's settings (--peer, or several) by turns instead")
@click.option("--lock", type=click.Path(path_type=Path), help="hold this file's lock during each round")
def main(
    shapes: Sequence[str],
    rounds: int,
    lengths: Literal["natural", "full"],
    reward: Literal["sum", "spread"],
    peer: Sequence[str],
    ours: Sequence[str],
    tuning: bool,
    lock: Path | None,
) -> None:
    os.chdir(ROOT)
    model = Job.model if lengths == "natural" else endless(Job.model)
    for prompts, group, tokens in map(shape, shapes):
        job = Job(prompts, group, tokens, model, reward=reward)
        if tuning:
            click.echo(tune(job, [dict(map(_option, peer))] if peer else CANDIDATES, rounds, lock))
            continue
        options = {OURS: dict(o.split("=", 1) for o in ours), PEER: {**FASTEST, **dict(map(_option, peer))}}
        jobs = {side: replace(job, options=chosen) for side, chosen in options.items()}
        found = alternate({side: partial(player, side, j, side) for side, j in jobs.items()}, rounds, lock)
        click.echo(f"{lengths} lengths, reward {reward}: {table(job, found)}\n")


def _option(text: str) -> tuple[str, Any]:
    """`micro=8` as a key and a value of JSON; a bare word is text."""
    name, value = text.split("=", 1)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    main()
