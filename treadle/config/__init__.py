"""Typed configuration: models, loading with overrides, errors that name the nearest valid key."""

from treadle.config.base import Config, key, key_of
from treadle.config.load import dump, leaves, load, plain
from treadle.config.plugins import check_name, config_class, name_schema, plugin, plugin_class, resolve

__all__ = [
    "Config",
    "check_name",
    "config_class",
    "dump",
    "key",
    "key_of",
    "leaves",
    "load",
    "name_schema",
    "plain",
    "plugin",
    "plugin_class",
    "resolve",
]
