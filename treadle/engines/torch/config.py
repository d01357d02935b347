"""Configuration of the torch training engine."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Lt

import treadle.config
from treadle.config import key

Decay = Annotated[float, Ge(0), Lt(1)]


class Config(treadle.config.Config):
    """One optimizer, AdamW; one precision rule: bfloat16 weights compute, float32 masters in the optimizer learn."""

    name: Literal["torch"] = key("training engine, a module of treadle.engines", default="torch")
    dtype: Literal["auto", "bfloat16", "float32"] = key(
        "precision of the weights that compute; auto: bfloat16 where the hardware multiplies it fast", default="auto"
    )
    learning_rate: float = key("peak learning rate", default=1e-6, ge=0, le=1e3)
    schedule: Literal["constant", "linear", "cosine"] = key(
        "what the learning rate does after the warm-up: stay, or fall to 0 over the run", default="constant"
    )
    warmup_steps: int = key("optimizer steps over which the learning rate rises", default=0, ge=0, le=2**31)
    weight_decay: float = key("AdamW weight decay; never on norms and biases", default=0.0, ge=0, le=1e3)
    betas: tuple[Decay, Decay] = key(
        "AdamW decay rates of the mean gradient and the mean squared gradient", default=(0.9, 0.999)
    )
    epsilon: float = key("AdamW epsilon", default=1e-8, gt=0, le=1e3)
    max_grad_norm: float = key("clip the gradient to this global norm; 0: off", default=1.0, ge=0, le=1e9)
    max_skipped_steps: int = key(
        "steps in a row with a non-finite gradient before the run stops", default=3, ge=1, le=2**31
    )
    microbatch_tokens: int = key("tokens of one forward and backward pass", default=2048, ge=1, le=2**31)
    activation_checkpointing: bool = key("recompute layers in the backward pass to save memory", default=False)
    shard_ranks: int | None = key(
        "ranks that share one copy of the weights, which other such groups repeat; it divides the ranks of the role; "
        "null: all of them",
        default=None,
        ge=1,
        le=1 << 16,
    )
    cpu_offload: bool = key(
        "parameters, gradients and optimizer of sharded weights in host memory; a layer is fetched as it computes",
        default=False,
    )
    head_chunk: int = key("rows of logits that exist at a time", default=1024, ge=1, le=2**31)
