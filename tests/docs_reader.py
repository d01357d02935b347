"""A reader who follows a page of the documentation, block by block, in a fresh clone with the tiny model.

What a fenced block is for is said by its language, its title and an HTML comment on the line before it:

- `python` runs, all blocks of a page in one namespace; with `title="name.py"` it is written to that file and imported;
- `sh` runs, line by line; `yaml` is loaded as a configuration, or over that of the smoke run; `json`, `jsonl` and `csv`
  are parsed; a title makes a file of them;
- `text` after a block that ran is its output: `…` stands for anything, and any number for any other. Elsewhere it is
  a drawing;
- `<!-- fails -->`: it runs and ends with an error;
- `<!-- checked: why -->`: it does not run here, but commands, options, overrides, files and make targets in it exist.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from tests.runs import ROOT
from treadle.cli import main
from treadle.config.yaml_text import from_file
from treadle.errors import TreadleError
from treadle.recipes.config import load_config

SMOKE = Path("examples/smoke.yaml")
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
MARKER = re.compile(r"<!-- (?P<kind>fails|checked)(: (?P<why>\S.*))? -->")
NUMBER = re.compile(r"[-+]?\d+([.,:]\d+)*(e[-+]?\d+)?")
UNCHECKED = {"cd", "kill", "source"}
"""Commands of the shell that nothing here can check."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    title: str | None
    marker: str | None  # "fails", "checked"
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        indent = opening["indent"]
        end = lines.index(f"{indent}```", number + 1)
        language, _, options = opening["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', options)
        marker = MARKER.fullmatch(lines[number - 1].strip()) if number else None
        if marker is not None and marker["kind"] == "checked":
            assert marker["why"], f"{page}:{number}: say why the block is not run"
        yield Block(
            page,
            number + 1,
            language or "text",
            title[1] if title else None,
            marker["kind"] if marker else None,
            "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end]) + "\n",
        )
        number = end + 1


class Reader:
    """Follows one page. Its place is the current directory."""

    def __init__(self, only_check: bool = False) -> None:
        self._only_check = only_check  # the shell's blocks
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._output: str | None = None  # of the block before, if it ran

    def follow(self, block: Block) -> None:
        """Do what the block says. Raises AssertionError where it does not hold."""
        if block.title is not None:
            Path(block.title).write_text(block.text)
            importlib.invalidate_caches()
        before, self._output = self._output, None
        match block.language:
            case "text":
                assert before is None or same(block.text, before), f"{block}: the output is\n{before}"
            case "python":
                self._output = self._python(block)
            case "sh" if block.marker == "checked" or self._only_check:
                for command in commands(block.text):
                    check(command, str(block))
            case "sh":
                self._output = "".join(self._run(command, block) for command in commands(block.text))
            case "yaml":
                load_fragment(block.text)
            case "json":
                json.loads(block.text)
            case "jsonl":
                assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())
            case "csv":
                assert len({len(row) for row in csv.reader(io.StringIO(block.text))}) == 1
            case _:
                raise AssertionError(f"{block}: nobody knows what to do with {block.language!r}")

    def _python(self, block: Block) -> str:
        if block.title is not None and block.title.endswith(".py"):
            importlib.import_module(Path(block.title).stem)
            return ""
        out = io.StringIO()
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        with contextlib.redirect_stdout(out):
            if block.marker == "fails":
                try:
                    exec(code, self._names)
                except TreadleError as error:
                    return f"{type(error).__name__}: {error}"
                raise AssertionError(f"{block}: nothing failed")
            exec(code, self._names)
        return out.getvalue()

    def _run(self, command: str, block: Block) -> str:
        """Output of a command; ours runs in this process, for torch takes long to import."""
        words = shlex.split(command, comments=True)
        if words[0] == "treadle" and not set("|<>;&") & set(command):
            found = CliRunner().invoke(main, words[1:])
            code, output = found.exit_code, found.output
            if found.exception is not None and not isinstance(found.exception, SystemExit):
                raise found.exception
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
            )
            code, output = done.returncode, done.stdout + done.stderr
        assert (code != 0) == (block.marker == "fails"), f"{block}: {command}\nexit code {code}\n{output}"
        return output


def commands(text: str) -> Iterator[str]:
    """The commands of a block of the shell, without comments; a quotation may go on over lines."""
    command = ""
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # no closing quotation yet
            continue
        if words:
            yield command
        command = ""
    assert not command, f"no closing quotation: {command}"


def same(shown: str, output: str) -> bool:
    """Whether `shown` is this output, spaces and numbers aside, with `…` for anything."""
    first, *middle = (_normal(part) for part in shown.split("…"))
    rest = _normal(output)
    if not middle:
        return rest == first
    *middle, last = middle
    if not rest.startswith(first):
        return False
    rest = rest[len(first) :]
    for part in middle:
        at = rest.find(part)
        if at < 0:
            return False
        rest = rest[at + len(part) :]
    return rest.endswith(last)


def _normal(text: str) -> str:
    lines = (" ".join(NUMBER.sub("0", line).split()) for line in click.unstyle(text).splitlines())
    return "\n".join(line for line in lines if line)


def load_fragment(text: str) -> None:
    """Load YAML as a whole configuration, or as a part that lies over the smoke run's."""
    path = Path("fragment.yaml")
    path.write_text(text)
    fragment = from_file(path)
    load_config(path, base=None if "model" in fragment else _beneath(from_file(SMOKE), fragment))


def _beneath(base: dict[str, Any], fragment: dict[str, Any]) -> dict[str, Any]:
    """`base` without what another choice of `name` has no use for."""
    if fragment.get("name", base.get("name")) != base.get("name"):
        return {}
    both = {
        k: _beneath(v, fragment[k])
        for k, v in base.items()
        if isinstance(fragment.get(k), dict) and isinstance(v, dict)
    }
    return base | both


def check(command: str, where: str) -> None:
    """Raise AssertionError unless everything that a command names exists."""
    program, *words = itertools.takewhile(lambda word: word not in (">", "|"), shlex.split(command, comments=True))
    match program:
        case "treadle":
            check_treadle(words, where)
        case "make":
            targets = re.findall(r"^([a-z%/-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            for word in words:
                found = word in targets or f"{Path(word).parent}/%" in targets or "=" in word
                assert found, f"{where}: make has no target {word}"
        case "python":
            assert (ROOT / words[0]).exists(), f"{where}: there is no {words[0]}"
        case "pip":
            extras = {name for word in words for found in re.findall(r"\[(.*)\]", word) for name in found.split(",")}
            known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
            assert extras <= set(known), f"{where}: there is no extra {extras - set(known)}"
        case _:
            assert program in UNCHECKED, f"{where}: nobody knows what {program} does"


def check_treadle(words: list[str], where: str) -> None:
    """The command, its options and its overrides."""
    if not words or words[0].startswith("-"):
        return
    command = main.commands.get(words[0])
    assert command is not None, f"{where}: there is no treadle {words[0]}"
    try:
        context = command.make_context(words[0], words[1:])
    except click.exceptions.Exit:  # --help
        return
    except click.ClickException as error:
        raise AssertionError(f"{where}: {error.format_message()}") from error
    config = next((Path(w) for w in words if w.endswith(".yaml")), Path("examples/quickstart.yaml"))
    load_config(ROOT / config, context.params.get("overrides", ()))
