"""Which kernels a model is decoded with."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch

from treadle.errors import ConfigError
from treadle.native import library
from treadle.rollout.embedded.kernels import Kernels
from treadle.rollout.embedded.native import TYPES, NativeKernels
from treadle.rollout.embedded.plain import PlainKernels

logger = logging.getLogger(__name__)


def choose(kernels: Literal["auto", "torch", "native"], model: Any) -> Kernels:
    """Raises `ConfigError` where native kernels are asked for and cannot be had."""
    dtype: torch.dtype = model.dtype
    device: torch.device = model.device
    possible = device.type == "cpu" and dtype in TYPES
    if kernels == "native" and not possible:
        raise ConfigError(
            f"rollout.kernels=native needs a float32 or bfloat16 model on a CPU, not {dtype} on {device}; use auto"
        )
    if kernels == "native" or (kernels == "auto" and possible and library.built()):
        return NativeKernels(dtype)
    if kernels == "auto" and possible:
        logger.info("decoding with plain torch; `make native` compiles faster kernels")
    return PlainKernels(dtype, device)
