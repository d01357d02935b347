"""What pydantic found, in words: the key, the value given, what is allowed, the nearest valid key."""

from __future__ import annotations

import dataclasses
import difflib
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from treadle.config.base import Config

NAME_ERROR = "plugin_name"
"""Type of the error about the `name` of a section that is chosen by name."""

Models = Mapping[int, type[Config]]
"""`id` of a raw mapping → the model that read it (filled by `Config` during validation)."""

_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    Path: "a path",
}
_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "min_length": "at least {} long"}
_BOUNDS |= {"max_length": "at most {} long", "multiple_of": "a multiple of {}"}


def in_words(error: ValidationError, data: Any, models: Models) -> str:
    """All mistakes, one a line. `data` is what was validated."""
    lines = dict.fromkeys(_line(e, data, models) for e in error.errors(include_url=False))
    text = "\n".join(lines) if len(lines) == 1 else f"{len(lines)} mistakes\n" + "\n".join(f"- {x}" for x in lines)
    return text.encode("utf-8", "backslashreplace").decode()  # what is no UTF-8 may stand in what is shown


def _line(error: Any, data: Any, models: Models) -> str:
    dotted, owner, name = _locate(error["loc"], data, models)
    field = owner.model_fields.get(name) if owner is not None else None
    if error["type"] == "extra_forbidden" and owner is not None:
        return f"{dotted}: there is no such key; {_nearest(dotted, list(owner.model_fields))}"
    if error["type"] == NAME_ERROR:
        return f"{dotted}.name: {error['msg']}"
    if error["type"] in ("value_error", "assertion_error"):
        text = str(error["ctx"]["error"])
        return text if not dotted or text.startswith(dotted) else f"{dotted}: {text}"
    if field is None:
        return f"{dotted or 'the config'}: {_shown(error['input'])}: {error['msg']}"
    meaning = f" ({field.description})" if field.description else ""
    wanted = allowed(field.annotation, field.metadata)
    if error["type"] == "missing" and error["loc"][-1] == name:
        return f"{dotted}: missing; give {wanted}{meaning}"
    return f"{dotted}: {_shown(error['input'])} is not allowed; give {wanted}{meaning}"


def _locate(loc: tuple[int | str, ...], data: Any, models: Models) -> tuple[str, type[Config] | None, str]:
    """The dotted key of an error, the model that owns it, and the key's name there.

    pydantic adds parts that are no keys (branches of a union, `[key]`): the walk over the data stops at them.
    """
    dotted, owner, name = "", None, ""
    for part in loc:
        if isinstance(data, Mapping):
            model = models.get(id(data))
            if part not in data and (model is None or part not in model.model_fields):
                break
            if model is not None:
                owner, name = model, str(part)
            dotted, data = f"{dotted}.{part}" if dotted else str(part), data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            dotted, data = f"{dotted}[{part}]", data[part]
        else:
            break
    return dotted, owner, name


def _nearest(dotted: str, names: list[str]) -> str:
    section, _, name = dotted.rpartition(".")
    near = difflib.get_close_matches(name, names, 1)
    if near:
        return f"did you mean {section + '.' if section else ''}{near[0]}?"
    return f"the keys {f'of {section} ' if section else ''}are {', '.join(names)}"


def allowed(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """A type and its bounds in words: `a whole number ≥ 1`."""
    origin, args = get_origin(annotation), get_args(annotation)
    bounds = [_BOUNDS[n].format(v) for m in metadata for n, v in _attributes(m) if n in _BOUNDS and v is not None]
    if origin is Annotated:
        words = allowed(args[0], args[1:])
    elif origin in (Union, UnionType):
        *most, last = [allowed(a, metadata if a is not NoneType else ()) for a in args]
        return " or ".join([*most, last])
    elif origin is Literal:
        words = "one of " + ", ".join(str(a) for a in args)
    elif origin in (tuple, list):
        inner = [allowed(a) for a in args if a is not ...]
        words = "a list: each " + inner[0] if len(set(inner)) == 1 else f"a list: {', then '.join(inner)}"
        if origin is tuple and args[-1] is not ...:
            words += f", {len(args)} of them"
    elif origin is dict:
        words = f"a mapping of names to {allowed(args[1])}"
    elif isinstance(annotation, type) and issubclass(annotation, Config):
        words = f"a section with the keys {', '.join(annotation.model_fields)}"
    else:
        words = _NAMES.get(annotation) or str(annotation)
    return f"{words}{', ' if origin in (tuple, list, dict) else ' '}{' and '.join(bounds)}" if bounds else words


def _attributes(constraint: Any) -> list[tuple[str, Any]]:
    """A constraint of annotated_types is a small dataclass: its name and bound."""
    if not dataclasses.is_dataclass(constraint):
        return []
    return [(f.name, getattr(constraint, f.name)) for f in dataclasses.fields(constraint)]


def _shown(value: Any) -> str:
    """A value as YAML spells it, shortened; containers only to a depth (aliases can make them huge)."""
    scalar = value is None or isinstance(value, bool | int | float | str)
    if isinstance(value, int) and value.bit_length() > 14_000:
        text = hex(value)  # Python refuses to spell so many decimal digits
    else:
        text = json.dumps(value, ensure_ascii=False) if scalar else reprlib.repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
