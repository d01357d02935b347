"""Where the code reads a configuration key: found in the source when asked, so that it is never out of date.

A read is an attribute: `self.config.clip_low`. It is one of this key if what stands before it is

- annotated, anywhere in the file, with a model that has the key (`config: GRPOConfig`), or `self` inside such a model;
- called like the key's section (`config.sampling.temperature`), or like a property or function that returns the model;
- a loop's variable over one of these (`for part in config.sources.values()`).
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from treadle.config.base import Config

PACKAGE = Path(__file__).parent.parent


def uses(path: str, models: Collection[type[Config]]) -> list[str]:
    """File and line of every read of the key at `path` of these models: `treadle/algorithms/grpo.py:74`."""
    *_, section, name = ["", *re.sub(r"\[\]|\.\*", "", path).split(".")]
    owners = {(m.__module__, m.__qualname__) for model in models for m in model.__mro__ if _has(m, name)}
    modules = {module for module, _ in owners}
    near = [file for file in _files() if file.module in modules or any(module in file.text for module in modules)]
    named = re.compile(rf"\b({'|'.join({re.escape(owner) for _, owner in owners})})\b(?: as (\w+))?")
    # Parsing takes time, and few files can have an accessor or a read.
    holders = {section, *(a for file in near if _returns(file, named) for a in _accessors(file, owners))} - {""}
    called = re.compile(rf"\b({'|'.join(holders)})\.{name}\b" if holders else r"(?!)")
    found: list[str] = []
    for file in _files():
        if f".{name}" in file.text and (file in near or called.search(file.text)):
            found += [f"{file.path}:{line}" for line in _lines(file, name, holders, owners)]
    return found


@dataclass(frozen=True, eq=False)
class _File:
    path: str  # from the package's parent folder on
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def _files() -> Sequence[_File]:
    """The package's source. It is read once: the program that asks does not change meanwhile."""
    root = PACKAGE.parent
    paths = sorted(f"{at}/{name}" for at, _, names in os.walk(PACKAGE) for name in names if name.endswith(".py"))
    return [_File(os.path.relpath(path, root), Path(path).read_text(encoding="utf-8")) for path in paths]


Owners = Collection[tuple[str, str]]
"""Models, as (module, class)."""


def _has(model: type, name: str) -> bool:
    return issubclass(model, Config) and name in model.model_fields


def _returns(file: _File, named: re.Pattern[str]) -> bool:
    """Whether a file may have a function that returns one of the models so named."""
    names = {match[2] or match[1] for match in named.finditer(file.text)}
    return any(re.search(rf"-> .*\b{name}\b", file.text) for name in names)


def _accessors(file: _File, owners: Owners) -> Iterator[str]:
    """Properties and functions of a file that return one of the models."""
    known = _classes(file, owners)
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and known & _words(node.returns):
            yield node.name.lstrip("_")


def _lines(file: _File, name: str, holders: Collection[str], owners: Owners) -> list[int]:
    """Lines of a file that read the key; `holders` are called like what holds it wherever they stand."""
    known = _classes(file, owners)
    names = {*holders, *(what for what, annotation in _annotated(file) if known & _words(annotation))}
    names |= {variable for variable, over in _loops(file) if names & over}
    inside = [n for n in file.nodes if isinstance(n, ast.ClassDef) and n.name in known]
    own = {id(read) for model in inside for read in ast.walk(model)}
    lines: set[int] = set()
    for read in file.nodes:
        if isinstance(read, ast.Attribute) and read.attr == name and isinstance(read.ctx, ast.Load):
            holder = _last(read.value)
            if holder in names or (holder == "self" and id(read) in own):
                lines.add(read.lineno)
    return sorted(lines)


def _classes(file: _File, owners: Owners) -> set[str]:
    """What the models are called in this file."""
    imported = [n for n in file.nodes if isinstance(n, ast.ImportFrom)]
    names = {a.asname or a.name for n in imported for a in n.names if (n.module, a.name) in owners}
    return names | {name for home, name in owners if home == file.module}


def _annotated(file: _File) -> Iterator[tuple[str, ast.expr]]:
    for node in file.nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg.lstrip("_"), node.annotation
        elif isinstance(node, ast.AnnAssign) and (name := _last(node.target)):
            yield name, node.annotation


def _loops(file: _File) -> Iterator[tuple[str, set[str]]]:
    """Variables of loops, and the names in what they run over."""
    for node in file.nodes:
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            over = _words(node.iter)
            yield from ((variable, over) for variable in _words(node.target))


def _words(node: ast.AST | None) -> set[str]:
    """All names in an expression, each without its leading underscores."""
    return set() if node is None else {name for part in ast.walk(node) if (name := _last(part))}


def _last(node: ast.AST) -> str:
    """The last name of an expression, as `config` of `self._config`; "" if it has none."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_")
