"""Small real runs for the tests: the tiny byte model, the embedded engine, everything else as users have it."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from treadle.runs.metrics import read_rows, without_times
from treadle.runs.samples import read_samples
from treadle.types import Trajectory

ROOT = Path(__file__).parent.parent


async def variety(trajectory: Trajectory) -> float:
    """Share of different characters: a reward that is never the same for all. Async: no worker process to start."""
    return len(set(trajectory.response)) / 8


def settings(tmp_path: Path, model: Path, rows: int = 8, **more: Any) -> dict[str, Any]:
    """A configuration as a mapping: 3 steps of 2 groups of 4, `more` laid over it."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i}:", "answer": str(i)}) + "\n" for i in range(rows)))
    return {
        "model": str(model),
        "steps": 3,
        "prompts_per_step": 2,
        "threads": 1,
        "run": {"dir": str(tmp_path / "run")},
        "data": {"train": {"name": "jsonl", "path": str(data)}, "chat": False},
        "reward": "tests.runs:variety",
        "algorithm": {"name": "grpo", "group_size": 4},
        "sampling": {"max_tokens": 8},
        "trainer": {"dtype": "float32", "learning_rate": 1e-2},
        **more,
    }


def write(tmp_path: Path, config: dict[str, Any]) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """`treadle …` in a process of its own, which listens to SIGINT even where this one does not."""
    return subprocess.Popen(
        [sys.executable, "-m", "treadle", *map(str, arguments)],
        cwd=cwd,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*arguments: str | Path, cwd: Path = ROOT) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `treadle …`."""
    process = command(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def metrics(run: Path) -> list[dict[str, Any]]:
    """What two equal runs have in common."""
    return [without_times(row) for row in read_rows(run / "metrics.jsonl")]


def samples(run: Path) -> dict[str, list[dict[str, Any]]]:
    """All samples, by file. NaN is no number here, so that equal runs compare equal."""
    return {f.name: json.loads(json.dumps(read_samples(f)), parse_constant=str) for f in (run / "samples").iterdir()}


def books(run: Path) -> dict[str | None, int]:
    """Samples by state; None is in flight."""
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        return dict(ledger.execute("SELECT state, count(*) FROM samples GROUP BY state"))
