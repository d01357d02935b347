"""Prompts from a task family of the package reasoning-gym: problems without end, each with its verifier.

Score them with the reward `reasoning_gym`, or with `number` where the answer is one number.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any

from treadle.config import key
from treadle.data.source import Order, Row, RowSource, SourceConfig
from treadle.errors import ConfigError, DataError

if TYPE_CHECKING:
    from treadle.data.rendering import Renderer


class ReasoningGymConfig(SourceConfig):
    name: str = key("where prompts come from", default="reasoning_gym")
    family: str = key("task family, e.g. chain_sum")
    options: dict[str, Any] = key("the family's own options, e.g. {min_terms: 2, max_terms: 3}", default=dict)
    size: int = key("how many problems", default=1000, ge=1, le=1 << 30)
    seed: int = key("which problems: another seed gives others", default=0, ge=0, le=2**32 - 1)


class ReasoningGym(RowSource):
    Config = ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig, renderer: Renderer, order: Order) -> None:
        super().__init__(renderer, order)
        self._config = config
        self._problems = problems(config.family, config.options, config.size, config.seed)

    def __len__(self) -> int:
        return self._config.size

    @property
    def fingerprint(self) -> str:
        from importlib.metadata import version

        return f"reasoning-gym {version('reasoning-gym')}, {self._config!r}"

    def row(self, number: int) -> Row:
        config = self._config
        name = f"{config.family}/{config.seed}:{number}"
        try:
            entry = self._problems[number]
        except Exception as error:  # a family may raise anything over options that it did not check
            raise DataError(f"{name}: reasoning-gym failed to make this problem: {error!r}") from error
        metadata = {"family": config.family, "options": config.options, "entry": entry}
        return Row(name, entry["question"], entry["answer"], metadata)


def problems(family: str, options: dict[str, Any], size: int, seed: int) -> Any:
    """The family's data set. Raises ConfigError for an unknown family or option, or a value that it refuses."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError("the package reasoning-gym is missing: pip install 'treadle[tasks]'") from None
    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, 3) or sorted(DATASETS)
        raise ConfigError(f"reasoning-gym has no family {family!r}; there is {', '.join(near)}")
    known = {f.name for f in dataclasses.fields(DATASETS[family][1])} - {"size", "seed"}
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, 1) or sorted(known)
            raise ConfigError(f"reasoning-gym's {family} has no option {option!r}; there is {', '.join(near)}")
    try:
        return reasoning_gym.create_dataset(family, size=size, seed=seed, **options)
    except Exception as error:  # families check their options with assertions, comparisons, look-ups
        raise ConfigError(f"reasoning-gym's {family} refuses the options {options}: {error}") from error
