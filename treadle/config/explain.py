"""What `treadle explain` says: all keys in a table, or one key with its meaning, range, default and readers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from textwrap import fill
from typing import TypeVar

from treadle.config.base import Config
from treadle.config.keys import Inside, Key, find, tree
from treadle.config.messages import allowed
from treadle.config.uses import uses
from treadle.config.yaml_text import to_line

K = TypeVar("K", bound=Hashable)
DEFAULT = 14  # columns that a default has in a table at most
FOOTER = "`treadle explain KEY` tells the whole of a key: range, readers, and where … stands, what differs by name."
MEANING = 24  # columns that a meaning has at least, however narrow the terminal


def overview(root: type[Config], width: int | None = None) -> str:
    """All keys, one line each: name, default, meaning (cut to `width` columns)."""
    return "\n".join([*_table(list(tree(root)), "", width), "", FOOTER])


def explain(root: type[Config], path: str, width: int | None = None) -> str:
    """One key. Raises ConfigError, which names the nearest one, where there is no such key."""
    found = find(root, path)
    blocks = [[found[0].path]]
    alike = _grouped(found, lambda key: (key.field.description, _allowed(key)))
    blocks += [_facts(same, width) for same in alike.values()]
    if sections := [key for key in found if key.section]:
        blocks += _inside(root, sections[0], width)
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _facts(same: Sequence[Key], width: int | None) -> list[str]:
    """What is to be said of keys that differ in their default at most."""
    first = same[0]
    facts = {
        "allowed": "" if first.section else _allowed(first),
        "default": " ".join(_defaults(same)).strip(),
        "with": "" if first.choice is None or first.name == "name" else "name: " + _names(same),
        "read at": ("\n" + " " * 11).join(_files(uses(first.path, [key.owner for key in same]))),
    }
    meaning = _wrapped(first.field.description or "", width)
    return [meaning, "", *(f"  {what:<9}{text}" for what, text in facts.items() if text)]


def _inside(root: type[Config], section: Key, width: int | None) -> list[list[str]]:
    """What a section holds: what it is or who may be chosen, and its keys."""
    models = section.inside()
    blocks = []
    if models[0].plugin is not None:
        names = max(len(inside.choice or "") for inside in models)
        blocks.append([_cut(f"  name: {inside.choice:<{names}}  {_summary(inside)}", width) for inside in models])
    elif text := vars(models[0].model).get("__doc__"):
        blocks.append([_wrapped(inspect.cleandoc(text), width)])
    above = f"{section.path}."
    return [*blocks, _table([key for key in tree(root) if key.path.startswith(above)], above, width)]


def _summary(inside: Inside) -> str:
    """The first line of the file that a plug-in is."""
    return (sys.modules[inside.model.__module__].__doc__ or "").partition("\n")[0]


# ---------------------------------------------------------------------- a table of keys


def _table(found: Sequence[Key], path: str, width: int | None) -> list[str]:
    """Keys below `path`, indented by their depth; those that several models have, in one line."""
    first = _twins(found)
    below = tuple(twin + mark for twin in first for mark in ".[")
    shown = [key for key in found if not key.path.startswith(below)]
    rows = [_row(same, path, first.get(at)) for at, same in _grouped(shown, lambda key: key.path).items()]
    labels, defaults = (max(len(row[i]) for row in rows) for i in (0, 1))
    room = None if width is None else max(width, labels + defaults + MEANING)
    return [_cut(f"{label:<{labels}}  {default:<{defaults}}  {text}".rstrip(), room) for label, default, text in rows]


def _row(same: Sequence[Key], path: str, twin: str | None) -> tuple[str, str, str]:
    """A key's name, default ("…": names differ in it) and meaning (with its names, where not all have it)."""
    first = same[0]
    depth = first.path.removeprefix(path).count(".") + bool(path)
    default, others = _defaults(same)
    few = first.plugin is not None and len(same) < len(first.plugin.models())
    meaning = (f"{_names(same)}: " if few else "") + (first.field.description or "")
    return (
        "  " * depth + first.name,
        _cut(default + (" …" if others else ""), DEFAULT),
        meaning + (f" (keys as in {twin})" if twin is not None else ""),
    )


def _twins(found: Iterable[Key]) -> dict[str, str]:
    """Sections whose keys are those of an earlier one, and which."""
    first: dict[Hashable, str] = {}
    twins = {}
    for key in found:
        models = tuple((inside.place, inside.model) for inside in key.inside())
        if models and first.setdefault(models, key.path) != key.path:
            twins[key.path] = first[models]
    return twins


# ---------------------------------------------------------------------- words


def _defaults(same: Sequence[Key]) -> tuple[str, str]:
    """The default, and those that other names have instead: `8`, `(ppo: 1)`."""
    first = same[0]
    if first.name == "name" and first.plugin is not None:
        return first.plugin.default or "required", ""
    if first.section and not first.required:
        return ("null" if first.default is None else ""), ""
    first_text, *others = by_text = _grouped(same, lambda key: "required" if key.required else to_line(key.default))
    told = "; ".join(f"{_names(by_text[text])}: {text}" for text in others)
    return first_text, f"({told})" if told else ""


def _allowed(key: Key) -> str:
    if key.name == "name" and key.plugin is not None:
        return f"{', '.join(key.plugin.models())}, or your own my.module:Class"
    return allowed(key.field.annotation, key.field.metadata)


def _names(same: Sequence[Key]) -> str:
    return ", ".join(key.choice or "" for key in same)


def _files(places: Sequence[str]) -> list[str]:
    """`["a.py:1", "a.py:7", "b.py:3"]` as `["a.py:1, 7", "b.py:3"]`."""
    pairs = (place.rsplit(":", 1) for place in places)
    return [f"{file}:{', '.join(line for _, line in group)}" for file, group in groupby(pairs, lambda pair: pair[0])]


def _wrapped(text: str, width: int | None) -> str:
    return fill(text, width or 120, initial_indent="  ", subsequent_indent="  ")


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: width - 1] + "…"


def _grouped(found: Iterable[Key], by: Callable[[Key], K]) -> dict[K, list[Key]]:
    groups: dict[K, list[Key]] = {}
    for key in found:
        groups.setdefault(by(key), []).append(key)
    return groups
