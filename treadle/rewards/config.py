"""Configuration keys of rewards."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, field_validator, model_validator

from treadle.config import Config, check_name, key, name_schema
from treadle.errors import ConfigError
from treadle.rewards.values import LIMIT

FOLDER = "treadle.rewards"
OFFERS = r"^(async )?def reward\(|^class ModelReward:"
MODEL = "model"
"""The name of what a reward model says; it is a role, and made where roles are."""


def _short_schema(schema: dict[str, Any]) -> None:
    """A JSON Schema of the section, to which the short form and the names of functions are added."""
    names = name_schema(FOLDER, OFFERS)
    schema["properties"]["functions"]["propertyNames"] = names
    schema |= {"type": ["object", "string"], "anyOf": [{"type": "object"}, *names["anyOf"]]}


class RewardConfig(Config):
    """Reward functions and their weights. `reward: number` is short for `reward: {functions: {number: 1.0}}`."""

    model_config = ConfigDict(json_schema_extra=_short_schema)

    functions: dict[str, float] = key(
        "weight of each reward function: a module of treadle.rewards, or my.module:function", min_length=1
    )
    timeout_s: float = key("time limit of one call of a function, seconds", default=30.0, gt=0, le=1e6)
    retries: int = key("further tries after a call that raised or hung", default=2, ge=0, le=100)
    workers: int = key("processes that call synchronous functions", default=2, ge=1, le=1024)
    max_failed: float = key("share of a step's samples that may fail before the run stops", default=0.1, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        return {"functions": {data: 1.0}} if isinstance(data, str) else data

    @field_validator("functions")
    @classmethod
    def _known(cls, functions: dict[str, float]) -> dict[str, float]:
        for name, weight in functions.items():
            if abs(weight) > LIMIT:
                raise ValueError(f"the weight of {name!r} is {weight:g}; allowed: -{LIMIT:g} to {LIMIT:g}")
            if ":" not in name:  # `my.module:function` is imported later, when all else is known to be right
                try:
                    check_name(name, FOLDER, OFFERS)
                except ConfigError as error:
                    raise ValueError(str(error)) from error
        return functions
