"""From a row of named cells to a `Row`: which column is the prompt, which the answer, what a prompt may be.

Common layouts are recognised by the names of their columns. Where two names fit, nothing is guessed: the error lists
the columns, and the keys `prompt` and `answer` choose. A dot leads into a column of records, as in
`reward_model.ground_truth`. Every other column becomes metadata under its own name (`data_source`, `extra_info`, …).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.config import key
from treadle.data.source import Row, SourceConfig
from treadle.data.strict_json import decode
from treadle.errors import DataError
from treadle.types import Message

logger = logging.getLogger(__name__)

PROMPTS = ("prompt", "messages", "question", "problem")
ANSWERS = ("answer", "ground_truth", "solution", "reward_model.ground_truth")

Columns = Mapping[str, tuple[str, ...]]
"""Columns that there are, by dotted name: where each is found in a row, e.g. `{"a": ("a",), "a.b": ("a", "b")}`."""


class TableConfig(SourceConfig):
    """Keys of sources that read tables."""

    prompt: str | None = key(
        f"column of the prompts, text or chat messages; null: the only one of {', '.join(PROMPTS)}", default=None
    )
    answer: str | None = key(
        f"column of the answers, for the reward; null: the only one of {', '.join(ANSWERS)}, if any", default=None
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """What is where in a row's cells."""

    prompt: tuple[str, ...]
    answer: tuple[str, ...] | None
    json: bool = False  # prompts are chat messages, written as JSON text

    def prompt_of(self, value: Any) -> str | tuple[Message, ...]:
        """The prompt that a cell holds. Raises ValueError that says what is wrong with it."""
        name = self.prompt[0] if len(self.prompt) == 1 else ".".join(self.prompt)
        if self.json:
            if not isinstance(value, str):
                raise ValueError(f'"{name}" is a {type(value).__name__}, not messages as JSON text like the first row')
            try:
                value = decode(value)
            except ValueError as error:
                raise ValueError(f'"{name}" holds messages as JSON text in the first row, here it is {error}') from None
            if isinstance(value, str):
                raise ValueError(f'"{name}" is a JSON string, not a list of messages like the first row')
        return as_prompt(value, name)

    def row(self, name: str, cells: dict[str, Any]) -> Row:
        """A row by name; cells that it does not use become its metadata. Raises ValueError that says what is wrong."""
        prompt, answer = _at(cells, self.prompt), None if self.answer is None else _at(cells, self.answer)
        for path in (self.prompt, self.answer):
            if path is not None and len(path) == 1:
                cells.pop(path[0], None)
        return Row(name, self.prompt_of(prompt), answer, cells)


def layout(config: TableConfig, columns: Columns, first: Mapping[str, Any], where: str) -> Layout:
    """The layout of a table with these columns and this first row; says which names it recognised.

    Raises DataError that lists the columns where none fits, or more than one.
    """
    prompt = _chosen("prompt", config.prompt, PROMPTS, columns, where)
    answer = _chosen("answer", config.answer, ANSWERS, columns, where)
    if prompt is None:
        raise DataError(
            f"{where}: no column is called {' or '.join(PROMPTS)}; set the source's key `prompt` to the one that holds "
            f"the prompts. The columns are {_listed(columns)}"
        )
    found = Layout(columns[prompt], None if answer is None else columns[answer], _is_json(_at(first, columns[prompt])))
    if (prompt, answer) != (config.prompt, config.answer):
        logger.warning(
            "%s: prompts are in the column %r%s, %s",
            where,
            prompt,
            " (messages as JSON text)" if found.json else "",
            "and there are no answers" if answer is None else f"answers in {answer!r}",
        )
    return found


def as_prompt(value: Any, name: str) -> str | tuple[Message, ...]:
    """Text or chat messages, checked; `name` is where they stood. Raises ValueError that says what is wrong."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f'"{name}" is empty')
        return value
    if not isinstance(value, list):
        raise ValueError(f'"{name}" is a {type(value).__name__}, not a string or a list of messages')
    messages = tuple(_message(message, number, name) for number, message in enumerate(value))
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f'"{name}" is empty')
    if messages[-1]["role"] == "assistant":
        raise ValueError(f'"{name}" ends with the assistant\'s answer: leave out what the model is to learn to say')
    return messages


def _message(message: Any, number: int, name: str) -> Message:
    if isinstance(message, dict):
        message = {k: v for k, v in message.items() if v is not None}  # tables give every message all fields
        content = message.get("content")
        if isinstance(content, list):
            content = message["content"] = _joined(content, f'message {number} of "{name}"')
        role = message.get("role")
        if isinstance(content, str) and isinstance(role, str) and role:
            return message
    raise ValueError(f'message {number} of "{name}" is not an object with "role" and "content" as strings')


def _joined(parts: list[Any], where: str) -> str:
    """Content in parts, all of them text, as one."""
    texts: list[str] = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"part {number} of {where} is {kind!r}; only text can be used")
        texts.append(part["text"])
    return "".join(texts)


def _is_json(prompt: Any) -> bool:
    """Whether a cell is text that holds chat messages."""
    if not (isinstance(prompt, str) and prompt.lstrip().startswith("[")):
        return False
    try:
        return not isinstance(as_prompt(decode(prompt), "prompt"), str)
    except ValueError:
        return False


def _chosen(key_name: str, given: str | None, usual: Iterable[str], columns: Columns, where: str) -> str | None:
    if given is not None:
        if given not in columns:
            raise DataError(
                f"{where}: there is no column {given!r}, which the source's key `{key_name}` names. "
                f"The columns are {_listed(columns)}"
            )
        return given
    found = [name for name in usual if name in columns]
    if len(found) > 1:
        raise DataError(
            f"{where}: the {key_name} may be in {' or '.join(map(repr, found))}; set the source's key `{key_name}` to "
            f"one of them. The columns are {_listed(columns)}"
        )
    return found[0] if found else None


def _at(cells: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value = cells.get(path[0])
    for name in path[1:]:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _listed(columns: Columns) -> str:
    return ", ".join(list(columns)[:40]) + (", …" if len(columns) > 40 else "")
