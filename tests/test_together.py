"""Whole runs on a Ray cluster whose training and generation share devices by turns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import treadle
from tests.reward_models import make_reward_model
from tests.runs import books, samples, settings
from tests.test_cluster import VLLM, learned, near, ran
from tests.watched import judge
from treadle.errors import ConfigError, RolloutError, TreadleError, WorkerError
from treadle.runs.metrics import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

PPO: dict[str, Any] = {
    "algorithm": {"name": "ppo", "group_size": 4, "kl_coefficient": 0.05, "minibatches": 2},
    "trainer": {"dtype": "float32", "learning_rate": 1e-3},
}
DIED = r"(policy|rollout)\.\w+ on rank 0 of 1.*: The actor died"  # of what is asked of it then, any may be told first


def by_turns(ranks: int = 1, **more: Any) -> dict[str, Any]:
    return {"backend": "ray", "pools": {"main": {"ranks": ranks, "cpus": 0.5, "offload": True}}, **more}


def watched(home: Path, name: str = "Embedded", **more: Any) -> dict[str, Any]:
    home.mkdir(exist_ok=True)
    return {"name": f"tests.watched:{name}", "diary": str(home), **more}


def handed_over(home: Path, ranks: int = 1) -> list[Counter[str]]:
    """What its processes wrote; it must have been turn after turn."""
    found = judge(home)
    assert len(found) == ranks
    rows = read_rows(home / "run" / "metrics.jsonl")
    for counts in found:
        assert counts["sleep."] >= len(rows) + 1  # and the first publish
        assert counts["wake"] >= len(rows) + 1
        assert counts["offload"] >= len(rows) + 1
        assert counts["compute"] > 2 * len(rows)
        assert counts["generate"] > len(rows)
    assert rows[-1]["rollout/turns"] >= 2 * len(rows)
    assert 0 < rows[-1]["rollout/turn_seconds"] < 60
    return found


@pytest.mark.parametrize("more", [{}, PPO], ids=["grpo", "ppo"])
def test_turns_change_no_bit(more: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """Policy, critic, reference and rollout on one device, which each of them has to itself."""
    here = ran(tmp_path / "here", tiny_model, **more)
    home = tmp_path / "there"
    there = ran(home, tiny_model, controller=by_turns(), rollout=watched(home), **more)
    assert learned(there) == learned(here)
    assert samples(there) == samples(here)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (here, there))
    assert all(bool((ours[n] == theirs[n]).all()) for n in ours)
    handed_over(home)


def test_two_ranks_take_turns_in_step(tiny_model: Path, tmp_path: Path) -> None:
    """Sharded training, and a rollout engine on each rank."""
    here = ran(tmp_path / "here", tiny_model, **PPO)
    home = tmp_path / "there"
    near(here, ran(home, tiny_model, controller=by_turns(2), rollout=watched(home), **PPO))
    handed_over(home, 2)


def test_what_looks_beside_the_rollout_takes_turns_while_the_policy_is_elsewhere(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Weights then come from another pool, bucket by bucket into engines that are awake."""
    controller = by_turns(roles={"policy": "train", "critic": "train"})
    controller["pools"]["train"] = {"cpus": 0.5}
    home = tmp_path / "there"
    rollout = watched(home, weights={"staged": False})
    there = ran(home, tiny_model, controller=controller, rollout=rollout, **PPO)
    assert learned(there) == learned(ran(tmp_path / "here", tiny_model, **PPO))
    (counts,) = judge(home)
    assert counts["compute"] >= 3
    assert counts["sleep."] >= 3


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_reward_model_takes_turns_without_interrupting(staleness: int, tiny_model: Path, tmp_path: Path) -> None:
    """It scores when no request is left, or training has the devices anyway: not whenever an answer ends."""
    model = make_reward_model(tmp_path / "reward", tiny_model)
    more = {**PPO, "reward": "model", "reward_model": {"model": str(model)}, "max_staleness": staleness}
    home = tmp_path / "there"
    there = ran(home, tiny_model, controller=by_turns(), rollout=watched(home), **more)
    handed_over(home)
    assert read_rows(there / "metrics.jsonl")[-1]["rollout/turns"] <= 5 * 4
    if staleness == 0:
        here = ran(tmp_path / "here", tiny_model, **more)
        assert learned(there) == learned(here)
        assert samples(there) == samples(here)


@pytest.mark.parametrize(
    ("name", "engine", "staleness", "on_publish"),
    [
        ("Embedded", {}, 2, "resume"),
        ("Embedded", {}, 1, "drain"),
        ("Vllm", VLLM, 0, "resume"),
        ("Vllm", VLLM, 1, "continue"),
    ],
    ids=["embedded", "embedded-drain", "vllm", "vllm-stale"],
)
def test_the_bound_on_staleness_and_the_books(
    name: str, engine: dict[str, Any], staleness: int, on_publish: str, tiny_model: Path, tmp_path: Path
) -> None:
    more = {"max_staleness": staleness, "on_publish": on_publish, "steps": 6, "sampling": {"max_tokens": 24}}
    more["run"] = {"dir": str(tmp_path / "run"), "checkpoint_every": 3}
    rollout = engine | watched(tmp_path, name)
    run = ran(tmp_path, tiny_model, controller=by_turns(), rollout=rollout, **more)
    rows = read_rows(run / "metrics.jsonl")
    assert len(rows) == 6
    assert all(row["staleness/max"] <= staleness for row in rows)
    assert all(row["publish/probe_gap"] < 1e-4 for row in rows)
    assert (max(row["staleness/max"] for row in rows) > 0) == (staleness > 0)
    found = books(run)
    assert found["trained"] == 6 * 2 * 4
    assert None not in found
    handed_over(tmp_path)


def test_a_run_by_turns_goes_on_and_is_evaluated(tiny_model: Path, tmp_path: Path) -> None:
    more = {"evaluation": {"samples": 2}, "controller": by_turns(2), "trainer": PPO["trainer"]}
    config = settings(tmp_path, tiny_model, **more)
    config["data"]["evaluation"] = config["data"]["train"]
    treadle.train(config | {"steps": 2})
    treadle.train(config)
    there = treadle.evaluate(tmp_path / "run")
    last = read_rows(tmp_path / "run" / "evaluations.jsonl")[-1]
    assert there["evaluation/greedy"] == last["evaluation/greedy"]


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("sleep dies 3", TreadleError, DIED),
        ("wake dies 3", TreadleError, DIED),
        ("compute dies 5", TreadleError, DIED),
        ("onload dies 3", TreadleError, DIED),
        ("offload dies 3", TreadleError, DIED),
        ("sleep raises 3", TreadleError, r"rollout\.sleep on rank 0 of 1.*the disk is on fire"),
        ("wake raises 3", TreadleError, r"rollout\.wake on rank 0 of 1.*the disk is on fire"),
        ("onload raises 3", WorkerError, r"policy\.\w+ on rank 0 of 1.*the disk is on fire"),
        ("offload raises 3", TreadleError, r"rollout\.arrive on rank 0 of 1.*the disk is on fire"),
    ],
)
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_fails_in_a_turn_ends_the_run_with_one_clear_error(
    fault: str, kind: type[Exception], message: str, staleness: int, tiny_model: Path, tmp_path: Path
) -> None:
    """Nothing that was recorded is lost."""
    rollout = watched(tmp_path, fault=fault)
    config = settings(tmp_path, tiny_model, max_staleness=staleness, steps=6, controller=by_turns(), rollout=rollout)
    with pytest.raises(kind, match=message):
        treadle.train(config)
    if (tmp_path / "run" / "ledger.sqlite").exists():
        assert None not in books(tmp_path / "run")


def test_an_engine_that_hangs_over_a_hand_over_ends_the_run_in_time(tiny_model: Path, tmp_path: Path) -> None:
    rollout = watched(tmp_path, fault="wake hangs 3", timeout=3.0)
    config = settings(tmp_path, tiny_model, steps=6, controller=by_turns(), rollout=rollout)
    with pytest.raises(RolloutError, match=r"rollout engine 0-1 did not wake within its time limit"):
        treadle.train(config)


def test_weights_that_come_by_the_device_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    rollout = {"weights": {"transport": "cuda_ipc"}}
    with pytest.raises(ConfigError, match=r"cuda_ipc.*pools\.main.*use shared_memory"):
        treadle.train(settings(tmp_path, tiny_model, controller=by_turns(), rollout=rollout))
