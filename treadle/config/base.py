"""`Config`: strict, frozen, documented key by key. A configuration model lives beside what it configures."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator


class Config(BaseModel):
    """Base of all configuration models: unknown keys and wrong types are errors, values cannot change.

    A rule between keys is a `@model_validator(mode="after")` that raises `ValueError` and names the keys.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, data: Any, info: ValidationInfo) -> Any:
        """YAML has no tuples and no paths: take lists and strings for them. Everything else stays strict.

        The context, if there is one, learns which model read this mapping: error messages ask it for the valid keys.
        """
        if not isinstance(data, dict):
            return data
        if info.context is not None:
            info.context[id(data)] = cls
        fields = cls.model_fields
        return {k: _adapted(fields[k].annotation, v) if k in fields else v for k, v in data.items()}


def key(meaning: str, *, default: Any = ..., **constraints: Any) -> Any:
    """One configuration key: what it means, its default (none: required), its range (`ge=`, `gt=`, `le=`, …)."""
    if callable(default):
        return Field(default_factory=default, description=meaning, **constraints)
    return Field(default, description=meaning, **constraints)


def _adapted(annotation: Any, value: Any) -> Any:
    """`value` as a tuple or path, if that is what the annotation (or a branch of its union) asks for."""
    branches = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if isinstance(value, list) and any(get_origin(b) is tuple for b in branches):
        return tuple(value)
    if isinstance(value, str) and Path in branches:
        return Path(value)
    return value
