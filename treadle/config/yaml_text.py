"""YAML as people expect it: version 1.2's plain scalars (`1e-5` is a number; `no`, `on` and `12:30` are text), keys are
text and stand once, nothing but data can be built. What `to_text` writes, `from_text` reads back equal."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from treadle.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_WORD = re.compile("null|true|false", re.IGNORECASE)
_RESOLVERS = {
    None: [  # None: whatever the first character
        (_TAG + "null", re.compile(r"(~|null|Null|NULL|)\Z")),
        (_TAG + "bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")),
        (_TAG + "int", re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")),
        (_TAG + "float", re.compile(rf"({_FLOAT})\Z")),
        (_TAG + "merge", re.compile(r"<<\Z")),
    ]
}


def from_text(text: str, where: str) -> Any:
    """The value of one YAML document. Raises ConfigError, which names `where` and the line."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ": ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}{f':{mark.line + 1}' if mark else ''}: {reason}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{where}:{line}: the character {error.character!r} is not allowed in YAML") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None


def from_file(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping."""
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: the config file cannot be read: {reason}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text (byte 0x{raw[error.start]:02x}): save it as UTF-8") from None
    data = from_text(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}:1: a config is a mapping such as `seed: 1`, this is a {type(data).__name__}")
    return data


def to_text(data: Any) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def to_line(data: Any) -> str:
    """One line, as the value of an override."""
    if data is None or isinstance(data, bool):
        return str(data).lower().replace("none", "null")
    if isinstance(data, int | float) and math.isfinite(data):
        return repr(data)
    if isinstance(data, str) and data.isidentifier() and not _WORD.fullmatch(data):  # needs no quotes
        return data
    style = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": math.inf}
    return yaml.dump(data, Dumper=_Dumper, **style).removesuffix("\n").removesuffix("\n...")


# ---------------------------------------------------------------------- constructors: plain data, eagerly


def _mapping(loader: _Loader, node: Any) -> dict[Any, Any]:
    if isinstance(node, yaml.MappingNode):
        lines: dict[Any, int] = {}
        for name, _ in node.value:
            if name.tag == _TAG + "merge":
                continue
            if isinstance(name.value, str) and name.value in lines:
                problem = f"the key {name.value!r} stands twice, first in line {lines[name.value]}: remove one"
                raise ConstructorError(None, None, problem, name.start_mark)
            lines[str(name.value)] = name.start_mark.line + 1
        loader.flatten_mapping(node)
        for name, _ in node.value:
            if name.tag != _TAG + "str":
                raise ConstructorError(None, None, "a key must be text: put it in quotes", name.start_mark)
    return loader.construct_mapping(node, deep=True)


def _sequence(loader: _Loader, node: Any) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


def _null(loader: _Loader, node: Any) -> None:
    loader.construct_scalar(node)


def _bool(loader: _Loader, node: Any) -> bool:
    text = str(loader.construct_scalar(node)).lower()
    if text not in ("true", "false"):
        raise ConstructorError(None, None, f"{text!r} is neither true nor false", node.start_mark)
    return text == "true"


def _int(loader: _Loader, node: Any) -> int:
    text = str(loader.construct_scalar(node))
    try:
        return int(text, 0) if text.startswith(("0x", "0o")) else int(text)
    except ValueError:  # also Python's limit on digits
        raise ConstructorError(None, None, f"{text[:40]!r} is not a whole number", node.start_mark) from None


def _float(loader: _Loader, node: Any) -> float:
    text = str(loader.construct_scalar(node)).lower()
    named = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
    try:
        return named[text] if text in named else float(text)
    except ValueError:
        raise ConstructorError(None, None, f"{text[:40]!r} is not a number", node.start_mark) from None


def _str(loader: _Loader, node: Any) -> str:
    return str(loader.construct_scalar(node))


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS
    yaml_constructors = {  # noqa: RUF012 (how PyYAML spells it)
        _TAG + "null": _null,
        _TAG + "bool": _bool,
        _TAG + "int": _int,
        _TAG + "float": _float,
        _TAG + "str": _str,
        _TAG + "seq": _sequence,
        _TAG + "map": _mapping,
        None: yaml.SafeLoader.construct_undefined,
    }


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:
        return True
