"""Configuration of the embedded rollout engine."""

from __future__ import annotations

from typing import Literal

from treadle.config import Config as Base
from treadle.config import key


class Config(Base):
    """Generation in process, over the Hugging Face model itself."""

    name: Literal["embedded"] = key("rollout engine, a module of treadle.rollout", default="embedded")
    max_sequences: int = key("sequences decoded together; more requests wait", default=64, ge=1, le=1 << 16)
    kernels: Literal["auto", "torch", "native"] = key(
        "what computes a decode step: plain torch, the compiled kernels (`make native`), or these where they are built",
        default="auto",
    )
