"""All keys that a configuration can have, those of whatever is chosen by name included: `algorithm.clip_low`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from treadle.config.base import Config
from treadle.config.load import plain
from treadle.config.plugins import Plugin
from treadle.errors import ConfigError


class Inside(NamedTuple):
    """A model that may stand below a key."""

    place: str  # "" is the value itself; "[]" an item of the list, ".*" of the mapping that it is
    models: tuple[type[Config], ...]  # several: the halves of a whole, the one first whose own defaults count
    choice: str | None = None  # the `name` that brings it
    plugin: Plugin | None = None  # who knows what other names there are


@dataclass(frozen=True, slots=True)
class Key:
    """One key of one model. Models chosen by name may each have one of the same path."""

    path: str  # "algorithm.clip_low"; "[]" and "*" stand for any item of a list or mapping
    owner: type[Config]
    choice: str | None = None  # the `name` of its section that brings it
    plugin: Plugin | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def field(self) -> FieldInfo:
        return self.owner.model_fields[self.name]

    @property
    def home(self) -> str | None:
        """The choice that brings the key: others have it of that one, by inheritance or as its half. None: all have it,
        or what they inherit it from cannot be chosen."""
        if self.plugin is None:
            return None
        bases = [base for base in self.owner.__mro__ if self.name in annotated(base)]
        module = bases[-1].__module__.removeprefix(f"{self.plugin.folder}.")
        return module if module in self.plugin.choices() else None

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        """As YAML has it. A section's is what its own keys say."""
        return plain(self.field.get_default(call_default_factory=True))

    @property
    def section(self) -> bool:
        return any(inside.place == "" for inside in self.inside())

    def inside(self) -> tuple[Inside, ...]:
        return _inside(self.owner, self.name)

    def below(self) -> Iterator[Key]:
        for inside in self.inside():
            yield from keys(inside, self.path)


def keys(inside: Inside, path: str = "") -> Iterator[Key]:
    """The keys of a model that stands below `path`."""
    for name, owner in owners(inside.models).items():
        yield Key(f"{path}{inside.place}.{name}".lstrip("."), owner, inside.choice, inside.plugin)


@cache
def owners(models: tuple[type[Config], ...]) -> Mapping[str, type[Config]]:
    """The keys that these models have together, and whose each is: what a half says itself goes before what another
    inherits, as in the class that is joined of them."""
    common = frozenset[type].intersection(*(frozenset(model.__mro__) for model in models))
    found = dict.fromkeys(models[0].model_fields, models[0])
    for model in reversed(models):
        own = {name for base in model.__mro__ if base not in common for name in annotated(base)}
        found |= {name: model for name in model.model_fields if len(models) == 1 or name in own}
    return found


def annotated(model: type) -> Mapping[str, Any]:
    """What a class itself annotates, without what it inherits."""
    return vars(model).get("__annotations__", {})


def tree(root: type[Config]) -> Iterator[Key]:
    """Every key, each section before what is in it. What may hold itself is not opened twice."""

    def walk(key: Key, above: frozenset[type[Config]]) -> Iterator[Key]:
        yield key
        owners = above | {key.owner}
        for inner in key.below():
            if inner.owner not in owners:
                yield from walk(inner, owners)

    for key in keys(Inside("", (root,))):
        yield from walk(key, frozenset())


def find(root: type[Config], path: str) -> list[Key]:
    """The keys that `path` may mean, one a model. "sources[0].path", "sources[].path" and "sources.path" are the same.

    Raises ConfigError, which names the nearest key, where there is none.
    """
    parts = re.sub(r"\[\w*\]", "", path).split(".")
    if found := list(_find(keys(Inside("", (root,))), parts)):
        return found
    known = list(dict.fromkeys(key.path for key in tree(root)))
    near = difflib.get_close_matches(path, known, 1, 0.8) or _alike(parts, known)
    hint = f"did you mean {near[0]}?" if near else "`treadle explain` lists all keys"
    raise ConfigError(f"{path}: there is no such key; {hint}")


def _find(among: Iterator[Key], parts: Sequence[str]) -> Iterator[Key]:
    name, *rest = parts
    for key in among:
        if key.name != name:
            continue
        if not rest or (len(rest) == 1 and get_origin(key.field.annotation) is dict):
            yield key
        for inside in key.inside() if rest else ():
            yield from _find(keys(inside, key.path), rest[1:] if inside.place == ".*" and rest[1:] else rest)


def _alike(parts: Sequence[str], known: Sequence[str]) -> list[str]:
    """Keys whose last part is, or nearly is, the last part asked for; those of a section that was right come first."""
    ends = {key.rpartition(".")[2] for key in known}
    names = difflib.get_close_matches(parts[-1], ends, 1) or difflib.get_close_matches(parts[-1], ends, 1, 0.5)
    section = ".".join(parts[:-1])
    return sorted((k for k in known if k.rpartition(".")[2] in names), key=lambda k: not k.startswith(section))


@cache
def _inside(model: type[Config], name: str) -> tuple[Inside, ...]:
    field = model.model_fields[name]
    return tuple(_models(field.annotation, field.metadata))


def _models(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[Inside]:
    origin, args = get_origin(annotation), [a for a in get_args(annotation) if a is not ...]
    chosen = next((m for m in metadata if isinstance(m, Plugin)), None)
    if chosen is not None:
        yield from (Inside("", choice.models, name, chosen) for name, choice in chosen.choices().items())
    elif origin is Annotated:
        yield from _models(args[0], args[1:])
    elif origin in (Union, UnionType):
        for branch in args:
            yield from _models(branch)
    elif origin in (tuple, list):
        for item in dict.fromkeys(args):
            yield from (inside._replace(place="[]" + inside.place) for inside in _models(item))
    elif origin is dict:
        yield from (inside._replace(place=".*" + inside.place) for inside in _models(args[1]))
    elif isinstance(annotation, type) and issubclass(annotation, Config):
        yield Inside("", (annotation,))
