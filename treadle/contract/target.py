"""Which algorithm is checked, and with which configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from treadle.algorithms.base import Algorithm, AlgorithmConfig
from treadle.config import Config, key
from treadle.config.load import load
from treadle.config.plugins import plugin, plugin_class


class Target(Config):
    algorithm: Annotated[AlgorithmConfig, plugin("treadle.algorithms", default="grpo")] = key("what is checked")


def algorithm_of(name: str, overrides: Sequence[str] = ()) -> Algorithm:
    """`gspo+rloo`, `my_module:MyAlgorithm`; overrides as `clip_high=0.3`. Raises ConfigError."""
    config = load(Target, None, [f"algorithm.name={name}", *(f"algorithm.{o}" for o in overrides)]).algorithm
    return plugin_class(name, "treadle.algorithms")(config)
