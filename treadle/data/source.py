"""`RowSource`: rows by number → prompts in an order that a seed fixes, with an exact position.

The order of an epoch is a pure function of (seed, epoch), so a position is two numbers and a restart needs no replay.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treadle.config import Config, key
from treadle.data.shuffle import shuffled
from treadle.errors import DataError
from treadle.types import Message, Prompt

if TYPE_CHECKING:
    from treadle.data.rendering import Renderer
    from treadle.handles import Group, PromptSource

logger = logging.getLogger(__name__)

TOO_LONG = "longer than data.max_prompt_tokens"


class SourceConfig(Config):
    """Keys that every source has. A source of your own: `name: my.module:Class`, a class with a `Config`, made with
    `(config, renderer, order)`, which is a `PromptSource`; most need only subclass `RowSource`."""

    name: str = key("where prompts come from: a module of treadle.data, or my.module:Class")

    def check(self) -> None:
        """Look whether the data are there, before anything heavy is loaded. Raises DataError or ConfigError."""


@dataclass(frozen=True, slots=True)
class Order:
    """In which order rows are handed out, and how often. `epochs=None`: without end."""

    seed: int = 0
    shuffle: bool = False
    epochs: int | None = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One problem as data holds it: `Row(id="train.jsonl:17", prompt="What is 2 + 3?", answer="5")`."""

    id: str
    prompt: str | tuple[Message, ...]
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class RowSource(ABC):
    """A `PromptSource` over numbered rows. A subclass gives `__len__`, `row` and `fingerprint`.

    `skipped` counts, by reason, how often a row was kept out so far.
    """

    def __init__(self, renderer: Renderer, order: Order) -> None:
        self._renderer = renderer
        self._order = order
        self._epoch, self._position = 0, 0
        self._index = 0  # prompts handed out over the run
        self._kept = 0  # of them in this epoch
        self._shortest: int | None = None  # length of the shortest prompt kept out, tokens
        self.skipped: dict[str, int] = {}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, number: int) -> Row:
        """Row `number`, counted from 0."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the rows do: a run continues only over the data that it began with."""

    def next(self) -> Prompt | None:
        """The next prompt that fits the limit, or None after the last epoch.

        Raises DataError when an epoch held no prompt that fits: it would never end.
        """
        while self._order.epochs is None or self._epoch < self._order.epochs:
            if self._position == len(self):
                self._end_epoch()
                continue
            row = self.row(self._number())
            self._position += 1
            messages, token_ids = self._renderer(row.prompt, row.id)
            if len(token_ids) > self._renderer.max_tokens:
                self._skip(row, len(token_ids))
                continue
            self._kept += 1
            self._index += 1
            return Prompt(row.id, self._index - 1, messages, token_ids, row.answer, row.metadata)
        return None

    def feedback(self, group: Group) -> None:  # noqa: B027 (a hook: most sources have no use for it)
        """Rows come in a fixed order, whatever became of the ones before."""

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "index": self._index,
            "kept": self._kept,
            "shortest": self._shortest,
            "skipped": dict(self.skipped),
            "data": self.fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self.fingerprint:
            raise DataError(
                f"the data have changed since the checkpoint ({state['data']} then, {self.fingerprint} now), so the "
                "run cannot continue at its place: bring the old data back or start a new run directory"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._index, self._kept, self._shortest = state["index"], state["kept"], state["shortest"]
        self.skipped = dict(state["skipped"])

    def _number(self) -> int:
        """The row at this position of this epoch's order."""
        if not self._order.shuffle:
            return self._position
        return shuffled(self._position, len(self), f"{self._order.seed}/{self._epoch}")

    def _end_epoch(self) -> None:
        if not self._kept:
            raise DataError(
                f"all {len(self)} prompts are longer than data.max_prompt_tokens={self._renderer.max_tokens}, the "
                f"shortest has {self._shortest} tokens or more: raise the limit or shorten the prompts"
            )
        self._epoch, self._position, self._kept = self._epoch + 1, 0, 0

    def _skip(self, row: Row, length: int) -> None:
        if not self.skipped.get(TOO_LONG):
            logger.warning(
                "%s: the prompt has %d tokens or more, over data.max_prompt_tokens=%d: "
                "it is kept out, and others like it",
                row.id,
                length,
                self._renderer.max_tokens,
            )
        self.skipped[TOO_LONG] = self.skipped.get(TOO_LONG, 0) + 1
        self._shortest = min(length, self._shortest or length)


def prompts(source: PromptSource) -> list[Prompt]:
    """All prompts of a finite source, in order."""
    return list(iter(source.next, None))
