"""JSON Schema (2020-12) of a configuration: with it an editor completes, explains and checks while one types.

pydantic knows the schema of each model; put together here are the models that are chosen by name, and texts to hover.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from treadle.config.base import Config
from treadle.config.keys import Inside, Key, keys, tree
from treadle.config.messages import allowed
from treadle.config.plugins import PLUGIN, Plugin, name_schema
from treadle.config.yaml_text import to_line

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(root: type[Config]) -> dict[str, Any]:
    """What `root` reads. What a section's `my.module:Class` reads is not known, so anything is allowed there."""
    models = list(dict.fromkeys([root, *(key.owner for key in tree(root))]))
    refs, found = models_json_schema([(model, "validation") for model in models])
    places = {model: refs[model, "validation"] for model in models}
    definitions = found["$defs"]
    for model, place in places.items():
        _describe(definitions[place["$ref"].rpartition("/")[2]], keys(Inside("", model)))
    plugins: dict[str, Plugin] = {}
    whole = _finished({"$defs": definitions}, plugins)
    for name, plugin in plugins.items():
        whole["$defs"][name] = _section(plugin, {n: places[model] for n, model in plugin.models().items()})
    top = whole["$defs"].pop(places[root]["$ref"].rpartition("/")[2])
    return {"$schema": DIALECT, **top, **whole}


def _describe(definition: dict[str, Any], found: Iterable[Key]) -> None:
    """What to hover over each key: its meaning, what is allowed, its default."""
    for key in found:
        if not key.section:
            default = "" if key.required else f"; default {to_line(key.default)}"
            wanted = allowed(key.field.annotation, key.field.metadata)
            definition["properties"][key.name]["description"] = f"{key.field.description}\n\n{wanted}{default}"


def _section(plugin: Plugin, places: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A section in which `name` decides what the other keys are."""
    cases = []
    for name, place in places.items():
        named = {"properties": {"name": {"const": name}}}
        cases.append({"if": named if name == plugin.default else {**named, "required": ["name"]}, "then": place})
    name = {"description": "one of ours, or my.module:Class", **name_schema(plugin.folder)}
    section = {"type": "object", "properties": {"name": name}, "allOf": cases}
    return section if plugin.default is not None else {**section, "required": ["name"]}


def _finished(node: Any, plugins: dict[str, Plugin]) -> Any:
    """Without the titles that pydantic makes of names, and with references to plug-ins, which are collected."""
    if isinstance(node, list):
        return [_finished(item, plugins) for item in node]
    if not isinstance(node, dict):
        return node
    rest = {k: _finished(v, plugins) for k, v in node.items() if k != PLUGIN and not (k == "title" and type(v) is str)}
    if isinstance(plugin := node.get(PLUGIN), Plugin):
        name = f"{plugin.folder}:{plugin.default}" if plugin.default else plugin.folder
        plugins[name] = plugin
        rest["$ref"] = f"#/$defs/{name}"
    return rest
