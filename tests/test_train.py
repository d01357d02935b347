"""The whole program on the tiny real model: what it learns, repeats, survives and leaves behind."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import treadle
from tests.own_engine import OwnEngine
from tests.runs import books, command, finish, metrics, samples, settings, write
from treadle.algorithms.grpo import GRPO, GRPOConfig
from treadle.errors import ConfigError, DataError, ModelError, RewardError, RunError, TreadleError
from treadle.runs.metrics import read_rows


def started(path: Path, run: Path, steps: int) -> subprocess.Popen[str]:
    """A training process that has put so many rows of metrics on the disk."""
    process = command("train", path)
    while len(read_rows(run / "metrics.jsonl")) < steps:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process


# ---------------------------------------------------------------------- learning


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_smoke_run_learns(staleness: int, tiny_model: Path, tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        tiny_model,
        steps=30,
        prompts_per_step=8,
        max_staleness=staleness,
        algorithm={"name": "grpo", "group_size": 8},
        sampling={"max_tokens": 16},
        reward="fraction",
    )
    treadle.train(config)
    rows = metrics(tmp_path / "run")
    assert rows[0]["reward/mean"] < 0.1
    assert rows[-1]["reward/mean"] > 0.8
    assert max(row["staleness/max"] for row in rows) == staleness
    trained = 30 * 8 * 8
    assert books(tmp_path / "run") == {"trained": trained} | ({"cancelled": staleness * 64} if staleness else {})


def test_ppo_runs_all_four_roles(tiny_model: Path, tmp_path: Path) -> None:
    algorithm = {"name": "ppo", "group_size": 2, "kl_coefficient": 0.05, "minibatches": 2, "critic_warmup_steps": 1}
    treadle.train(settings(tmp_path, tiny_model, steps=3, algorithm=algorithm))
    rows = metrics(tmp_path / "run")
    assert "policy/loss" not in rows[0]  # critic warm-up: no version either
    assert rows[0]["critic/grad_norm"] > 0
    assert rows[1]["policy/grad_norm"] > 0
    row = samples(tmp_path / "run")["step_000003.parquet"][0]
    for name in ("old_logprobs", "reference_logprobs", "values", "advantages", "returns"):
        assert len(row[name]) == len(row["token_ids"])
        assert any(value is not None and value != "NaN" for value in row[name]), name


@pytest.mark.parametrize("temperature", [0.6, 1.3])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_before_the_first_update_the_ratio_is_exactly_one_and_the_kl_exactly_zero(
    kl_in: str, temperature: float, tiny_model: Path, tmp_path: Path
) -> None:
    algorithm = {"name": "ppo", "group_size": 2, "kl_coefficient": 0.1, "kl_in": kl_in, "minibatches": 1}
    config = settings(tmp_path, tiny_model, steps=1, algorithm=algorithm)
    config["sampling"]["temperature"] = temperature
    treadle.train(config)
    row = metrics(tmp_path / "run")[0]
    assert row["policy/ratio"] == 1.0
    assert row["policy/kl_reference"] == 0.0
    assert row["discrepancy/max"] < 1e-5


# ---------------------------------------------------------------------- the same again


def test_equal_runs_are_equal_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model, evaluation={"every": 2, "samples": 2})
    config["data"]["evaluation"] = config["data"]["train"]
    for name in ("one", "two"):
        treadle.train({**config, "run": {"dir": str(tmp_path / name)}})
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    assert samples(tmp_path / "one") == samples(tmp_path / "two")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[1], [3], [4, 7], [2, 2, 5]], ids=str)
def test_killed_at_any_point_the_same_command_goes_on_bit_for_bit(
    kills: list[int], tiny_model: Path, tmp_path: Path
) -> None:
    """Seven rows and two prompts a step: an epoch ends inside a step, and checkpoints lie on either side of it."""
    config = settings(tmp_path, tiny_model, rows=7, steps=9, evaluation={"every": 3, "samples": 1})
    config["data"]["evaluation"] = config["data"]["train"]
    treadle.train({**config, "run": {"dir": str(tmp_path / "whole"), "checkpoint_every": 2}})

    broken = write(tmp_path, {**config, "run": {"dir": str(tmp_path / "broken"), "checkpoint_every": 2}})
    noise = random.Random(str(kills))
    for steps in kills:
        process = started(broken, tmp_path / "broken", steps)
        time.sleep(noise.uniform(0, 0.1))
        process.kill()
        process.communicate()
    code, _, err = finish("train", broken)
    assert code == 0, err
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    assert samples(tmp_path / "broken") == samples(tmp_path / "whole")
    assert books(tmp_path / "broken") == books(tmp_path / "whole") == {"trained": 72, "evaluated": 14 * 4}
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("broken", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_an_asynchronous_run_that_was_killed_loses_no_prompt_and_trains_none_twice(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = settings(tmp_path, tiny_model, rows=40, steps=10, max_staleness=2)
    path = write(tmp_path, {**config, "run": {"dir": str(tmp_path / "run"), "checkpoint_every": 2}})
    process = started(path, tmp_path / "run", 5)
    process.kill()
    process.communicate()
    code, _, err = finish("train", path)
    assert code == 0, err
    trained = [row["sample"] for name, rows in samples(tmp_path / "run").items() for row in rows if "step" in name]
    assert sorted(trained) == sorted(f"{group}.{i}" for group in range(20) for i in range(4))
    assert max(row["staleness/max"] for row in metrics(tmp_path / "run")) <= 2


def test_killed_after_the_last_checkpoint_the_same_command_finishes(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model)
    whole = treadle.train(config)
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "model")
    assert treadle.train(config) == whole
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_a_finished_run_can_be_continued_for_more_steps(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model)
    treadle.train({**config, "steps": 2})
    assert treadle.train({**config, "steps": 4})["steps"] == 4
    treadle.train({**config, "steps": 4, "run": {"dir": str(tmp_path / "whole")}})
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_finite_data_end_the_run_with_a_smaller_step(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model, rows=5, steps=100)
    config["data"]["epochs"] = 1
    assert treadle.train(config)["steps"] == 3
    assert treadle.train(config)["steps"] == 3  # again: there is nothing left to do
    assert books(tmp_path / "run") == {"trained": 20}


# ---------------------------------------------------------------------- what a run leaves behind


def test_the_exported_model_reloads_with_equal_logits(tiny_model: Path, tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    class Watched(GRPO):
        Config = GRPOConfig

    treadle.train(settings(tmp_path, tiny_model, steps=2), algorithm=Watched(GRPOConfig(group_size=2)))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    before = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        seen = [m(tokens).logits for m in (model, before)]
    assert not torch.equal(*seen)  # it has learnt something
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.decode(tokenizer.encode("say 1:")) == "say 1:"
    config = settings(tmp_path, tmp_path / "run" / "model", steps=1, run={"dir": str(tmp_path / "again")})
    treadle.train(config)  # and it trains on


def test_the_run_directory_is_readable_without_the_program(tiny_model: Path, tmp_path: Path) -> None:
    treadle.train(settings(tmp_path, tiny_model))
    run = tmp_path / "run"
    names = {"config.yaml", "metrics.jsonl", "samples", "ledger.sqlite", "checkpoints", "summary.json", "log.txt"}
    assert names | {"curves.png", "model"} <= {p.name for p in run.iterdir()}
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    row = metrics(run)[0]
    assert row["step"] == 1
    assert 0 <= row["reward/mean"] <= 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_evaluate_a_run_its_checkpoint_and_a_model(staleness: int, tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model, max_staleness=staleness, steps=14, prompts_per_step=8, reward="fraction")
    config |= {"evaluation": {"samples": 2}, "algorithm": {"name": "grpo", "group_size": 8}}
    config["data"]["evaluation"] = config["data"]["train"]
    treadle.train(config)
    final = treadle.evaluate(tmp_path / "run")
    rows = read_rows(tmp_path / "run" / "evaluations.jsonl")
    assert final["evaluation/greedy"] == rows[-1]["evaluation/greedy"]
    assert rows[-1]["evaluation/greedy"] > 0.5 > rows[0]["evaluation/greedy"]
    (tmp_path / "run" / "model").rename(tmp_path / "moved")
    (tmp_path / "run" / "summary.json").unlink()  # as if it had not ended: the checkpoint answers
    assert treadle.evaluate(tmp_path / "run")["evaluation/greedy"] == final["evaluation/greedy"]
    assert treadle.evaluate(tmp_path / "moved", config=config)["evaluation/greedy"] == final["evaluation/greedy"]
    assert treadle.evaluate(tiny_model, config=config)["evaluation/greedy"] == rows[0]["evaluation/greedy"]


# ---------------------------------------------------------------------- from Python


def length(trajectory: treadle.Trajectory) -> float:
    return len(trajectory.response) / 8


async def awaited(trajectory: treadle.Trajectory) -> treadle.Reward:
    return treadle.Reward(1.0, parts={"length": length(trajectory)})


@pytest.mark.parametrize("reward", [length, awaited, lambda trajectory: 0.5])
def test_rewards_from_python(reward: Any, tiny_model: Path, tmp_path: Path) -> None:
    treadle.train(settings(tmp_path, tiny_model, steps=1), reward=reward)
    assert metrics(tmp_path / "run")[0]["reward/mean"] > 0


def test_a_notebook_whose_event_loop_is_running_may_call_train(tiny_model: Path, tmp_path: Path) -> None:
    async def cell() -> dict[str, Any]:
        return treadle.train(settings(tmp_path, tiny_model, steps=1))

    assert asyncio.run(cell())["steps"] == 1

    async def wrong() -> None:
        treadle.train(settings(tmp_path, Path("models/nowhere"), run={"dir": str(tmp_path / "other")}))

    with pytest.raises(ModelError, match="nowhere"):
        asyncio.run(wrong())


def test_a_class_defined_in_a_function_is_an_algorithm(tiny_model: Path, tmp_path: Path) -> None:
    class Mine(treadle.Algorithm):
        def advantages(self, batch: treadle.Batch) -> treadle.Batch:
            return batch.replace(advantage_T=batch.reward_N[batch.row_T].float() - 0.5)

        def loss(self, batch: treadle.Batch, outputs: treadle.Outputs) -> treadle.Loss:
            assert outputs.logprob_T is not None
            assert batch.advantage_T is not None
            return treadle.Loss([treadle.Term(-batch.advantage_T * outputs.logprob_T)])

    treadle.train(settings(tmp_path, tiny_model, steps=2), algorithm=Mine())
    assert metrics(tmp_path / "run")[-1]["policy/grad_norm"] > 0


# ---------------------------------------------------------------------- bad input


class Forgetful(treadle.Algorithm):
    def __init__(self) -> None: ...


class Astray(treadle.Algorithm):
    before_loss = frozenset({"reference"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"algorithm": GRPO}, r"MyAlgorithm\(\)"),
        ({"algorithm": "grpo"}, r"MyAlgorithm\(\)"),
        ({"algorithm": Forgetful()}, "super"),
        ({"algorithm": Astray()}, "`uses`"),
        ({"reward": "number"}, "not a function"),
        ({"overrides": "steps=3"}, "list"),
        ({"algorithm": GRPO(), "overrides": ["algorithm.group_size=4"]}, "from Python"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], words: str, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        treadle.train(settings(tmp_path, tiny_model), **arguments)


def test_a_reward_from_python_keeps_the_section_of_the_mapping(tiny_model: Path, tmp_path: Path) -> None:
    treadle.train(settings(tmp_path, tiny_model, steps=1, reward={"timeout_s": 3.0}), reward=awaited)
    assert "timeout_s: 3.0" in (tmp_path / "run" / "config.yaml").read_text()


def test_texts_that_look_like_other_things_survive_into_an_evaluation(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model, steps=1, sampling={"max_tokens": 8, "stop": ["no", "1_0", "2020-01-01"]})
    config["data"]["evaluation"] = config["data"]["train"]
    treadle.train(config)
    assert treadle.evaluate(tmp_path / "run")["evaluation/greedy_failed"] == 0


def test_a_model_that_cannot_be_written_is_named_and_the_run_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    config = settings(tmp_path, tiny_model)
    treadle.train({**config, "steps": 1})
    shutil.rmtree(tmp_path / "run" / "model")
    (tmp_path / "run" / "model").write_text("in the way")
    with pytest.raises(RunError, match="model could not be written"):
        treadle.train(config)
    (tmp_path / "run" / "model").unlink()
    assert treadle.train(config)["steps"] == 3


HANGING = {"functions": {"tests.hostile_rewards:hanging": 1.0}}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "models/nowhere"}, ModelError, "models/nowhere"),
        ({"algorithm": {"name": "grpo", "group_size": 1}}, ConfigError, "group_size"),
        ({"algorithm": {"name": "grpo", "minibatches": 3}}, ConfigError, "minibatches=3"),
        ({"algorithm": {"name": "grop"}}, ConfigError, "grpo"),
        ({"stepz": 3}, ConfigError, "steps"),
        ({"sampling": {"max_tokens": 1024}}, ConfigError, "1 to 1023"),
        ({"reward": "tests.hostile_rewards:hostile"}, RewardError, "no such answer"),
        ({"reward": "tests.hostile_rewards:nothing"}, RewardError, "None"),
        ({"reward": {**HANGING, "timeout_s": 0.2, "retries": 0}}, RewardError, "0.2"),
        ({"reward": "tests.hostile_rewards:no_such_function"}, ConfigError, "no_such_function"),
    ],
    ids=str,
)
def test_bad_configurations_name_the_culprit(
    change: dict[str, Any], error: type[TreadleError], words: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        treadle.train({**settings(tmp_path, tiny_model), **change})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"prompt": "ok"}\n{"prompt": 3}\n', "prompts.jsonl:2"),
        ('{"prompt": "ok"}\nnonsense\n', "prompts.jsonl:2"),
        ("", "empty|no row|no prompt"),
        ('{"prompt": "' + "x" * 2000 + '"}\n', "max_prompt_tokens"),
    ],
)
def test_bad_data_name_file_and_line(lines: str, words: str, tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model)
    (tmp_path / "prompts.jsonl").write_text(lines)
    with pytest.raises(DataError, match=words):
        treadle.train(config)


def test_a_tokenizer_without_a_chat_template(tiny_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(bare)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    config = settings(tmp_path, bare)
    config["data"]["chat"] = True
    with pytest.raises(DataError, match=r"data\.chat=false"):
        treadle.train(config)


def test_a_mistake_leaves_no_run_directory_behind(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        treadle.train({**settings(tmp_path, tiny_model), "model": "models/nowhere"})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_runs_in_one_directory(tiny_model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, settings(tmp_path, tiny_model, steps=100_000))
    process = started(path, tmp_path / "run", 1)
    try:
        with pytest.raises(RunError, match=str(process.pid)):
            treadle.train(settings(tmp_path, tiny_model, steps=100_000))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_interrupted_it_ends_cleanly_with_the_books_balanced(tiny_model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, settings(tmp_path, tiny_model, steps=100_000, max_staleness=1))
    process = started(path, tmp_path / "run", 2)
    try:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "same command" in err
    assert "Traceback" not in err
    found = books(tmp_path / "run")
    assert None not in found  # nothing is left in flight
    assert found["trained"] >= 16


def test_a_rollout_engine_of_ones_own_is_chosen_by_its_path(tiny_model: Path, tmp_path: Path) -> None:
    before = OwnEngine.asked
    treadle.train(settings(tmp_path, tiny_model, steps=1, rollout={"name": "tests.own_engine:OwnEngine"}))
    assert OwnEngine.asked - before == 2 * 4 + 2  # and the probes of the first publish and of the step's
