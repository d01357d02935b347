"""Configuration of the embedded rollout engine."""

from __future__ import annotations

from typing import Literal

from treadle.config import key
from treadle.rollout.config import RolloutConfig


class Config(RolloutConfig):
    """Generation in process, over the Hugging Face model itself."""

    name: Literal["embedded"] = key("rollout engine, a module of treadle.rollout", default="embedded")
    kernels: Literal["auto", "torch", "native"] = key(
        "what computes a decode step: plain torch, the compiled kernels (`make native`), or these where they are built",
        default="auto",
    )
