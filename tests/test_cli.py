"""The command line and the shipped configurations, as users meet them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.runs import ROOT, finish, settings, write
from treadle.config import Config, dump, leaves
from treadle.recipes.config import load_config

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
CORRECTED = {
    "overlong_share": 0.5,
    "aggregate": "constant",
    "correction": {"weight": "token", "normalize": True, "reject": "sequence-mean"},
}
PPO = {"name": "ppo", "group_size": 2, "kl_coefficient": 0.1, "kl_target": 0.05, "minibatches": 2}


def ppo(tmp_path: Path, model: Path) -> dict[str, Any]:
    config = settings(tmp_path, model, algorithm=PPO, evaluation={"samples": 1}, rollout={"max_sequences": 4})
    config["data"]["evaluation"] = config["data"]["train"]
    return config


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_shipped_configuration_loads_and_survives_its_own_dump(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(config))
    assert load_config(resolved) == config


def test_a_whole_ppo_run_has_at_most_120_keys_each_with_a_meaning(tmp_path: Path, tiny_model: Path) -> None:
    keys = list(leaves(load_config(None, base=ppo(tmp_path, tiny_model))))
    assert len(keys) <= 120
    assert [name for name, _, meaning in keys if not meaning] == []


def _identity(model: type) -> str:
    return f"{model.__module__}.{model.__qualname__}"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """(model, key) of every configuration key that is read as an attribute while the test runs."""
    seen: set[tuple[str, str]] = set()
    plain = object.__getattribute__

    def watched(self: Config, name: str) -> Any:
        if name in type(self).model_fields:
            caller = sys._getframe(1).f_globals["__name__"]
            if not caller.startswith(("treadle.config", "tests.")):  # dumping every key is not reading it
                seen.add((_identity(type(self)), name))
        return plain(self, name)

    monkeypatch.setattr(Config, "__getattribute__", watched)
    yield seen
    monkeypatch.undo()


def test_every_key_is_read(reads: set[tuple[str, str]], tmp_path: Path, tiny_model: Path, ray_cluster: None) -> None:
    """A key that nothing reads would be a promise that nothing keeps."""
    config = ppo(tmp_path, tiny_model)
    grpo = {"name": "grpo", "group_size": 2, "kl_coefficient": 0.1, "entropy_coefficient": 0.1}
    family = {"name": "reasoning_gym", "family": "chain_sum", "size": 4}
    for name, change in {
        "ppo": {},
        "loss": {"algorithm": PPO | {"kl_in": "loss", "overlong_share": 0.5}},
        "grpo": {"algorithm": grpo, "reward": "fraction", "data": {"train": family}},
        "corrected": {"algorithm": grpo | CORRECTED},
        "cluster": {
            "controller": {"backend": "ray", "pools": {"all": {"cpus": 0.5}}},
            "rollout": {"weights": {"transport": "files"}},
        },
    }.items():
        treadle.train({**config, **change, "steps": 2, "run": {"dir": str(tmp_path / name), "checkpoint_every": 1}})

    def unread(model: Config) -> Iterator[str]:
        for name in type(model).model_fields:
            value = getattr(model, name)
            if isinstance(value, Config):
                yield from unread(value)
            elif (_identity(type(model)), name) not in reads:
                yield f"{_identity(type(model))}.{name}"

    everything = [load_config(None, base={**config, "data": {"train": family}})]
    everything.append(load_config(None, base={**config, "algorithm": grpo}))
    assert sorted({key for model in everything for key in unread(model)}) == []


def test_what_answers_at_once_does_so_without_torch_and_numpy(tmp_path: Path, tiny_model: Path) -> None:
    write(tmp_path, settings(tmp_path, tiny_model))
    wrong = ["train", str(tmp_path / "config.yaml"), "algorithm.group_sise=4"]
    light = (["--help"], ["train", "--help"], ["explain"], ["explain", "algorithm.clip_low"], ["schema"])
    for arguments, code in (*((command, 0) for command in light), (wrong, 2)):
        program = (
            f"import sys; sys.argv = ['treadle', *{arguments!r}]\n"
            "from treadle.cli import main\n"
            "try:\n    main()\n"
            "except SystemExit as end:\n"
            "    heavy = {'torch', 'ray', 'transformers', 'pyarrow', 'matplotlib', 'numpy'} & set(sys.modules)\n"
            f"    sys.exit(f'imports {{heavy}}' if heavy else end.code != {code})\n"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_configuration_error_names_the_key_and_exits_with_2(tmp_path: Path, tiny_model: Path) -> None:
    path = write(tmp_path, settings(tmp_path, tiny_model))
    code, out, err = finish("train", path, "algorithm.group_sise=4", "steps=0")
    assert (code, out) == (2, "")
    assert "algorithm.group_size" in err
    assert "steps: 0" in err
    assert "Traceback" not in err
    code, _, err = finish("train", tmp_path / "nowhere.yaml")
    assert code == 2
    assert "nowhere.yaml" in err


@pytest.mark.slow
def test_train_eval_and_inspect(tmp_path: Path, tiny_model: Path) -> None:
    config = settings(tmp_path, tiny_model, evaluation={"samples": 2})
    config["data"]["evaluation"] = config["data"]["train"]
    path, run = write(tmp_path, config), tmp_path / "run"
    code, out, err = finish("train", path)
    assert code == 0, err
    assert "step 3/3" in out
    assert "before" in out
    assert f"treadle inspect {run}" in " ".join(out.split())
    begin = time.monotonic()
    code, again, err = finish("train", path)
    assert code == 0, err
    assert "has done its 3 steps" in err  # there is nothing left to do
    assert "step" not in again.split("held-out")[0]
    assert time.monotonic() - begin < 30
    code, out, _ = finish("eval", run, "evaluation.samples=1")
    assert code == 0
    assert "evaluation/greedy" in out
    code, out, _ = finish("inspect", run, "--limit", "1")
    assert code == 0
    assert "trained 24" in out
    code, out, _ = finish("inspect", run, "--evaluation", "--step", "0", "--limit", "1")
    assert code == 0
    assert "evaluation/0/sampled/0.0  evaluated" in out
    code, _, err = finish("eval", tiny_model)
    assert code == 2
    assert "--config" in err
    code, _, err = finish("inspect", tmp_path)
    assert code == 1
    assert "not a run" in err


@pytest.mark.slow
def test_a_module_of_the_current_directory_is_found(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(trajectory):\n    return len(set(trajectory.response)) / 8\n")
    path = write(tmp_path, settings(tmp_path, tiny_model, steps=1, reward="mine:reward"))
    done = subprocess.run(
        [sys.executable, "-m", "treadle", "train", str(path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
