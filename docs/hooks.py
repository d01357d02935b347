"""Reference pages, made from the code each time the site is built. No copy of them is kept.

MkDocs calls `on_files`, which adds the pages, and `on_page_content`, which links configuration keys to their place.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import treadle
from treadle.cli import main as cli
from treadle.config.explain import JOINED, defaults
from treadle.config.keys import Key, tree
from treadle.config.messages import allowed
from treadle.recipes.config import RLConfig

CONFIGURATION = "reference/configuration.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The generated pages join the written ones."""
    pages: dict[str, Callable[[], str]] = {
        CONFIGURATION: configuration,
        "reference/cli.md": command_line,
        "reference/python.md": python_names,
    }
    for path, make in pages.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """`algorithm.group_size` in a text becomes a link to what the key means."""
    target = files.get_file_from_path(CONFIGURATION)
    assert target is not None
    if page.file is target:
        return html
    url = posixpath.relpath(target.url, posixpath.dirname(page.url) or ".")

    def linked(match: re.Match[str]) -> str:
        anchor = anchors().get(match["key"])
        return match[0] if anchor is None else f'<a href="{url}#{anchor}">{match[0]}</a>'

    return re.sub(
        r"<(a|h\d|pre)\b.*?</\1>|<code>(?P<key>[a-z]\w*[._]\w[\w.]*)(=[^<]*)?</code>", linked, html, flags=re.S
    )


# ---------------------------------------------------------------------- configuration

_INTRODUCTION = """# Configuration

All keys, made from the models that read them. A configuration is one YAML file plus `key=value` overrides, in which a
key of a section is written `section.key`. What is not listed here is refused. `treadle explain KEY` says the same of
one key, and where the code reads it.
"""


def configuration() -> str:
    """The page of all keys, section by section, each with an anchor of its own."""
    found, anchored = _sections(), set[str]()
    headings = {section for section, _ in found}

    def anchor(path: str, choice: str | None) -> str:
        name = path if path not in anchored else f"{path}-{choice}"
        anchored.add(name)
        return f"{{ #{name} }}"

    lines = [_INTRODUCTION]
    for (section, choice), rows in found.items():
        heading = f"`{section}`" + (f" with `name: {choice}`" if choice else "") if section else "The run"
        lines.append(f"\n## {heading} {anchor(section or 'run-keys', choice)}\n")
        lines += _remarks(list(rows.values())[-1], choice)
        lines.append("| key | meaning | allowed | default |\n|---|---|---|---|")
        for path, same in rows.items():
            name = f"[`{path}`](#{path})" if path in headings else f"`{path}`{anchor(path, choice)}"
            meaning = "; ".join(dict.fromkeys(_plain(key.field.description or "") for key in same))
            lines.append(f"| {name} | {meaning} | {_allowed(same[0])} | {_default(same)} |")
    return "\n".join(lines)


def _remarks(same: list[Key], choice: str | None) -> list[str]:
    """What is to be said before a table: of halves, what else has their keys."""
    plugin = same[0].plugin
    if plugin is None or not plugin.joins:
        return []
    if choice is None:
        return [f"Keys of all [algorithms](../algorithms.md); those of each follow. {JOINED.partition('. In a')[0]}.\n"]
    others = ", ".join(f"`{key.choice}`" for key in same if key.choice != choice)
    return [f"Also with {others}.\n"] if others else []


def _allowed(key: Key) -> str:
    if not key.section:
        return _plain(allowed(key.field.annotation, key.field.metadata))
    where = anchors()[next(key.below()).path].rpartition(".")[0]
    return "section" if where == key.path else f"section, keys as of [`{where}`](#{where})"


def _default(same: list[Key]) -> str:
    """As YAML; what other names have instead in brackets. A section's is that of its keys."""
    first = same[0]
    if first.required:
        return "required"
    most, others = defaults(same)
    if most and not (first.section and most != "null"):
        most = f"`{most}`"
    return f"{most} {_plain(others)}".strip()


@cache
def anchors() -> dict[str, str]:
    """Where the page explains a key. Sections of the same choices are explained once, where they first stand."""
    first: dict[tuple[type, str], str] = {}
    return {key.path: first.setdefault((key.owner, key.name), key.path) for key in tree(RLConfig)}


def _sections() -> dict[tuple[str, str | None], dict[str, list[Key]]]:
    """Keys by the section they stand in, the name that brings them, and their path."""
    found: dict[tuple[str, str | None], dict[str, list[Key]]] = {}
    for key in tree(RLConfig):
        if anchors()[key.path] == key.path:
            # Of halves, most of which others are made of, each key is told once.
            name = key.home if key.plugin is not None and key.plugin.joins else key.choice
            same = found.setdefault((key.path.rpartition(".")[0], name), {}).setdefault(key.path, [])
            if key not in same:
                same.append(key)
    return found


def _plain(text: str) -> str:
    """Text of a table's cell in which nothing is Markdown."""
    return re.sub(r"[|<{*]", lambda match: f"&#{ord(match[0])};", text)


# ---------------------------------------------------------------------- command line


def command_line() -> str:
    """What `--help` says, of every command."""
    lines = ["# Command line\n", inspect.getdoc(import_module("treadle.cli")) or "", ""]
    whole = click.Context(cli, info_name="treadle", terminal_width=100, **cli.context_settings)
    contexts = (whole, *(click.Context(c, whole, name) for name, c in cli.commands.items()))
    return "\n".join([*lines, *(f"## `{c.command_path}`\n\n```text\n{c.get_help()}\n```\n" for c in contexts)])


# ---------------------------------------------------------------------- Python


def python_names() -> str:
    """Every public name of the package: signature, fields and docstrings as they stand in the source."""
    names = sorted(treadle.__all__, key=lambda name: (name[0].isupper(), name))
    parts = [f"## `treadle.{name}` {{ #{name} }}\n\n{_documented(name)}" for name in names]
    errors = f"## Errors {{ #errors }}\n\n```text\n{inspect.getdoc(import_module('treadle.errors'))}\n```\n"
    return "\n".join(["# Python\n", "What `import treadle` offers, as it stands in the source.\n", *parts, errors])


def _documented(name: str) -> str:
    path = Path(inspect.getfile(getattr(treadle, name)))
    source = path.read_text()
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
    body = _function(node, source) if isinstance(node, ast.FunctionDef) else _class(node, source)
    return f"`{path.relative_to(Path(treadle.__file__).parent.parent)}`\n\n{body}"


def _class(node: ast.ClassDef, source: str) -> str:
    parts = [_docstring(node)]
    fields = [source.splitlines()[n.lineno - 1 : n.end_lineno] for n in _fields(node)]
    if fields:
        text = inspect.cleandoc("\n" + "\n".join(line for lines in fields for line in lines))
        parts.append(f"```python\n{text}\n```\n")
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name[0] != "_"]
    parts += [f"### `{m.name}` {{ #{node.name}.{m.name} }}\n\n{_function(m, source)}" for m in methods]
    return "\n".join(parts)


def _fields(node: ast.ClassDef) -> Iterator[ast.stmt]:
    """Public attributes, and the docstrings below them."""
    before: ast.stmt | None = None
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
            yield (before := statement)
        elif isinstance(statement, ast.Expr) and before is not None:
            yield statement
        else:
            before = None


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> str:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    signature = inspect.cleandoc("\n" + "\n".join(source.splitlines()[first - 1 : node.body[0].lineno - 1]))
    return f"```python\n{signature or ast.unparse(node)}\n```\n\n{_docstring(node)}"


def _docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """As Markdown: `::` before a block that is set in is how docstrings mark it, and Markdown needs no mark."""
    return re.sub(r"::$", ":", ast.get_docstring(node) or "", flags=re.M) + "\n"
