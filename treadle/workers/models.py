"""The roles of an RL program: a training engine and what an algorithm asks of it, behind the controller's verbs.

Suffixes: N trajectories · T tokens of all of them laid end to end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from treadle.algorithms.base import Algorithm
from treadle.controller.host import LOOPBACK, free_port
from treadle.controller.verbs import everywhere, one, sharded
from treadle.handles import BackgroundSaving, Learned, Loss, Objective, Outputs, Scoring, TrainingEngine, Weights
from treadle.weights.stream import Address, Sent, Shipper

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch

T = TypeVar("T")


class ModelWorker:
    """A model on some ranks."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine

    @everywhere
    def offload(self) -> None:
        """Leave the devices to another role."""
        self.engine.offload()

    @everywhere
    def onload(self) -> None:
        self.engine.onload()


class ReferenceWorker(ModelWorker):
    """A frozen model whose log-probs the policy is compared with."""

    @sharded
    def annotate(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"reference_logprob_T": self.engine.quantities(batch, {"logprob"})["logprob_T"]}


class RewardModelWorker(ModelWorker):
    """A frozen model that scores whole trajectories."""

    @sharded
    def score(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"score_N": cast(Scoring, self.engine).scores(batch)}


class TrainedWorker(ModelWorker):
    """What the policy and the critic have in common."""

    role: str
    objective: Objective

    def __init__(self, engine: TrainingEngine, algorithm: Algorithm, alone: bool = True) -> None:
        """`alone`: no other rank has a part of this model."""
        super().__init__(engine)
        self.algorithm, self.alone = algorithm, alone
        self._saving: Callable[[], None] | None = None

    @sharded
    def step(self, batch: Batch, state: Mapping[str, Any]) -> Learned:
        """One optimizer step on one mini-batch. `state` is the controller's: this worker may hold a copy."""
        self.algorithm.restore(state)
        return self._learned(batch, self.objective)

    def _learned(self, batch: Batch, objective: Objective) -> Learned:
        statistics = self.engine.step(batch, objective)
        return Learned({f"{self.role}/{name}": value for name, value in statistics.items()})

    @everywhere
    def save(self, path: Path) -> bool:
        """Several ranks write in the background: each keeps a copy of its own part alone."""
        if self.alone:
            self.engine.save(path)
        else:
            self._saving = cast(BackgroundSaving, self.engine).save_async(path)
        return not self.alone

    @everywhere
    async def saved(self) -> None:
        if self._saving is not None:
            await asyncio.to_thread(self._saving)
            self._saving = None

    @everywhere
    def load(self, path: Path) -> None:
        self.engine.load(path)


class PolicyWorker(TrainedWorker):
    """The model that acts and learns."""

    role = "policy"

    def __init__(
        self,
        engine: TrainingEngine,
        algorithm: Algorithm,
        alone: bool = True,
        rank: int = 0,
        address: str = LOOPBACK,
    ) -> None:
        """`address`: by which other machines reach this one."""
        super().__init__(engine, algorithm, alone)
        self._rank, self._address = rank, address
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

    @one
    def rendezvous(self) -> str:
        """host:port at which the sender of weights can be met."""
        return f"{self._address}:{free_port()}"

    @everywhere
    def publish(self, address: Address) -> Sent | None:
        """Send the weights to rollout engines in other processes; rank 0's account of it. All ranks gather them."""
        return self._first(self.engine.export(), lambda tensors: self._shipper.send(tensors, address))

    @everywhere
    def write(self, path: Path, source: str) -> None:
        """The policy as a Hugging Face directory, with the tokenizer and settings of the model in `source`."""
        from treadle.engines.torch.writing import write_model

        self._first(self.engine.export(), lambda tensors: write_model(tensors, path, source))

    def _first(self, tensors: Weights, use: Callable[[Weights], T]) -> T | None:
        """Rank 0 uses what all ranks gather together, to the last tensor: else the others would wait for it."""
        if self._rank > 0:
            for _ in tensors:
                pass
            return None
        tensors = iter(tensors)
        try:
            return use(tensors)
        finally:
            for _ in tensors:
                pass

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

    def __init__(self, engine: TrainingEngine, algorithm: Algorithm, alone: bool = True) -> None:
        super().__init__(engine, algorithm, alone)
        self.objective = Objective(loss=algorithm.value_loss, needs=frozenset({"value"}))

    @sharded
    def annotate(self, batch: Batch) -> Mapping[str, Tensor]:
        value_T, bootstrap_N = self.engine.values(batch)
        return {"value_T": value_T, "bootstrap_N": bootstrap_N}
