"""The roles of an RL program: a training engine and what an algorithm asks of it, behind the controller's verbs.

Suffixes: N trajectories · T tokens of all of them laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.algorithms.base import Algorithm
from treadle.controller.verbs import everywhere, sharded
from treadle.handles import Learned, Loss, Objective, Outputs, TrainingEngine
from treadle.weights.stream import Address, Sent, Shipper

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class ReferenceWorker:
    """A frozen model whose log-probs the policy is compared with."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine

    @sharded
    def annotate(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"reference_logprob_T": self.engine.quantities(batch, {"logprob"})["logprob_T"]}


class TrainedWorker:
    """What the policy and the critic have in common."""

    role: str
    objective: Objective

    def __init__(self, engine: TrainingEngine, algorithm: Algorithm) -> None:
        self.engine = engine
        self.algorithm = algorithm

    @sharded
    def step(self, batch: Batch, state: Mapping[str, Any]) -> Learned:
        """One optimizer step on one mini-batch. `state` is the controller's: this worker may hold a copy."""
        self.algorithm.restore(state)
        return self._learned(batch, self.objective)

    def _learned(self, batch: Batch, objective: Objective) -> Learned:
        statistics = self.engine.step(batch, objective)
        return Learned({f"{self.role}/{name}": value for name, value in statistics.items()})

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
        self._shipper = Shipper()

    @sharded
    def annotate(self, batch: Batch) -> Mapping[str, Tensor]:
        found = self.engine.quantities(batch, self.algorithm.observes)
        return {f"old_{name}": value for name, value in found.items()}

    @everywhere
    def publish(self, address: Address) -> Sent:
        """Send the weights to rollout engines in other processes; rank 0's account of it."""
        return self._shipper.send(self.engine.export(), address)

    @everywhere
    def close(self) -> None:
        """Give back what publishing holds: shared memory, files, a process group."""
        self._shipper.close()

    def _learned(self, batch: Batch, objective: Objective) -> Learned:
        """Where old log-probs are the current ones, they are noted as the objective sees them: no pass of their own."""
        if batch.old_logprob_T is not None:
            return super()._learned(batch, objective)
        import torch

        noted_T = torch.full(batch.token_T.shape, math.nan)

        @wraps(objective.loss)
        def loss(compact: Batch, outputs: Outputs) -> Loss:
            if outputs.logprob_T is not None:
                noted_T[compact.extras_T["place_T"]] = outputs.logprob_T.detach().to(noted_T)
            return objective.loss(compact, outputs)

        placed = batch.replace(extras_T={**batch.extras_T, "place_T": torch.arange(len(noted_T))})
        learned = super()._learned(placed, replace(objective, loss=loss))
        return replace(learned, seen={"old_logprob_T": noted_T})


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
