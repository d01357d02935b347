"""Every algorithm in the whole program: the loop, the embedded engine, the torch engine, the ledger."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.runs import books, metrics, samples, settings
from treadle.config.plugins import Plugin
from treadle.errors import TrainingError
from treadle.types import Trajectory

NAMES = sorted(Plugin("treadle.algorithms").choices())


async def by_length(trajectory: Trajectory) -> float:
    """Equal within a group whose prompt says so."""
    return 1.0 if trajectory.prompt.index % 2 else trajectory.sampled_tokens % 3 / 2


def run(tmp_path: Path, model: Path, algorithm: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    config = settings(tmp_path, model, steps=2, algorithm={"group_size": 4, **algorithm}, **more)
    treadle.train(config)
    return metrics(tmp_path / "run")


@pytest.mark.parametrize("name", NAMES)
def test_it_trains(name: str, tiny_model: Path, tmp_path: Path) -> None:
    more = {"ppo": {"minibatches": 2}, "pass_at_k": {"passed": 0.7, "k": 2}}.get(name, {})
    rows = run(tmp_path, tiny_model, {"name": name, **more})
    assert [row["policy/updated"] for row in rows] == [1, 1]
    assert all(math.isfinite(row["policy/loss"]) and row["policy/grad_norm"] > 0 for row in rows)
    assert rows[0]["discrepancy/max"] < 1e-3
    found = books(tmp_path / "run")
    assert found == {"trained": 16, **({"baseline": 4} if name == "remax" else {})}


def test_joined_names_train_and_say_so(tiny_model: Path, tmp_path: Path) -> None:
    rows = run(tmp_path, tiny_model, {"name": "gspo+rloo", "clip_low": 0.1, "minibatches": 2})
    assert rows[0]["policy/ratio"] == pytest.approx(1, abs=0.2)
    assert "name: gspo+rloo" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    "correction",
    [
        {"weight": "token"},
        {"weight": "sequence", "normalize": True},
        {"weight": "token", "outside": "zero", "weight_low": 0.5, "weight_high": 5.0},
        {"reject": "sequence-mean", "reject_low": 0.9, "reject_high": 1.1},
        {"proximal": "sampler"},
        {"proximal": "interpolated", "weight": "token"},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_corrections_run_behind_the_sampler(
    correction: dict[str, Any], minibatches: int, tiny_model: Path, tmp_path: Path
) -> None:
    algorithm = {"name": "grpo", "correction": correction, "minibatches": minibatches}
    rows = run(tmp_path, tiny_model, algorithm, max_staleness=1)
    assert all(math.isfinite(row["policy/loss"]) for row in rows)
    if correction.get("weight"):
        assert rows[0]["policy/weight"] == pytest.approx(1, abs=1e-3)  # the first step's tokens are the policy's own
    if correction.get("normalize"):
        assert rows[1]["policy/weight"] == pytest.approx(1, abs=1e-5)


def test_at_equal_weights_a_correction_changes_no_gradient(tiny_model: Path, tmp_path: Path) -> None:
    """Sampler and trainer agree to rounding, so weights are 1 and nothing is rejected."""
    norms = []
    for correction in ({}, {"weight": "token"}, {"reject": "token"}, {"proximal": "sampler"}):
        into = tmp_path / "-".join(correction or ["none"])
        into.mkdir()
        rows = run(into, tiny_model, {"name": "grpo", "correction": correction})
        norms.append(rows[0]["policy/grad_norm"])
        assert rows[0]["correction/rejected"] == 0
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-3)


def test_rejecting_everything_skips_the_update_and_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "truncated": "reject"}  # hardly an answer of the tiny model ends by itself
    rows = run(tmp_path, tiny_model, algorithm, sampling={"max_tokens": 2})
    emptied = [row for row in rows if row["correction/rejected"] == 1]
    assert emptied
    assert [(row["policy/tokens"], row["policy/loss"], row["policy/grad_norm"]) for row in emptied] == [(0, 0, 0)]


def test_dynamic_sampling_tops_the_step_up(tiny_model: Path, tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        tiny_model,
        {"name": "dapo", "overlong_share": 0.0},
        reward="tests.test_algorithms_run:by_length",
        sampling={"max_tokens": 8, "stop": ["e", "t", "a"]},
    )
    assert [row["reward/equal_groups"] for row in rows] == [0, 0]
    found = books(tmp_path / "run")
    assert found["trained"] == 16
    assert found["filtered"] > 0
    assert found["filtered"] % 4 == 0


def test_dynamic_sampling_without_end_is_a_loud_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"4 groups in a row were filtered \('all rewards are equal' the last\)"):
        run(tmp_path, tiny_model, {"name": "dapo"}, reward="tests.test_algorithms_run:equal", max_filtered_groups=3)


async def equal(_: Trajectory) -> float:
    return 0.5


def test_the_overlong_penalty_is_in_the_advantages_and_not_in_the_rewards(tiny_model: Path, tmp_path: Path) -> None:
    """All rewards are equal, so what trains is the penalty alone."""
    run(
        tmp_path,
        tiny_model,
        {"name": "dapo", "dynamic_sampling": False, "overlong_share": 1.0},
        reward="tests.test_algorithms_run:equal",
        sampling={"max_tokens": 8, "stop": ["e", "t", "a"]},
    )
    rows = [row for file in samples(tmp_path / "run").values() for row in file]
    assert {row["reward"] for row in rows} == {0.5}
    pushed = [float(value) for row in rows for value in row["advantages"] or () if value != "NaN"]
    assert max(pushed) > 0 > min(pushed)
