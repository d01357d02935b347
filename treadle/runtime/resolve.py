"""What was given from anywhere (a file, the command line, Python objects) as one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from treadle.algorithms.base import Algorithm, AlgorithmConfig, Role
from treadle.config import plain as plain_config
from treadle.errors import ConfigError
from treadle.handles import RewardFunction
from treadle.recipes.config import RLConfig, load_config
from treadle.rewards.scorer import function_name

Settings = RLConfig | Mapping[str, Any] | str | Path


def resolve(
    config: Settings, overrides: Sequence[str], algorithm: Algorithm | None, reward: RewardFunction | None
) -> RLConfig:
    """The whole configuration, in which what was given from Python has its name and its place."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides is a list of texts, as [{overrides!r}]")
    functions = {} if reward is None else {"functions": {_name_of(reward): 1.0}}
    path = Path(config) if isinstance(config, str | Path) else None
    base: dict[str, Any] = {}
    if isinstance(config, RLConfig):
        base = plain_config(config)
    elif isinstance(config, Mapping):
        base = dict(config)
    if functions and isinstance(base.get("reward", {}), Mapping):
        base["reward"] = functions | base.get("reward", {})
    resolved = load_config(path, overrides, base)
    sections = {name: getattr(resolved, name) for name in RLConfig.model_fields}
    sections["reward"] = resolved.reward.model_copy(update=functions)
    if algorithm is not None:
        sections["algorithm"] = _named(algorithm, overrides)
    return load_config(None, base=sections)  # the rules between sections once more


def _name_of(reward: RewardFunction) -> str:
    if not callable(reward):
        raise ConfigError(f"reward={reward!r:.80} is not a function; name one in the configuration, or give a callable")
    return function_name(reward)


def _named(algorithm: Algorithm, overrides: Sequence[str]) -> AlgorithmConfig:
    """The configuration of an algorithm given from Python, under the class's name."""
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm={algorithm!r:.80} is not an Algorithm; give an instance, as MyAlgorithm()")
    if not isinstance(vars(algorithm).get("config"), AlgorithmConfig):
        raise ConfigError(f"{type(algorithm).__name__}.__init__ must call super().__init__(config)")
    kind = type(algorithm)
    if kind.joined() is not kind:
        raise ConfigError(
            f"{kind.__qualname__} is half an algorithm; give {kind.__qualname__}.joined()(), with a usual other half, "
            f"or {kind.__qualname__}.joined(OtherHalf)()"
        )
    if any(override.startswith("algorithm.") for override in overrides):
        raise ConfigError("algorithm was given from Python as an object; change its configuration there")
    unknown = (algorithm.uses | algorithm.before_advantages | algorithm.before_loss) - set(get_args(Role))
    missing = (algorithm.before_advantages | algorithm.before_loss) - algorithm.uses - {"policy"}
    if unknown or missing:
        raise ConfigError(
            f"{type(algorithm).__name__}: no roles are {sorted(unknown)}, and {sorted(missing)} are looked at but not "
            f"in `uses`; allowed: {', '.join(get_args(Role))}"
        )
    # A joined class is known by its halves.
    name = algorithm.config.name if "halves" in vars(kind) else f"{kind.__module__}:{kind.__qualname__}"
    return algorithm.config.model_copy(update={"name": name})
