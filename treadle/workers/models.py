"""The roles of an RL program: a training engine and what an algorithm asks of it, behind the controller's verbs.

Suffixes: N trajectories · T tokens of all of them laid end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.algorithms.base import Algorithm
from treadle.controller.verbs import everywhere, sharded
from treadle.handles import Objective, TrainingEngine

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch
    from treadle.types import Statistics


class ReferenceWorker:
    """A frozen model whose log-probs the policy is compared with."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine

    @sharded
    def annotate(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"reference_logprob_T": self.engine.logprobs(batch)}


class TrainedWorker:
    """What the policy and the critic have in common."""

    role: str
    objective: Objective

    def __init__(self, engine: TrainingEngine, algorithm: Algorithm) -> None:
        self.engine = engine
        self.algorithm = algorithm

    @sharded
    def step(self, batch: Batch, state: Mapping[str, Any]) -> Statistics:
        """One optimizer step on one mini-batch. `state` is the controller's: this worker may hold a copy."""
        self.algorithm.restore(state)
        statistics = self.engine.step(batch, self.objective)
        return {f"{self.role}/{name}": value for name, value in statistics.items()}

    @everywhere
    def save(self, path: Path) -> None:
        self.engine.save(path)

    @everywhere
    def load(self, path: Path) -> None:
        self.engine.load(path)


class PolicyWorker(TrainedWorker):
    """The model that acts and learns."""

    role = "policy"

    def __init__(self, engine: TrainingEngine, algorithm: Algorithm) -> None:
        super().__init__(engine, algorithm)
        self.objective = Objective(
            loss=algorithm.loss,
            needs=algorithm.needs,
            select=algorithm.select if algorithm.two_pass else None,
        )

    @sharded
    def annotate(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"old_logprob_T": self.engine.logprobs(batch)}


class CriticWorker(TrainedWorker):
    """The model that predicts returns."""

    role = "critic"

    def __init__(self, engine: TrainingEngine, algorithm: Algorithm) -> None:
        super().__init__(engine, algorithm)
        self.objective = Objective(loss=algorithm.value_loss, needs=frozenset({"value"}))

    @sharded
    def annotate(self, batch: Batch) -> Mapping[str, Tensor]:
        value_T, bootstrap_N = self.engine.values(batch)
        return {"value_T": value_T, "bootstrap_N": bootstrap_N}
