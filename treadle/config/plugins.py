"""Things chosen by name: a bare name is a module of ours, `my.module:Class` is an import. There is no registry.

    class Settings(Config):
        algorithm: Annotated[AlgorithmConfig, plugin("treadle.algorithms", default="grpo")] = key("…", default={})

reads `algorithm: {name: ppo, gamma: 0.99}`: the name finds the class, the class's `Config` reads the other keys.
A bare name's module holds one class with a line `Config = …` (or, where that class is heavy, a `Config` of its own).
Where such classes are halves of a whole (`Joined`), `gspo+rloo` names a whole made of two.
"""

from __future__ import annotations

import difflib
import importlib
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from treadle.config.base import Config
from treadle.config.messages import NAME_ERROR
from treadle.errors import ConfigError, TreadleError

PLUGIN = "plugin"
"""Key that stands in a JSON Schema for what a plug-in's section may be."""

_OFFERS_CONFIG = r"^class Config\(|^    Config = |^from treadle\.(?!config\b)\S+ import .*\bConfig\b"
OWN_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"
"""Regular expression of `my.module:Name`."""

_DOTTED = re.compile(OWN_NAME)


class Choice(NamedTuple):
    """What a name of ours brings."""

    models: tuple[type[Config], ...]
    """Its model; of two halves those of both, the one first whose own defaults count."""
    own: type[Config]
    """The model of the class that bears the name."""
    kind: str = ""
    """What half of a whole bears the name, as `halves` has it (the other is the usual one); "whole"; else empty."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """Annotates a field whose model is chosen by its key `name`; an instance given from Python is taken as it is."""

    folder: str
    default: str | None = None

    def choices(self) -> Mapping[str, Choice]:
        """What each of ours brings, the default first."""
        return _choices(self)

    @property
    def joins(self) -> bool:
        """Whether two of ours may be joined."""
        return any(choice.kind for choice in self.choices().values())

    def _choose(self, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        name = value.get("name", self.default)
        try:
            if not isinstance(name, str):
                raise ConfigError(f"missing or not text. {_there_are(available(self.folder, _OFFERS_CONFIG))}")
            model = config_class(name, self.folder)
        except ConfigError as error:
            raise PydanticCustomError(NAME_ERROR, "{text}", {"text": str(error)}) from error
        if info.context is not None:
            info.context[id(value)] = model
        try:
            return model.model_validate({**value, "name": name}, context=info.context)
        except ConfigError as error:  # becomes one line among the other mistakes
            raise ValueError(str(error)) from error

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._choose, handler(source))

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        return {PLUGIN: self}  # `treadle.config.schema` puts its models in place: they may hold plug-ins, too


@cache  # asked of every key, and each answer reads the folder
def _choices(plugin: Plugin) -> Mapping[str, Choice]:
    names = sorted(available(plugin.folder, _OFFERS_CONFIG), key=lambda name: name != plugin.default)
    return {name: _choice(_imported(f"{plugin.folder}.{name}"), name) for name in names}


def _choice(module: ModuleType, name: str) -> Choice:
    thing = module if "Config" in vars(module) else _only_class(module)
    if not (isinstance(thing, type) and issubclass(thing, Joined)):
        model = _config_of(thing, name)
        return Choice((model,), model)
    halves = {} if (whole := thing.joined()) is thing else whole.halves
    kind = next((kind for kind, half in halves.items() if half is thing), "whole")
    models = tuple(_config_of(half, name) for half in (halves.values() or [thing]))
    return Choice(models, _config_of(thing, name), kind)


def name_schema(folder: str, offers: str = _OFFERS_CONFIG) -> dict[str, Any]:
    """JSON Schema of a name: one of ours, or `my.module:Name`."""
    return {"anyOf": [{"enum": list(available(folder, offers))}, {"type": "string", "pattern": f"^{OWN_NAME}$"}]}


def plugin(folder: str, default: str | None = None) -> Plugin:
    """`algorithm: Annotated[AlgorithmConfig, plugin("treadle.algorithms", default="grpo")]`."""
    return Plugin(folder, default)


class Joined:
    """Base of classes that may be halves of a whole."""

    halves: ClassVar[Mapping[str, type[Joined]]] = {}
    """What a whole was joined of, by what is said of each; the half first whose own defaults count."""

    @classmethod
    def joined(cls, *others: type[Joined]) -> type[Joined]:
        """The whole made of these, and of what is missing; itself if it is whole. Raises ConfigError for what does not
        go together."""
        raise NotImplementedError


def config_class(name: str, folder: str) -> type[Config]:
    """The model that reads the section of the plug-in `name`. Raises ConfigError, too, where it cannot be built."""
    thing = None if "+" in name else resolve(name, folder, _OFFERS_CONFIG)
    # A module may have a `Config` of its own, so that the class, which is heavy, is not needed.
    own = isinstance(thing, ModuleType) and "Config" in vars(thing)
    model = _config_of(thing if own else plugin_class(name, folder), name)
    try:
        model.model_rebuild()
    except Exception as error:  # an annotation that is no type, a bound that does not fit
        reason = traceback.format_exception_only(error)[-1].partition("\n")[0]
        raise ConfigError(f"{name}: {model.__qualname__} is no configuration: {reason}") from error
    return model


def _config_of(thing: Any, name: str) -> type[Config]:
    model = getattr(thing, "Config", None)  # may be inherited
    if not (isinstance(model, type) and issubclass(model, Config)):
        raise ConfigError(f"{name} has no `Config` that is a treadle.config.Config, so it cannot be configured here")
    return model


def plugin_class(name: str, folder: str) -> Any:
    """The class itself: what `my.module:Class` names, or the one class of our module that has a `Config`; the whole of
    which these are halves."""
    parts = [part.strip() for part in name.split("+")]
    if not all(parts):
        raise ConfigError(f"{name!r}: there is a name missing beside a +; join two halves, e.g. gspo+rloo")
    things = [part_class(part, folder) for part in parts]
    halves = [thing for thing in things if isinstance(thing, type) and issubclass(thing, Joined)]
    if len(halves) == len(things):
        return halves[0].joined(*halves[1:])
    if len(parts) > 1:
        wrong = next(part for part, thing in zip(parts, things, strict=True) if thing not in halves)
        raise ConfigError(f"{wrong} cannot be joined by +: it is no half of what {folder} holds; give one name")
    return things[0]


def part_class(name: str, folder: str) -> Any:
    """The class that a name without + stands for, a half though it may be."""
    thing = resolve(name, folder, _OFFERS_CONFIG)
    return _only_class(thing) if isinstance(thing, ModuleType) else thing


def resolve(name: str, folder: str, offers: str) -> Any:
    """A bare name: the module `folder.name`. `my.module:attribute`: that attribute.

    `offers` is a regular expression for the line by which a module of the folder shows that it is meant to be chosen
    (helpers live beside it). Raises ConfigError with the names there are, or with the reason of a failed import.
    """
    if ":" not in name:
        check_name(name, folder, offers)
        return _imported(f"{folder}.{name}")
    if not _DOTTED.fullmatch(name):
        raise ConfigError(f"{name!r} is not of the form my.module:Name")
    module_name, _, path = name.partition(":")
    thing: Any = _imported(module_name)
    for part in path.split("."):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            near = difflib.get_close_matches(part, [n for n in dir(thing) if not n.startswith("_")], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{name}: {module_name} has no {part!r}{hint}") from None
        except Exception as error:  # a module that imports what it offers only now
            raise ConfigError(_failed(name, error)) from error
    return thing


def check_name(name: str, folder: str, offers: str) -> None:
    """Raises ConfigError unless a module of the folder bears this bare name. Does not import it."""
    names = available(folder, offers)
    if name in names:
        return
    module, dot, attribute = name.rpartition(".")
    if dot and _DOTTED.fullmatch(f"{module}:{attribute}"):
        raise ConfigError(f"there is no {name!r} in {folder}; did you mean {module}:{attribute} (a colon)?")
    raise ConfigError(f"there is no {name!r} in {folder}: {_there_are(names, name)}")


@cache  # the folder is ours, and asked about for every name
def available(folder: str, offers: str) -> Sequence[str]:
    """Names of the modules in a folder of ours that have a line which matches; nothing is imported but the folder."""
    wanted = re.compile(offers, re.MULTILINE)
    root = Path(next(iter(importlib.import_module(folder).__path__)))
    files = {path.stem: path for path in root.glob("[a-z]*.py")}
    files |= {path.parent.name: path for path in root.glob("[a-z]*/__init__.py")}
    return tuple(sorted(name for name, path in files.items() if wanted.search(path.read_text(encoding="utf-8"))))


def _there_are(names: Sequence[str], given: str = "") -> str:
    near = difflib.get_close_matches(given, names, 1)
    return (f"did you mean {near[0]}? " if near else "") + f"There are {', '.join(names)}, or your own my.module:Name"


def _only_class(module: ModuleType) -> type:
    classes = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and thing.__module__.startswith(module.__name__) and "Config" in vars(thing)
    ]
    if len(classes) != 1:
        raise ConfigError(f"{module.__name__} must hold exactly one class with a `Config`, it holds {len(classes)}")
    return classes[0]


def _imported(module: str) -> ModuleType:
    """Import a module, ours or the user's. Whatever its top level raises becomes a ConfigError that says where."""
    try:
        return importlib.import_module(module)
    except TreadleError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            hint = "; a module is named without .py" if module.endswith(".py") else ""
            raise ConfigError(
                f"no module named {error.name!r} (looked for in the current directory and the installed packages){hint}"
            ) from error
        raise ConfigError(_failed(module, error)) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_failed(module, error)) from error


def _failed(module: str, error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename}:{place.lineno}"
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    reason = traceback.format_exception_only(error)[-1].strip()  # even of one that cannot be made text
    return f"{module} cannot be imported: {reason} (at {where})"
