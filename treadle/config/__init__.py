"""Typed configuration: models, loading with overrides, errors that name the nearest valid key."""

from treadle.config.base import Config, key

__all__ = ["Config", "key"]
