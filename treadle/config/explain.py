"""What `treadle explain` says: all keys in a table, or one key with its meaning, range, default and readers."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from textwrap import fill
from typing import TypeVar

from treadle.config.base import Config
from treadle.config.keys import Key, find, tree
from treadle.config.messages import allowed
from treadle.config.plugins import Plugin
from treadle.config.uses import uses
from treadle.config.yaml_text import to_line

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
DEFAULT = 14  # columns that a default has in a table at most
FOOTER = "`treadle explain KEY` tells the whole of a key: range, readers, and where … stands, what differs by name."
JOINED = (
    "A half goes with the usual other one, or with one that is named, too: objective+estimator. Where both have a key, "
    "the objective's default counts. In a table of keys, the names before a meaning are those that bring the key."
)
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
        "default": " ".join(defaults(same)).strip(),
        "with": "" if first.plugin is None or first.name == "name" else f"name: {by_home(same)}",
        "read at": "\n".join(_files(uses(first.path, list(dict.fromkeys(key.owner for key in same))))),
    }
    meaning = _wrapped(first.field.description or "", width)
    return [meaning, "", *(_wrapped(text, width, f"  {what:<9}") for what, text in facts.items() if text)]


def _inside(root: type[Config], section: Key, width: int | None) -> list[list[str]]:
    """What a section holds: what it is or who may be chosen, and its keys."""
    inside = section.inside()
    plugin = inside[0].plugin
    blocks = []
    if plugin is not None:
        of_kind = _grouped(plugin.choices(), lambda name: plugin.choices()[name].kind)
        rows = [(name, kind, _summary(name, plugin)) for kind, names in of_kind.items() for name in names]
        names, kinds = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"  name: {name:<{names}}  {kind:<{kinds}}{'  ' * plugin.joins}{text}" for name, kind, text in rows]
        blocks.append([_cut(line, width or 120) for line in lines])
        if plugin.joins:
            blocks.append([_wrapped(JOINED, width)])
    elif text := vars(inside[0].models[0]).get("__doc__"):
        blocks.append([_wrapped(inspect.cleandoc(text), width)])
    above = f"{section.path}."
    return [*blocks, _table([key for key in tree(root) if key.path.startswith(above)], above, width)]


def _summary(name: str, plugin: Plugin) -> str:
    """The first sentence of the file that a plug-in is, without the papers."""
    first, _, _ = (sys.modules[f"{plugin.folder}.{name}"].__doc__ or "").partition("\n\n")
    return re.sub(r" \([^()]*\d{4}[^()]*\)", "", " ".join(first.split()), count=1).removesuffix(".")


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
    default, others = defaults(same)
    all_have_it = first.plugin is None or len(same) == len(first.plugin.choices())
    meanings = _grouped(same, lambda key: key.field.description or "")
    whose = ("" if all_have_it else f"{', '.join(_homes(keys))}: " for keys in meanings.values())
    text = "; ".join(map("".join, zip(whose, meanings, strict=True)))
    return (
        "  " * depth + first.name,
        _cut(default + (" …" if others else ""), DEFAULT),
        text + (f" (keys as in {twin})" if twin is not None else ""),
    )


def _twins(found: Iterable[Key]) -> dict[str, str]:
    """Sections whose keys are those of an earlier one, and which."""
    first: dict[Hashable, str] = {}
    twins = {}
    for key in found:
        models = tuple((inside.place, inside.models) for inside in key.inside())
        if models and first.setdefault(models, key.path) != key.path:
            twins[key.path] = first[models]
    return twins


# ---------------------------------------------------------------------- words


def defaults(same: Sequence[Key]) -> tuple[str, str]:
    """The default that most names have, and those of others: `8`, `(ppo: 1)`."""
    first = same[0]
    if first.name == "name" and first.plugin is not None:
        return first.plugin.default or "required", ""
    if first.section and not first.required:  # its keys are told; it is not made, which takes time
        return ("null" if first.field.default_factory is None and first.default is None else ""), ""
    by_text = _grouped(same, lambda key: "required" if key.required else to_line(key.default))
    most, *others = sorted(by_text, key=lambda text: -len(by_text[text]))
    told = "; ".join(f"{_names(by_text[text])}: {text}" for text in others)
    return most, f"({told})" if told else ""


def _allowed(key: Key) -> str:
    if key.name == "name" and key.plugin is not None:
        joined = ", two halves joined by +" if key.plugin.joins else ""
        return f"{', '.join(key.plugin.choices())}{joined}, or your own my.module:Class"
    return allowed(key.field.annotation, key.field.metadata)


def _names(same: Sequence[Key]) -> str:
    return ", ".join(key.choice or "" for key in same)


def _homes(same: Sequence[Key]) -> dict[str, list[str]]:
    """Names that bring a key, each with the names that have it of that one."""
    homes: dict[str, list[str]] = {}
    for key in same:
        homes.setdefault(key.home or key.choice or "", []).append(key.choice or "")
    return {home: [name for name in names if name != home] for home, names in homes.items()}


def by_home(same: Sequence[Key]) -> str:
    """The same in words: `gspo, clip (and with it grpo, rloo)`, or `all but remax`."""
    plugin = same[0].plugin
    if plugin is not None and len(same) > 1:
        names = {key.choice for key in same}
        others = [name for name in plugin.choices() if name not in names]
        if len(others) <= 3 and same[0].home is None:
            return " but ".join(["all", ", ".join(others)] if others else ["all"])
    words = (home + (f" (and with it {', '.join(names)})" if names else "") for home, names in _homes(same).items())
    return ", ".join(words)


def _files(places: Sequence[str]) -> list[str]:
    """`["a.py:1", "a.py:7", "b.py:3"]` as `["a.py:1, 7", "b.py:3"]`."""
    pairs = (place.rsplit(":", 1) for place in places)
    return [f"{file}:{', '.join(line for _, line in group)}" for file, group in groupby(pairs, lambda pair: pair[0])]


def _wrapped(text: str, width: int | None, head: str = "  ") -> str:
    """Lines no longer than the width, all as far from the left as what comes after the `head` of the first."""
    room, left = max(width or 120, len(head) + MEANING), " " * len(head)
    lines = [fill(line, room, initial_indent=left, subsequent_indent=left) for line in text.splitlines()]
    return head + "\n".join(lines)[len(head) :]


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: width - 1] + "…"


def _grouped(found: Iterable[T], by: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for each in found:
        groups.setdefault(by(each), []).append(each)
    return groups
