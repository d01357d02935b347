"""Prompts of several sources, mixed by weight.

    train:
      name: mixture
      sources:
        arithmetic: {weight: 3, source: {name: jsonl, path: sums.jsonl}}
        puzzles: {weight: 1, source: {name: parquet, path: puzzles.parquet}}

The mix is even, not drawn by lot: after any number of prompts each source has given its share of them to within one
prompt (earliest deadline first: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
Environment", 1973). A source that ends (`data.epochs` counts the passes over each) leaves the others to go on in the
proportion of their weights; the mixture ends with the last. Prompts are called by their source's name and their own
id, `puzzles/puzzles.parquet:17`, and those without `data_source` in their metadata get the source's name there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import StringConstraints

from treadle.config import key
from treadle.data.config import WeightedSource, make_source
from treadle.data.source import Order, SourceConfig
from treadle.errors import DataError
from treadle.types import Group, Prompt, noise_key

if TYPE_CHECKING:
    from treadle.data.rendering import Renderer

Name = Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]


class MixtureConfig(SourceConfig):
    name: str = key("where prompts come from", default="mixture")
    sources: dict[Name, WeightedSource] = key(
        "the sources by names of your choice (letters, digits, . _ -)", min_length=1
    )

    def check(self) -> None:
        for part in self.sources.values():
            part.source.check()


class Mixture:
    """A `PromptSource` of `PromptSource`s."""

    Config = MixtureConfig

    def __init__(self, config: MixtureConfig, renderer: Renderer, order: Order) -> None:
        """Raises DataError or ConfigError for a source that cannot be used."""
        self._sources = {
            name: make_source(part.source, renderer, replace(order, seed=noise_key(order.seed, name)))
            for name, part in config.sources.items()
        }
        self._weight = {name: Fraction(str(part.weight)) for name, part in config.sources.items()}
        self._index = 0  # prompts handed out over the run
        self._given = dict.fromkeys(self._sources, 0)  # by each source that has not ended, since the last one ended

    @property
    def skipped(self) -> Mapping[str, int]:
        return sum((Counter(source.skipped) for source in self._sources.values()), Counter())

    def next(self) -> Prompt | None:
        while self._given:
            name = self._due()
            prompt = self._sources[name].next()
            if prompt is None:
                self._given = {other: 0 for other in self._given if other != name}
                continue
            self._given[name] += 1
            self._index += 1
            metadata = {"data_source": name, **prompt.metadata}
            return replace(prompt, id=f"{name}/{prompt.id}", index=self._index - 1, metadata=metadata)
        return None

    def feedback(self, group: Group) -> None:
        """Tell the source that the group came from, which knows its prompts by their own ids."""
        name, _, own = group.prompt.id.partition("/")
        self._sources[name].feedback(replace(group, prompt=replace(group.prompt, id=own)))

    def state(self) -> dict[str, Any]:
        sources = {name: source.state() for name, source in self._sources.items()}
        return {"index": self._index, "given": self._given, "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        then, now = list(state["sources"]), list(self._sources)
        if then != now:
            raise DataError(
                f"the sources have changed since the checkpoint ({', '.join(then)} then, {', '.join(now)} now), so the "
                "run cannot continue at its place: bring the old ones back or start a new run directory"
            )
        self._index, self._given = state["index"], dict(state["given"])
        for name, source in self._sources.items():
            source.restore(state["sources"][name])

    def _due(self) -> str:
        """Of the sources whose share has begun, the one whose next prompt must come first to keep its share."""
        total, draw = sum(self._weight[name] for name in self._given), sum(self._given.values())
        share = {name: self._weight[name] / total for name in self._given}
        begun = [name for name, given in self._given.items() if given < share[name] * (draw + 1)]
        return min(begun, key=lambda name: (self._given[name] + 1) / share[name])
