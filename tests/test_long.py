"""Learning curves on the real model and chaos: `make test-long`."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean

import psutil
import pytest

import treadle
from benchmarks import catalogue
from benchmarks.learning import gains, table, train
from tests.runs import ROOT, books, command, finish, metrics, samples, settings, write
from tests.test_vllm_run import engines
from treadle.runs.metrics import read_rows

pytestmark = pytest.mark.long


def test_the_quickstart_learns_on_held_out_problems(tmp_path: Path) -> None:
    """Over 3 seeds: sampled accuracy up by at least 25 points, greedy up too, training within 8 minutes."""
    runs = [train(ROOT / "examples" / "quickstart.yaml", seed, tmp_path) for seed in (0, 1, 2)]
    report = table(runs)
    assert mean(gains(runs, "sampled")) >= 0.25, report
    assert mean(gains(runs, "greedy")) > 0, report


@pytest.mark.parametrize("algorithm", catalogue.names())
def test_every_algorithm_learns_the_byte_task(algorithm: str, tiny_model: Path, tmp_path: Path) -> None:
    """From each of 3 seeds; chance is below .02, and nearly all reach 1."""
    rows = [catalogue.learn(algorithm, seed, tmp_path, tiny_model) for seed in catalogue.SEEDS]
    assert min(row["after"] - row["before"] for row in rows) > 0.2, rows


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_chaos(seed: int, staleness: int, tiny_model: Path, tmp_path: Path) -> None:
    """Killed a dozen times at random instants, wherever it was: starting, saving, evaluating, exporting."""
    config = settings(tmp_path, tiny_model, rows=7, steps=40, max_staleness=staleness, evaluation={"every": 7})
    config["data"]["evaluation"] = config["data"]["train"]
    path = write(tmp_path, {**config, "run": {"dir": str(tmp_path / "run"), "checkpoint_every": 3}})
    noise = random.Random(seed)
    for _ in range(12):
        process = command("train", path)
        time.sleep(noise.uniform(1.0, 6.0))
        process.kill()
        process.communicate()
    code, _, err = finish("train", path)
    assert code == 0, err
    found = books(tmp_path / "run")
    assert None not in found
    assert found["trained"] == 40 * 2 * 4
    trained = [row["sample"] for name, rows in samples(tmp_path / "run").items() for row in rows if "step" in name]
    assert len(trained) == len(set(trained))
    if staleness == 0:
        treadle.train({**config, "run": {"dir": str(tmp_path / "whole"), "checkpoint_every": 3}})
        assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
        assert samples(tmp_path / "run") == samples(tmp_path / "whole")


@pytest.mark.parametrize("staleness", [0, 2])
def test_engines_killed_and_stopped_at_random_lose_nothing(staleness: int, tiny_model: Path, tmp_path: Path) -> None:
    """Two vLLM engines; every few seconds one of those there is killed or stopped, wherever it was."""
    rollout = {"name": "vllm", "threads": 1, "replicas": 2, "kv_cache_gb": 0.1, "timeout": 8.0, "restarts": 1000}
    config = settings(
        tmp_path,
        tiny_model,
        steps=60,
        max_staleness=staleness,
        rollout=rollout | {"weights": {"timeout": 8.0}},
        sampling={"max_tokens": 200},
    )
    process = command("train", write(tmp_path, config))
    noise, blows = random.Random(staleness), 0
    while not (tmp_path / "run" / "metrics.jsonl").exists():  # one that dies as it starts ends the run, and should
        assert process.poll() is None
        time.sleep(0.1)
    while process.poll() is None:
        time.sleep(noise.uniform(3.0, 9.0))
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # the run, or the engine, has just ended
            if there := engines(process.pid):
                os.kill(noise.choice(there), noise.choice([signal.SIGKILL, signal.SIGSTOP]))
                blows += 1
    _, err = process.communicate()
    assert process.returncode == 0, err
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 60
    assert blows >= 2
    assert rows[-1]["rollout/fenced"] >= 1
    assert max(row["staleness/max"] for row in rows) <= staleness
    found = books(tmp_path / "run")
    assert None not in found
    assert found["trained"] == 60 * 2 * 4
