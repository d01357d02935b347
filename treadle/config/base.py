"""`Config`: strict, frozen, documented key by key. A configuration model lives beside what it configures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

_UNFIT = re.compile(r"[\0\ud800-\udfff]")


class Config(BaseModel):
    """Base of all configuration models: unknown keys and wrong types are errors, values cannot change.

    A rule between keys is a `@model_validator(mode="after")` that raises `ValueError` and names the keys.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False, defer_build=True
    )

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

    @field_validator("*")
    @classmethod
    def _plain_text(cls, value: Any) -> Any:
        """No text, path or name holds what a file name cannot (null) or UTF-8 cannot (half a surrogate pair)."""
        for text in _texts(value):
            if _UNFIT.search(text):
                raise ValueError(f"{text!r:.80} is not allowed; give UTF-8 text without null characters")
        return value


def key(meaning: str, *, default: Any = ..., **constraints: Any) -> Any:
    """One configuration key: what it means, its default (none: required), its range (`ge=`, `gt=`, `le=`, …)."""
    if callable(default):
        return Field(default_factory=default, description=meaning, **constraints)
    return Field(default, description=meaning, **constraints)


def key_of(model: type[BaseModel], name: str, *, default: Any) -> Any:
    """The key that `model` has by this name, its meaning and range included, with another default."""
    field = copy(model.model_fields[name])
    field.default, field.default_factory = default, None
    return field


def _texts(value: Any) -> Iterator[str]:
    """All text in a key's value; sections check their own."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])


def _adapted(annotation: Any, value: Any) -> Any:
    """`value` as a tuple or path, if that is what the annotation (or a branch of its union) asks for."""
    branches = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if isinstance(value, list) and any(get_origin(b) is tuple for b in branches):
        return tuple(value)
    if isinstance(value, str) and Path in branches:
        return Path(value)
    return value
