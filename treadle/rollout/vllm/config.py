"""Configuration of the vLLM rollout engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from treadle.config import key
from treadle.rollout.config import RolloutConfig

OURS = {
    "model": "model",
    "dtype": "trainer.dtype",
    "seed": "seed",
    "tokenizer": "model",
    "logprobs_mode": "nothing: log-probs are those of the distribution sampled from",
    "max_num_seqs": "rollout.max_sequences",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "data_parallel_size": "rollout.data_parallel",
    "pipeline_parallel_size": "nothing: a weight is read back where its layer is; use tensor_parallel",
    "enable_expert_parallel": "rollout.expert_parallel",
    "kv_cache_memory_bytes": "rollout.kv_cache_gb",
    "worker_extension_cls": "nothing: weights arrive by treadle's own",
    "scheduling_policy": "nothing: evaluation goes first",
    "skip_tokenizer_init": "nothing: token ids go in and out",
}
"""Arguments of vLLM that are not for `engine_args`, and what sets them."""


class Config(RolloutConfig):
    """Generation by vLLM, each replica an engine in a process of its own."""

    name: Literal["vllm"] = key("rollout engine, a module of treadle.rollout", default="vllm")
    replicas: int = key("engines; requests are spread over them", default=1, ge=1, le=4096)
    tensor_parallel: int = key("devices over which one engine splits each layer", default=1, ge=1, le=1024)
    data_parallel: int = key(
        "copies of the attention layers inside one engine, for mixtures of experts; else use replicas",
        default=1,
        ge=1,
        le=1024,
    )
    expert_parallel: bool = key("spread the experts of a mixture over all devices of an engine", default=False)
    kv_cache_gb: float | None = key(
        "memory for keys and values of one engine, in GiB; null: 1 on a CPU, what is free on a GPU",
        default=None,
        gt=0,
        le=1 << 16,
    )
    threads: int | None = key(
        "CPU threads of one engine; null: the cores, divided among the replicas", default=None, ge=1
    )
    restarts: int = key("engines that are started in place of dead ones, in the whole run", default=3, ge=0, le=1 << 20)
    engine_args: dict[str, Any] = key("anything else for vLLM's engine, by its own names; vLLM checks them", default={})

    @property
    def engines(self) -> int:
        return self.replicas

    @model_validator(mode="after")
    def _not_ours(self) -> Config:
        for name in self.engine_args:
            if name in OURS:
                raise ValueError(f"engine_args.{name} is not vLLM's to choose here; set by {OURS[name]}")
        return self
