"""Making a whole algorithm of two halves: an estimator's `advantages` and an objective's `surrogate`."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

from pydantic import create_model

from treadle.config.base import Config, key_of
from treadle.config.plugins import part_class
from treadle.errors import ConfigError

_UNITED = ("uses", "needs", "before_advantages", "observes", "before_loss")
HALVES = {"surrogate": "what an advantage does to the policy", "advantages": "what the advantages are"}


@cache  # one class for one name, however often it is asked for
def join(classes: tuple[type[Any], ...], base: type[Any]) -> type[Any]:
    """The class made of these and, where a half is missing, of the first one's `partner`; itself if it is whole.

    Raises ConfigError where two define the same half, or one is of another kind.
    """
    found: dict[str, type[Any]] = {}
    for cls in classes:
        halves = [half for half in HALVES if issubclass(cls, base) and getattr(cls, half) is not getattr(base, half)]
        if not halves:
            what = "defines neither advantages nor surrogate" if issubclass(cls, base) else "is no half of an algorithm"
            raise ConfigError(
                f"{cls.__qualname__} {what}; allowed are subclasses of Estimator that define advantages and "
                "of Objective that define surrogate (treadle.algorithms.policy_gradient)"
            )
        for half in halves:
            if half in found:
                one, two = found[half].__qualname__, cls.__qualname__
                raise ConfigError(f"{one} and {two} both say {HALVES[half]}; name one of them")
            found[half] = cls
    for half in HALVES:
        if half not in found:
            found[half] = _partner(classes[0], half)
    objective, estimator = found["surrogate"], found["advantages"]
    if objective is estimator:
        return objective
    name = "+".join(cls.__qualname__ for cls in (objective, estimator))
    own = {
        "Config": _Config(classes, objective, estimator),
        "halves": {"objective": objective, "estimator": estimator},
        "metrics": tuple(dict.fromkeys((*objective.metrics, *estimator.metrics))),
        **{name: getattr(objective, name) | getattr(estimator, name) for name in _UNITED},
        "skips_no_signal": objective.skips_no_signal and estimator.skips_no_signal,
        "two_pass": objective.two_pass or estimator.two_pass,
        "__module__": __name__,
    }
    return type(name, (objective, estimator), own)


def _partner(cls: type[Any], half: str) -> type[Any]:
    if not cls.partner:
        raise ConfigError(
            f"{cls.__qualname__} does not say {HALVES[half]}: derive it from Estimator or Objective "
            "(treadle.algorithms.policy_gradient), which have a usual other half"
        )
    return part_class(cls.partner, "treadle.algorithms")


class _Config:
    """The class attribute `Config` of a joined class, made when it is asked for: it takes time, and whoever only looks
    which keys there are looks at the halves."""

    def __init__(self, asked: tuple[type[Any], ...], objective: type[Any], estimator: type[Any]) -> None:
        self._parts = asked, objective, estimator

    @cached_property
    def _model(self) -> type[Config]:
        return _config(*self._parts)

    def __get__(self, instance: object, owner: type[Any]) -> type[Config]:
        return self._model


def _config(asked: tuple[type[Any], ...], objective: type[Any], estimator: type[Any]) -> type[Config]:
    """The keys of both, under the name of what was asked for. pydantic takes every default from the first base,
    inherited ones too; here, as elsewhere in Python, what a class says itself goes before what another inherits."""
    bases: tuple[type[Any], ...] = (objective.Config, estimator.Config)
    bases = tuple(
        base for base in dict.fromkeys(bases) if not any(o is not base and issubclass(o, base) for o in bases)
    )
    for field in set.intersection(*({*base.model_fields} for base in bases)):
        kinds = {repr(base.model_fields[field].annotation) for base in bases}
        if len(kinds) > 1:
            raise ConfigError(
                f"{objective.__qualname__} and {estimator.__qualname__} both have a key {field!r}, of different types "
                f"({', '.join(sorted(kinds))}); rename one of them"
            )
    order = type("Order", bases, {}).__mro__
    fields: dict[str, Any] = {
        field: (base.model_fields[field].annotation, base.model_fields[field])
        for base in reversed(order)
        if issubclass(base, Config)
        for field in vars(base).get("__annotations__", {})
        if field in base.model_fields
    }
    name = "+".join(_name(cls) for cls in asked)
    fields["name"] = (str, key_of(objective.Config, "name", default=name))
    return create_model(
        f"{objective.__qualname__}+{estimator.__qualname__}Config", __base__=bases, __module__=__name__, **fields
    )  # pyright: ignore


def _name(cls: type[Any]) -> str:
    """What a configuration calls a class."""
    ours = cls.__module__.startswith("treadle.algorithms.") and "Config" in vars(cls)
    return cls.Config.model_fields["name"].default if ours else f"{cls.__module__}:{cls.__qualname__}"
