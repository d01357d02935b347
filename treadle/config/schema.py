"""JSON Schema (2020-12) of a configuration: with it an editor completes, explains and checks while one types.

`json_types.py` makes the schema of each model; put together here are the models that are chosen by name, wholes that
are joined of two halves among them, and texts to hover.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Any

from treadle.config.base import Config
from treadle.config.json_types import model_schema
from treadle.config.keys import Inside, keys, owners, tree
from treadle.config.messages import allowed
from treadle.config.plugins import OWN_NAME, PLUGIN, Choice, Plugin, name_schema
from treadle.config.yaml_text import to_line

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(root: type[Config]) -> dict[str, Any]:
    """What `root` reads. What a section's `my.module:Class` reads is not known, so anything is allowed there."""
    found = dict.fromkeys(inside for key in tree(root) for inside in key.inside())
    places = _Places([root, *(inside.models[0] for inside in found if len(inside.models) == 1)])
    definitions = {places.name(inside): _definition(inside, places) for inside in (Inside("", (root,)), *found)}
    plugins: dict[str, Plugin] = {}
    whole = _finished({"$defs": definitions}, plugins)
    for name, plugin in plugins.items():
        whole["$defs"][name] = _section(plugin, places)
    return {"$schema": DIALECT, **whole["$defs"].pop(places.name(Inside("", (root,)))), **whole}


class _Places:
    """Names of definitions: a model's own, with its module where two bear the same, or that of the two halves."""

    def __init__(self, models: Iterable[type[Config]]) -> None:
        names = [model.__name__ for model in dict.fromkeys(models)]
        self._twice = {name for name in names if names.count(name) > 1}

    def name(self, inside: Inside) -> str:
        first = inside.models[0]
        if len(inside.models) > 1 and inside.plugin is not None:
            return f"{inside.plugin.folder}.{inside.choice}"
        return f"{first.__module__}.{first.__qualname__}" if first.__name__ in self._twice else first.__name__

    def ref(self, inside: Inside) -> str:
        return f"#/$defs/{self.name(inside)}"


def _definition(inside: Inside, places: _Places) -> dict[str, Any]:
    """A section's schema, with what to hover over each key: its meaning, what is allowed, its default."""
    alone = inside.models[0] if len(inside.models) == 1 else None
    made = model_schema(owners(inside.models), lambda model: places.ref(Inside("", (model,))), alone)
    for key in keys(inside):
        if not key.section:
            default = "" if key.required else f"; default {to_line(key.default)}"
            wanted = allowed(key.field.annotation, key.field.metadata)
            made["properties"][key.name]["description"] = f"{key.field.description}\n\n{wanted}{default}"
    return made


# ---------------------------------------------------------------------- sections chosen by name


def _section(plugin: Plugin, places: _Places) -> dict[str, Any]:
    """A section in which `name` decides what the other keys are."""
    cases = []
    for name, choice in plugin.choices().items():
        named = {"properties": {"name": {"const": name}}}
        place = {"$ref": places.ref(Inside("", choice.models, name, plugin))}
        cases.append({"if": named if name == plugin.default else {**named, "required": ["name"]}, "then": place})
    names = name_schema(plugin.folder)
    if plugin.joins:
        names["anyOf"].append({"type": "string", "pattern": f"^({_pairs(plugin)})$"})
        cases += _joined(plugin, places)
    meaning = "one of ours, my.module:Class" + (", or two halves of a whole joined by +" if plugin.joins else "")
    section = {"type": "object", "properties": {"name": {"description": meaning, **names}}, "allOf": cases}
    return section if plugin.default is not None else {**section, "required": ["name"]}


def _by_kind(plugin: Plugin) -> dict[str, dict[str, Choice]]:
    """Halves by what half they are."""
    found: dict[str, dict[str, Choice]] = {}
    for name, choice in plugin.choices().items():
        if len(choice.models) > 1:
            found.setdefault(choice.kind, {})[name] = choice
    return found


def _pairs(plugin: Plugin) -> str:
    """Regular expression of two names joined by +, in either order, that are not the same half twice."""
    halves = ["|".join([*names, OWN_NAME]) for names in _by_kind(plugin).values()]
    return "|".join(rf"({first})\+({second})" for first, second in permutations(halves, 2))


def _joined(plugin: Plugin, places: _Places) -> list[dict[str, Any]]:
    """The keys of joined names: those of both halves. Beside a class that is not ours, any others are allowed."""
    by_kind = _by_kind(plugin)
    halves = [(name, choice) for names in by_kind.values() for name, choice in names.items()]
    common = set.intersection(*(set(choice.own.model_fields) for _, choice in halves)) - {"name"}

    def told(name: str, choice: Choice, keys: Iterable[str]) -> dict[str, Any]:
        place = places.ref(Inside("", choice.models, name, plugin))
        return {"properties": {key: {"$ref": f"{place}/properties/{key}"} for key in keys}}

    cases = [_where(r"\+", told(*halves[0], sorted(common)))]
    for kind, names in by_kind.items():
        others = {name: choice for other, found in by_kind.items() if other != kind for name, choice in found.items()}
        theirs = {key for choice in others.values() for key in choice.own.model_fields}
        for name, choice in names.items():
            own, beside = set(choice.own.model_fields), "|".join(others)
            cases.append(_where(rf"^{name}\+|\+{name}$", told(name, choice, sorted(own - common - {"name"}))))
            ours = rf"^({name}\+({beside})|({beside})\+{name})$"
            cases.append(_where(ours, {"propertyNames": {"enum": sorted(own | theirs)}}))
    return cases


def _where(pattern: str, then: Mapping[str, Any]) -> dict[str, Any]:
    named = {"properties": {"name": {"type": "string", "pattern": pattern}}, "required": ["name"]}
    return {"if": named, "then": then}


def _finished(node: Any, plugins: dict[str, Plugin]) -> Any:
    """With references to plug-ins, which are collected."""
    if isinstance(node, list):
        return [_finished(item, plugins) for item in node]
    if not isinstance(node, dict):
        return node
    rest = {k: _finished(v, plugins) for k, v in node.items() if k != PLUGIN}
    if isinstance(plugin := node.get(PLUGIN), Plugin):
        name = f"{plugin.folder}:{plugin.default}" if plugin.default else plugin.folder
        plugins[name] = plugin
        rest["$ref"] = f"#/$defs/{name}"
    return rest
