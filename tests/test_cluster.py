"""Whole runs on a Ray cluster: what is computed does not depend on where; bounds, books, resuming, deaths."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

import treadle
from tests.reward_models import make_reward_model
from tests.runs import books, command, finish, metrics, samples, settings, write
from tests.vllm_help import make_model
from treadle.errors import ConfigError, ModelError, WorkerError
from treadle.runs.metrics import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

TOGETHER: dict[str, Any] = {"backend": "ray", "pools": {"all": {"cpus": 0.5}}}
VLLM: dict[str, Any] = {"name": "vllm", "threads": 1, "kv_cache_gb": 0.1, "max_sequences": 8}
_OF_PLACES = re.compile(r"publish/|rollout/|speed/")


def apart(train: int = 1, generate: int = 1, **more: Any) -> dict[str, Any]:
    pools = {"train": {"ranks": train, "cpus": 0.5}, "generate": {"ranks": generate, "cpus": 0.5}}
    return {"backend": "ray", "pools": pools, "roles": {"policy": "train", "rollout": "generate"}, **more}


def ran(home: Path, model: Path, **more: Any) -> Path:
    home.mkdir(exist_ok=True)
    config = settings(home, model, **more)
    treadle.train(config)
    return home / "run"


def learned(run: Path) -> list[dict[str, Any]]:
    """What the steps of two equal runs have in common, wherever their roles work."""
    return [{k: v for k, v in row.items() if not _OF_PLACES.match(k)} for row in metrics(run)]


def near(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """The same samples, and losses and gradients up to rounding."""
    for mine, theirs in zip(learned(one), learned(other), strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "reward/mean"):
            assert mine[name] == pytest.approx(theirs[name], abs=tolerance, rel=tolerance), name


def test_back_end_and_placement_change_no_bit(tiny_model: Path, tmp_path: Path) -> None:
    """Noise, admission, plans and threads are the same, so the losses, the samples and the model are."""
    here = ran(tmp_path / "here", tiny_model)
    for name, controller in {"together": TOGETHER, "apart": apart()}.items():
        there = ran(tmp_path / name, tiny_model, controller=controller)
        assert learned(there) == learned(here)
        assert samples(there) == samples(here)
        ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (here, there))
        assert ours.keys() == theirs.keys()
        assert all(bool((ours[n] == theirs[n]).all()) for n in ours)


def test_ranks_change_rounding_only(tiny_model: Path, tmp_path: Path) -> None:
    """Two ranks hold half of the weights each and see half of the samples; the replicas of HSDP likewise."""
    settled = {"trainer": {"dtype": "float32", "learning_rate": 1e-3}}
    here = ran(tmp_path / "here", tiny_model, **settled)
    near(here, ran(tmp_path / "sharded", tiny_model, controller=apart(train=2), **settled))
    hsdp = {"trainer": {**settled["trainer"], "shard_ranks": 1}}
    near(here, ran(tmp_path / "replicas", tiny_model, controller=apart(train=2), **hsdp))


def test_roles_that_take_turns_in_memory(tiny_model: Path, tmp_path: Path) -> None:
    """Policy, critic and reference give the devices up to each other; on a CPU nothing moves, and nothing changes."""
    more: dict[str, Any] = {
        "algorithm": {"name": "ppo", "group_size": 4, "kl_coefficient": 0.05, "minibatches": 2},
        "trainer": {"dtype": "float32", "learning_rate": 1e-3},
    }
    controller = apart()
    controller["pools"]["train"]["offload"] = True
    there = ran(tmp_path / "there", tiny_model, controller=controller, **more)
    assert learned(there) == learned(ran(tmp_path / "here", tiny_model, **more))


def test_four_roles_on_three_pools(tiny_model: Path, tmp_path: Path) -> None:
    """PPO: policy and critic share two ranks, the reference and the rollout have pools of their own."""
    more: dict[str, Any] = {
        "algorithm": {"name": "ppo", "group_size": 4, "kl_coefficient": 0.05, "minibatches": 2},
        "trainer": {"dtype": "float32", "learning_rate": 1e-3},
    }
    pools = {name: {"cpus": 0.5, "ranks": 2 if name == "train" else 1} for name in ("train", "look", "generate")}
    roles = {"policy": "train", "critic": "train", "reference": "look", "rollout": "generate"}
    there = ran(tmp_path / "there", tiny_model, controller={"backend": "ray", "pools": pools, "roles": roles}, **more)
    here = ran(tmp_path / "here", tiny_model, **more)
    near(here, there)
    for mine, theirs in zip(learned(here), learned(there), strict=True):
        assert mine["critic/loss"] == pytest.approx(theirs["critic/loss"], abs=1e-5)
    for row in read_rows(there / "metrics.jsonl"):
        for stage in ("generate", "observe", "update"):
            assert row[f"time/{stage}/tokens_per_second"] > 0
            assert 0 < row[f"time/{stage}/matrix_share"] < 1.001


def test_a_reward_model_anywhere(tiny_model: Path, tmp_path: Path) -> None:
    """In a pool of its own, on two ranks that hold half of it each; in the policy's; in the rollout's. Every score is
    the same to the last bit, and so is the run."""
    model = make_reward_model(tmp_path / "reward", tiny_model)
    more = {"reward": "model", "reward_model": {"model": str(model)}}
    here = ran(tmp_path / "here", tiny_model, **more)
    apart_, beside, behind = apart(), apart(), apart()
    apart_["pools"]["judge"] = {"ranks": 2, "cpus": 0.5}
    apart_["roles"]["reward_model"] = "judge"
    beside["roles"]["reward_model"] = "train"
    behind["roles"]["reward_model"] = "generate"
    for name, controller in {"apart": apart_, "beside": beside, "behind": behind}.items():
        there = ran(tmp_path / name, tiny_model, controller=controller, **more)
        assert learned(there) == learned(here)
        assert samples(there) == samples(here)


def test_a_reward_model_that_dies_ends_the_run(tiny_model: Path, tmp_path: Path) -> None:
    """At once and by its name: what it would have said is no reward that failed."""
    model = make_reward_model(tmp_path / "reward", tiny_model)
    controller = apart()
    controller["pools"]["judge"] = {"cpus": 0.5}
    controller["roles"]["reward_model"] = "judge"
    more = {"reward": "model", "reward_model": {"model": str(model)}, "max_staleness": 2, "steps": 400}
    config = settings(tmp_path, tiny_model, rows=2000, controller=controller, **more)

    killer = killed(tmp_path / "run", 1)  # pools start one after another, the policy's first
    with pytest.raises(WorkerError, match=r"reward_model\.score on rank 0 of 1.*: The actor died"):
        treadle.train(config)
    killer.join()
    assert None not in books(tmp_path / "run")


def test_what_was_trained_on_a_cluster_is_evaluated_there(tiny_model: Path, tmp_path: Path) -> None:
    """By the run's own configuration, whose pools for critic and reference have nothing to do now."""
    config = settings(tmp_path, tiny_model, evaluation={"samples": 2})
    config |= {"algorithm": {"name": "ppo", "group_size": 4, "kl_coefficient": 0.05, "minibatches": 2}}
    config["data"]["evaluation"] = config["data"]["train"]
    pools = {name: {"cpus": 0.5, "ranks": 2 if name == "train" else 1} for name in ("train", "look", "generate")}
    roles = {"policy": "train", "critic": "look", "reference": "look", "rollout": "generate"}
    treadle.train(config | {"controller": {"backend": "ray", "pools": pools, "roles": roles}})
    there = treadle.evaluate(tmp_path / "run")
    here = treadle.evaluate(tmp_path / "run", overrides=["controller={}"])
    last = read_rows(tmp_path / "run" / "evaluations.jsonl")[-1]
    assert there["evaluation/greedy"] == here["evaluation/greedy"] == last["evaluation/greedy"]


@pytest.mark.parametrize(
    ("controller", "rollout", "on_publish"),
    [
        (TOGETHER, {}, "resume"),
        (apart(generate=2), {"weights": {"transport": "broadcast", "bucket_mb": 1}}, "continue"),
        (TOGETHER, VLLM, "drain"),
        (apart(train=2), {**VLLM, "weights": {"transport": "broadcast", "staged": False}}, "resume"),
    ],
    ids=["together", "apart", "vllm-together", "vllm-apart"],
)
def test_the_bound_on_staleness_and_the_books(
    controller: dict[str, Any], rollout: dict[str, Any], on_publish: str, tiny_model: Path, tmp_path: Path
) -> None:
    more = {"max_staleness": 2, "on_publish": on_publish, "steps": 6, "sampling": {"max_tokens": 24}}
    run = ran(tmp_path, tiny_model, controller=controller, rollout=rollout, **more)
    rows = read_rows(run / "metrics.jsonl")
    assert len(rows) == 6
    assert all(row["staleness/max"] <= 2 for row in rows)
    assert max(row["staleness/max"] for row in rows) > 0
    assert all(row["publish/probe_gap"] < 1e-4 for row in rows)
    found = books(run)
    assert found["trained"] == 6 * 2 * 4
    assert None not in found


def test_a_mixture_of_experts(tiny_model: Path, tmp_path: Path) -> None:
    """Sharded over two ranks and generated by either engine, though the embedded one holds experts stacked."""
    model = make_model(tmp_path / "moe", "Qwen3Moe")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / file, model / file)
    for name, rollout in {"embedded": {}, "vllm": VLLM}.items():
        home = tmp_path / name
        run = ran(home, model, controller=apart(train=2), rollout=rollout, trainer={"dtype": "float32"})
        rows = read_rows(run / "metrics.jsonl")
        assert len(rows) == 3
        assert all(row["publish/probe_gap"] < 1e-4 and row["discrepancy/max"] < 1e-4 for row in rows)


def test_a_run_goes_on_with_another_number_of_ranks(tiny_model: Path, tmp_path: Path) -> None:
    """Saved by two ranks, loaded by one, and by none but this process: as if it had never stopped."""
    whole = ran(tmp_path / "whole", tiny_model, steps=4, trainer={"dtype": "float32", "learning_rate": 1e-3})
    config = settings(tmp_path, tiny_model, steps=4, trainer={"dtype": "float32", "learning_rate": 1e-3})
    run, saved = tmp_path / "run", tmp_path / "saved"
    treadle.train(config | {"steps": 2, "controller": apart(train=2)})
    run.rename(saved)
    for controller in (apart(), {}):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(saved, run)
        treadle.train(config | {"controller": controller})
        near(whole, run)


def test_a_worker_that_is_killed_ends_the_run_with_one_clear_error(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing that was recorded is lost, and the same command goes on."""
    config = settings(tmp_path, tiny_model, steps=400, controller=apart(train=2))
    config["run"]["checkpoint_every"] = 2
    killer = killed(tmp_path / "run", 0)
    with pytest.raises(WorkerError, match=r"policy\.\w+ on rank \d of 2 in step \d+: The actor died"):
        treadle.train(config)
    killer.join()
    assert None not in books(tmp_path / "run")
    done = len(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert treadle.train(config | {"steps": done + 2})["steps"] == done + 2


def killed(run: Path, number: int) -> threading.Thread:
    """Kills the worker that was the `number`-th to start, as soon as steps are recorded."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}

    def kill() -> None:
        log = run / "metrics.jsonl"
        while not log.exists() or len(read_rows(log)) < 3:
            time.sleep(0.1)
        fresh = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        workers = [p for p in fresh if "RayHost" in " ".join(_command(p))]
        os.kill(sorted(workers, key=lambda p: p.create_time())[number].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def test_a_program_that_is_killed_leaves_nothing_running(tiny_model: Path, tmp_path: Path) -> None:
    """With a cluster of its own: the command line, as users have it."""
    controller = {"backend": "ray", "pools": {"all": {"cpus": 0.25}}}
    path = write(tmp_path, settings(tmp_path, tiny_model, steps=400, controller=controller, rollout=VLLM))
    process = command("train", path)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        time.sleep(0.2)
        assert process.poll() is None, process.communicate()
    children = psutil.Process(process.pid).children(recursive=True)
    ours = [p for p in children if re.search("RayHost|VLLM|raylet", " ".join(_command(p)))]
    assert len(ours) >= 3
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(ours, timeout=30)  # Ray's own agents take a minute
    assert [p.name() for p in alive] == []


def on_ray(**pool: Any) -> dict[str, Any]:
    return {"controller": {"backend": "ray", "pools": {"all": pool}}}


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"controller": apart(2), "trainer": {"shard_ranks": 3}}, ConfigError, "shard_ranks=3 .* allowed: 1, 2"),
        (on_ray(ranks=900), ConfigError, "room for .* of its 900 ranks"),
        (on_ray(gpus=1), ConfigError, "GPU: 1.*the cluster has"),
        (
            {"controller": {**apart(), "roles": {"policy": "train"}}},
            ConfigError,
            r"pools\.generate has no work: name it in controller\.roles",
        ),
        ({"controller": apart(), "rollout": {**VLLM, "replicas": 2}}, ConfigError, r"pools\.generate\.ranks"),
        ({"controller": TOGETHER, "rollout": {"weights": {"staged": False}}}, ConfigError, "staged=false"),
        ({"controller": {"pools": {"a": {"ranks": 2}}}}, ConfigError, "controller.backend=ray"),
        ({"controller": {"backend": "ray", "address": "127.0.0.1:1"}}, ConfigError, "nothing answers there"),
        ({"controller": TOGETHER, "model": "/nowhere"}, ModelError, "no model directory"),
    ],
    ids=["shards", "ranks", "gpus", "idle", "replicas", "staged", "local", "address", "model"],
)
def test_what_cannot_be_is_named_before_training(
    more: dict[str, Any], kind: type[Exception], message: str, tiny_model: Path, tmp_path: Path, request: Any
) -> None:
    if "address" in request.node.callspec.id:  # this process is part of a cluster already
        code, _, err = finish("train", write(tmp_path, settings(tmp_path, tiny_model) | more))
        assert code == 2
        assert re.search(message, err)
    else:
        with pytest.raises(kind, match=message):
            treadle.train(settings(tmp_path, tiny_model) | more)
    assert not (tmp_path / "run").exists()
