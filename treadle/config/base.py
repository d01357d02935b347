"""`Config`: strict, frozen, documented key by key. A configuration model lives beside what it configures."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Base of all configuration models: unknown keys and wrong types are errors, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


def key(meaning: str, *, default: Any = ..., **constraints: Any) -> Any:
    """One configuration key: what it means, its default (none: required), its range (`ge=`, `gt=`, `le=`, …)."""
    if callable(default):
        return Field(default_factory=default, description=meaning, **constraints)
    return Field(default, description=meaning, **constraints)
