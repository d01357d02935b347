"""JSON Schema of one model: its keys with their types, bounds and defaults, as pydantic would give it, but without
building the model, which takes far longer. `tests/test_schema.py` compares the two for every model of ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import GetJsonSchemaHandler
from pydantic_core import core_schema, to_jsonable_python

from treadle.config.base import Config

Place = Callable[[type[Config]], str]
"""Where the schema of a model stands: `#/$defs/RunConfig`."""

_TYPES: Mapping[Any, Mapping[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    Path: {"type": "string", "format": "path"},
}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_LENGTHS = {
    "min_length": ("minLength", "minItems", "minProperties"),
    "max_length": ("maxLength", "maxItems", "maxProperties"),
}


def model_schema(keys: Mapping[str, type[Config]], place: Place, alone: type[Config] | None = None) -> dict[str, Any]:
    """Of a mapping with these keys, each of the model that has it. If one model is all of it, then with its docstring
    and what it adds by `json_schema_extra`."""
    fields = {name: owner.model_fields[name] for name, owner in keys.items()}
    properties = {}
    for name, field in fields.items():
        found = _schema(field.annotation, field.metadata, place)
        if not field.is_required() and field.default_factory is None:
            found = {"default": to_jsonable_python(field.default), **found}
        properties[name] = {**found, "description": field.description}
    whole: dict[str, Any] = {"additionalProperties": False, "properties": properties, "type": "object"}
    if required := [name for name, field in fields.items() if field.is_required()]:
        whole["required"] = required
    if alone is not None and (text := vars(alone).get("__doc__")):
        whole["description"] = inspect.cleandoc(text)
    if alone is not None and callable(change := alone.model_config.get("json_schema_extra")):
        change(whole)  # pyright: ignore[reportCallIssue]
    return whole


def _schema(annotation: Any, metadata: Sequence[Any], place: Place) -> dict[str, Any]:
    *inner, last = metadata or [None]
    if (own := getattr(last, "__get_pydantic_json_schema__", None)) is not None:
        return own(core_schema.any_schema(), _Inner(annotation, inner, place))
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _schema(args[0], [*args[1:], *metadata], place)
    if origin in (Union, UnionType):
        branches = [_schema(arg, () if arg is NoneType else metadata, place) for arg in args]
        flat = (branch["anyOf"] if list(branch) == ["anyOf"] else [branch] for branch in branches)
        return {"anyOf": list(chain.from_iterable(flat))}
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return {"$ref": place(annotation)}
    return {**_plain(annotation, origin, args, place), **_bounds(annotation, origin, metadata)}


def _plain(annotation: Any, origin: Any, args: tuple[Any, ...], place: Place) -> Mapping[str, Any]:
    if origin is Literal:
        return {"const": args[0], "type": "string"} if len(args) == 1 else {"enum": list(args), "type": "string"}
    if origin is dict:
        inner = True if args[1] is Any else _schema(args[1], (), place)
        constraints: tuple[Any, ...] = getattr(args[0], "__metadata__", ())
        patterns = [m.pattern for m in constraints if getattr(m, "pattern", None)]
        where = {"patternProperties": dict.fromkeys(patterns, inner)} if patterns else {"additionalProperties": inner}
        named = {"propertyNames": {"enum": list(get_args(args[0]))}} if get_origin(args[0]) is Literal else {}
        return {"type": "object", **where, **named}
    if origin is list or (origin is tuple and args[1:] == (...,)):
        return {"type": "array", "items": _schema(args[0], (), place)}
    if origin is tuple:
        items = [_schema(arg, (), place) for arg in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    return _TYPES.get(annotation, {})  # anything may stand for what is not known here


def _bounds(annotation: Any, origin: Any, metadata: Sequence[Any]) -> dict[str, Any]:
    """Constraints, which are small objects with attributes such as `ge`."""
    which = 2 if origin is dict else 1 if origin in (list, tuple) else 0
    names = {**_BOUNDS, **{name: forms[which] for name, forms in _LENGTHS.items()}}
    return {
        word: bound
        for constraint in metadata
        for name, word in names.items()
        if (bound := getattr(constraint, name, None)) is not None
    }


class _Inner(GetJsonSchemaHandler):
    """What an annotation with a schema of its own asks for that of what it annotates."""

    def __init__(self, *inner: Any) -> None:
        self._inner = inner

    def __call__(self, core_schema: Any, /) -> dict[str, Any]:
        return _schema(*self._inner)
