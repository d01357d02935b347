"""All parts of a live RL system, as the loop sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.algorithms.base import Algorithm, Role
    from treadle.handles import Agent, ModelHandle, PromptSource, Publisher, RolloutHandle, Scorer, TrainedHandle
    from treadle.recipes.measure import Speed
    from treadle.runs.recorder import Recorder
    from treadle.types import Prompt


@dataclass(frozen=True)
class System:
    """Everything the loop drives. It cannot tell one process from a cluster, or one engine from another."""

    algorithm: Algorithm
    prompts: PromptSource
    held_out: list[Prompt]
    agent: Agent
    evaluator: Agent
    scorer: Scorer
    rollout: RolloutHandle
    publish: Publisher
    observers: Mapping[Role, ModelHandle]  # every role, to look at a batch
    learners: Mapping[Role, TrainedHandle]  # those that train, too
    record: Recorder
    speed: Speed | None = None  # None: nobody measured
