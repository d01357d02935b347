"""Prompts of another source, and again those of them that the policy now sometimes solves.

The learnability of a prompt is the variance of its group's rewards, p·(1 - p) for rewards of 0 and 1: nothing can be
learnt from a prompt that every answer solves, or none (Rutherford et al., "No Regrets", 2024; for language models
Foster and Foerster, "Learning to Reason at the Frontier of Learnability", 2025). Instead of extra generations, the
groups that are trained anyway are the measure. A group with variance puts its prompt into a pool; `revisit` of the
prompts are drawn from the pool, each in proportion to its learnability (prioritised replay: Jiang et al.,
"Prioritized Level Replay", 2021), the others are fresh. A prompt that is drawn leaves the pool, and what comes of it
decides whether it returns. The data end when the fresh prompts do.
"""

from __future__ import annotations

import base64
import pickle
import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import pvariance
from typing import TYPE_CHECKING, Any

from treadle.config import key
from treadle.data.config import Source, make_source
from treadle.data.source import Order, SourceConfig
from treadle.types import Group, Kind, Prompt

if TYPE_CHECKING:
    from treadle.data.rendering import Renderer


class CurriculumConfig(SourceConfig):
    name: str = key("where prompts come from", default="curriculum")
    source: Source = key("source of the fresh prompts, e.g. {name: parquet, path: …}")
    revisit: float = key("share of the prompts that are taken from the pool while it has some", default=0.5, ge=0, lt=1)
    pool: int = key("learnable prompts kept at most; the least learnable go first", default=256, ge=1, le=1 << 20)

    def check(self) -> None:
        self.source.check()


class Curriculum:
    """A `PromptSource` over a `PromptSource`."""

    Config = CurriculumConfig

    def __init__(self, config: CurriculumConfig, renderer: Renderer, order: Order) -> None:
        self._config, self._seed = config, order.seed
        self._fresh = make_source(config.source, renderer, order)
        self._index = 0  # prompts handed out over the run
        self._pool: dict[str, tuple[Prompt, float]] = {}  # by id, with their learnability

    @property
    def skipped(self) -> Mapping[str, int]:
        return self._fresh.skipped

    def next(self) -> Prompt | None:
        prompt = self._again() or self._fresh.next()
        if prompt is None:
            return None
        self._pool.pop(prompt.id, None)
        self._index += 1
        return replace(prompt, index=self._index - 1)

    def feedback(self, group: Group) -> None:
        self._fresh.feedback(group)
        rewards = [s.reward.value for s in group.usable if s.kind is Kind.TRAIN and s.reward is not None]
        learnability = float(pvariance(rewards)) if rewards else 0.0  # exact: equal rewards give 0
        self._pool.pop(group.prompt.id, None)
        if learnability > 0:
            self._pool[group.prompt.id] = group.prompt, learnability
        if len(self._pool) > self._config.pool:
            del self._pool[min(self._pool, key=lambda name: self._pool[name][1])]

    def state(self) -> dict[str, Any]:
        # Pickled, for answers and metadata may hold what JSON does not.
        pool = base64.b64encode(pickle.dumps(self._pool)).decode()
        return {"index": self._index, "pool": pool, "fresh": self._fresh.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._fresh.restore(state["fresh"])
        self._index, self._pool = state["index"], pickle.loads(base64.b64decode(state["pool"]))

    def _again(self) -> Prompt | None:
        """A prompt of the pool, or None where a fresh one is due."""
        noise = random.Random(f"{self._seed}/{self._index}")
        if noise.random() >= self._config.revisit or not self._pool:
            return None
        prompts, weights = zip(*self._pool.values(), strict=True)
        return noise.choices(prompts, weights)[0]
