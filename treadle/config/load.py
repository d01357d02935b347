"""From a YAML file and `key.sub=value` overrides to a typed configuration, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from treadle.config.base import Config
from treadle.config.messages import in_words
from treadle.config.yaml_text import from_file, from_text, to_text
from treadle.errors import ConfigError

C = TypeVar("C", bound=Config)


def load(root: type[C], path: Path | None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> C:
    """`base`, the file over it, the overrides over both, checked against `root`.

    An override's value is YAML: `data.evaluation=null`, `stop=[a, b]`, `reward.functions={my.module:fn: 0.5}`.
    Raises ConfigError that lists every mistake with its dotted key, what is allowed and the nearest valid key.
    """
    data = dict(base or {})
    if path is not None:
        data = _merged(data, from_file(path))
    for override in overrides:
        _override(data, override)
    models: dict[int, type[Config]] = {}
    try:
        return root.model_validate(data, context=models)
    except ValidationError as error:
        raise ConfigError(in_words(error, data, models)) from None


def dump(config: Config) -> str:
    """The resolved configuration as YAML, every key in place; `load` reads it back equal."""
    return to_text(plain(config))


def plain(value: Any) -> Any:
    """A configuration as mappings, lists and scalars."""
    if isinstance(value, Config):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def leaves(config: Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every key that holds a value rather than a section: its dotted name, value and meaning."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, field.description or ""


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, section by section."""
    whole = dict(below)
    for name, value in above.items():
        under = whole.get(name)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            value = _merged(under, value)
        whole[name] = value
    return whole


def _override(data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{override!r} is not an override; write key=value, e.g. algorithm.group_size=8")
    value = from_text(text, f"override {dotted}")
    section = data
    for depth, part in enumerate(parts[:-1], 1):
        inside = section.get(part)
        if inside is not None and not isinstance(inside, Mapping):
            where = ".".join(parts[:depth])
            if isinstance(inside, list | tuple):
                raise ConfigError(f"{dotted}: {where} is a list; give the whole list, {where}=[…]")
            if isinstance(inside, Config):
                raise ConfigError(f"{dotted}: {where} was given from Python as an object; change it there")
            raise ConfigError(f"{dotted}: {where} is {inside!r}, not a section; give the whole, {where}={{…}}")
        section[part] = dict(inside or {})  # a copy: an alias may show the same mapping elsewhere
        section = section[part]
    section[parts[-1]] = value
