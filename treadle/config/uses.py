"""Where the code reads a configuration key: found in the source when asked, so that it is never out of date.

A read is an attribute: `self.config.clip_low`. It is one of this key if what stands before it is annotated, anywhere in
the file, with a model that has the key (`config: GRPOConfig`), is `self` inside such a model, or is called like the
key's section (`config.sampling.temperature`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from treadle.config.base import Config

PACKAGE = Path(__file__).parent.parent


def uses(path: str, models: Collection[type[Config]]) -> list[str]:
    """File and line of every read of the key at `path` of these models: `treadle/algorithms/grpo.py:74`."""
    *_, section, name = ["", *re.sub(r"\[\]|\.\*", "", path).split(".")]
    owners = {(m.__module__, m.__qualname__) for model in models for m in model.__mro__ if _has(m, name)}
    called = re.compile(rf"\b{section}\.{name}\b" if section else r"(?!)")
    found: list[str] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text, module = file.read_text(encoding="utf-8"), _module(file)
        # Parsing takes time, and few files can have a read: those with a model, those that spell out section and key.
        if f".{name}" in text and (any(m == module or m in text for m, _ in owners) or called.search(text)):
            lines = sorted(set(_lines(ast.parse(text), module, name, section, owners)))
            found += [f"{file.relative_to(PACKAGE.parent)}:{line}" for line in lines]
    return found


def _has(model: type, name: str) -> bool:
    return issubclass(model, Config) and name in model.model_fields


def _module(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _lines(
    tree: ast.Module, module: str, name: str, section: str, owners: Collection[tuple[str, str]]
) -> Iterator[int]:
    """Lines of a file that read the key; the models that have it are given as (module, class)."""
    known = _classes(tree, module, owners)
    holders = {section} | {what for what, annotation in _annotated(tree) if known & _words(annotation)}
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name in known]
    own = {id(read) for model in inside for read in ast.walk(model)}
    for read in ast.walk(tree):
        if isinstance(read, ast.Attribute) and read.attr == name and isinstance(read.ctx, ast.Load):
            holder = _last(read.value)
            if holder and (holder in holders or (holder == "self" and id(read) in own)):
                yield read.lineno


def _classes(tree: ast.Module, module: str, owners: Collection[tuple[str, str]]) -> set[str]:
    """What the models are called in this file."""
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names = {a.asname or a.name for n in imported for a in n.names if (n.module, a.name) in owners}
    return names | {name for home, name in owners if home == module}


def _annotated(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            yield _last(node.target), node.annotation


def _words(annotation: ast.expr) -> set[str]:
    return {_last(node) for node in ast.walk(annotation)}


def _last(node: ast.AST) -> str:
    """The last name of an expression, as `config` of `self._config`; "" if it has none."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_")
