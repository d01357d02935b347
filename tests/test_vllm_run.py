"""Whole runs on vLLM: the bound on staleness, the books, and what a killed run leaves behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import treadle
from tests.runs import books, command, finish, settings, write
from treadle.runs.metrics import read_rows
from treadle.weights.config import WeightsConfig
from treadle.weights.place import new_place

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("staleness", "on_publish"), [(0, "resume"), (1, "drain"), (2, "resume"), (4, "continue")])
def test_what_is_trained_obeys_the_bound_and_the_books_balance(
    staleness: int, on_publish: str, tiny_model: Path, tmp_path: Path
) -> None:
    rollout: dict[str, Any] = {"name": "vllm", "threads": 1, "kv_cache_gb": 0.1, "max_sequences": 4}
    config = settings(
        tmp_path,
        tiny_model,
        steps=8,
        max_staleness=staleness,
        on_publish=on_publish,
        rollout=rollout | {"weights": {"delta": staleness > 1}},
        sampling={"max_tokens": 48},
    )
    treadle.train(config)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 8
    assert all(row["staleness/max"] <= staleness for row in rows)
    assert staleness == 0 or max(row["staleness/max"] for row in rows) > 0
    assert all(row["publish/probe_gap"] < 1e-4 for row in rows)
    if staleness == 0:
        assert all(row["discrepancy/max"] < 1e-4 for row in rows)
    found = books(tmp_path / "run")
    assert found["trained"] == 8 * 2 * 4
    assert None not in found


def engines(pid: int) -> list[int]:
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # one that has just died
            if any("VLLM" in part for part in child.cmdline()):
                found.append(child.pid)
    return found


def test_a_run_that_is_killed_leaves_no_engine_and_no_weights_behind_and_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = settings(tmp_path, tiny_model, steps=60, rollout={"name": "vllm", "threads": 1, "kv_cache_gb": 0.1})
    path = write(tmp_path, {**config, "run": {"dir": str(tmp_path / "run"), "checkpoint_every": 2}})
    process = command("train", path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or len(read_rows(metrics)) < 4:
        assert process.poll() is None
        time.sleep(0.05)
    left = engines(process.pid)
    assert left
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in left):
        assert time.monotonic() < deadline, "the engine outlived its trainer"
        time.sleep(0.1)
    own = f"-{process.pid}-"
    assert any(own in place.name for place in Path("/dev/shm").iterdir())
    code, _, err = finish("train", path, "steps=8")
    assert code == 0, err
    assert not any(own in place.name for place in Path("/dev/shm").iterdir())
    assert books(tmp_path / "run")["trained"] >= 8 * 2 * 4


def test_places_of_the_dead_are_swept_and_no_others(tmp_path: Path) -> None:
    weights = WeightsConfig(transport="files", directory=str(tmp_path))
    mine = Path(new_place(weights, tmp_path))
    dead = mine.with_name(mine.name.replace(f"-{os.getpid()}-", "-99999999-"))
    elsewhere = dead.with_name("treadle-anothermachine-99999999-abcd")
    for place in (mine, dead, elsewhere, tmp_path / "treadle-notes"):
        place.mkdir()
    again = new_place(weights, tmp_path)
    assert again != str(mine)
    assert sorted(tmp_path.iterdir()) == sorted([mine, elsewhere, tmp_path / "treadle-notes"])
