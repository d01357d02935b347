"""The torch training engine: any Hugging Face causal LM, on one device or with its weights spread over several.

Suffixes: T tokens of all trajectories laid end to end · M trained ones of one micro-batch · N trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.data.packing import plan
from treadle.engines.torch import checkpoint
from treadle.engines.torch.fused import fuse
from treadle.engines.torch.gradient import accumulate, number, scan
from treadle.engines.torch.mesh import is_first, together
from treadle.engines.torch.model import checkpoint_tensors
from treadle.engines.torch.network import Head, Network
from treadle.engines.torch.optimizer import Optimizer
from treadle.engines.torch.sharding import part, passes, shard, whole
from treadle.errors import ConfigError
from treadle.types import Max, Mean, Statistics

if TYPE_CHECKING:
    from collections.abc import Set

    from torch.distributed.device_mesh import DeviceMesh

    from treadle.batch import Batch
    from treadle.engines.torch.config import Config
    from treadle.handles import Objective, Quantity

CPU = torch.device("cpu")


class TorchEngine:
    """A `TrainingEngine`. `model` is public: a rollout engine in the same process generates with the very same weights,
    which a step changes in place.

    Per-token numbers are float32, or float64 for a float64 model.
    """

    def __init__(
        self,
        model: Any,
        config: Config,
        *,
        total_steps: int,
        head: Head = "lm",
        trainable: bool = True,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`model` from `load_model`, on its device. `total_steps`: where a falling schedule reaches 0.

        `head="value"` puts a scalar head on the model's last hidden states: its own if it is a reward model. Raises
        `ModelError` for an architecture that cannot run packed.

        With a mesh (`make_mesh`), `model` comes from `load_sharded`, and every method but `close` is a collective: all
        ranks call it, in the same order, each with its own rows, of which a rank may have none. What they find about
        rows is theirs, and what `step` returns is to be merged over ranks. The model cannot be used by itself then.
        """
        self.model = model
        self.config = config
        self.network = Network(model, head, config.head_chunk, config.activation_checkpointing)
        self.mesh = mesh
        model.requires_grad_(False)
        parameters = self.network.parameters() if trainable else {}
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        if mesh is not None:
            shard(self.network, mesh, trainable=trainable, cpu_offload=config.cpu_offload)
        elif config.cpu_offload or config.shard_ranks not in (None, 1):
            wrong = "cpu_offload=true" if config.cpu_offload else f"shard_ranks={config.shard_ranks}"
            raise ConfigError(f"trainer.{wrong} needs sharded weights, but this engine is alone; leave it out")
        self.device = self.network.device
        self.network.fused = fuse(self.network)
        self.network.prove()
        part(self.network.root)
        self._writer = ThreadPoolExecutor(1)  # one: ranks write in the same order
        self.optimizer = Optimizer(self.network.parameters(), config, total_steps, mesh) if trainable else None

    # ------------------------------------------------------------------ passes

    def quantities(self, batch: Batch, needs: Set[Quantity]) -> Mapping[str, Tensor]:
        """What the current weights say of every trained token, by the names of `Outputs`; [T], NaN elsewhere."""
        return scan(self.network, batch, needs, self.config.microbatch_tokens)

    @torch.no_grad()
    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value of the state in which each trained token was chosen, [T] (NaN elsewhere), and of the state after each
        trajectory's last token, [N] (0 unless truncated, and where nothing is trained)."""
        value_T = torch.full(batch.token_T.shape, math.nan, dtype=self.network.accurate)
        bootstrap_N = torch.zeros(len(batch), dtype=self.network.accurate)
        numbered = number(batch)
        for rows in passes(self.network, plan(batch, self.config.microbatch_tokens, everything=True)):
            part = numbered.select(rows)
            value_T[part.compact().extras_T["at"]], bootstrap_N[rows] = self.network.values(part)
        return value_T, bootstrap_N

    @torch.no_grad()
    def scores(self, batch: Batch) -> Tensor:
        """Value of the state after each trajectory's last token, [N]; padding at its end is none, as reward models are
        trained. Each has a pass of its own, so that no bit of it depends on what else is in the batch."""
        score_N = torch.zeros(len(batch), dtype=self.network.accurate)
        rows = batch.token_T.split(batch.length_N.tolist())
        for n in passes(self.network, range(len(batch))):
            score_N[n] = self.network.score(rows[n])
        return score_N

    def step(self, batch: Batch, objective: Objective) -> Statistics:
        """One optimizer step on one mini-batch.

        Beside the objective's metrics: "loss", "grad_norm" (before clipping), "learning_rate", "tokens" (trained ones
        of the mini-batch), "updated" (1, or 0 for a skipped step) and "skipped_steps" (since the run began). Raises
        `TrainingError` after too many steps in a row whose gradient was not finite.
        """
        optimizer = self._trained()
        found = accumulate(self.network, batch, objective, self.config.microbatch_tokens)
        update = optimizer.step()
        return found | {
            "updated": Mean(float(update.applied)),
            "grad_norm": Mean(update.grad_norm) if update.applied else Mean(0.0, 0.0),
            "learning_rate": Mean(update.learning_rate),
            "skipped_steps": Max(float(optimizer.skipped)),
        }

    # ------------------------------------------------------------------ state

    def export(self) -> Iterable[tuple[str, Tensor]]:
        """Full tensors by the names of a Hugging Face checkpoint in compute dtype, a layer at a time, tied ones once.

        Where a checkpoint's tensors are the model's, they share its memory; others (experts that the model holds
        stacked) are made as they are asked for.

        On a mesh all ranks iterate it to its end, and rank 0 alone is given the tensors.
        """
        if self.mesh is None:
            return checkpoint_tensors(self.model)
        return checkpoint_tensors(self.model, partial(whole, dtype=self.network.dtype))

    def save(self, path: Path) -> None:
        """Everything that training needs to go on bit for bit, into a new directory."""
        self._save(path, self._state())()

    def save_async(self, path: Path) -> Callable[[], None]:
        """`save`, in the background: what is written is the state of now. The result waits until all of it is on disk,
        and raises what kept it from that."""
        return self._save(path, checkpoint.staged(self._state()))

    def _save(self, path: Path, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        counters = self._trained().counters()
        together(lambda: checkpoint.begin(path, counters) if is_first(self.mesh) else None, self.mesh)
        return self._writer.submit(checkpoint.write, path, tensors, self._writers).result

    @cached_property
    def _writers(self) -> dist.ProcessGroup | None:
        """Ranks that write together, apart from what training tells them meanwhile."""
        return None if self.mesh is None else cast(dist.ProcessGroup, dist.new_group(backend="gloo"))

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote, on however many ranks. Raises `RunError` naming the file if it is missing,
        damaged or does not fit."""
        optimizer = self._trained()
        optimizer.prepare(together(lambda: checkpoint.read_counters(path, optimizer.counters()), self.mesh))
        checkpoint.read_tensors(path, self._state(), self.mesh)
        optimizer.publish()

    def offload(self) -> None:
        """Take all to the CPU, which is not for an engine whose model another one shares. Where that is the device
        everything is there already and nothing moves."""
        self._move(CPU)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # others, in other processes, count on it

    def onload(self) -> None:
        """Bring back what `offload` took."""
        self._move(self.device)

    def close(self) -> None:
        """Free the optimizer, once all that was saved is on disk. The model belongs to whoever loaded it."""
        self._writer.shutdown()
        if self.optimizer is not None:
            self.optimizer.close()
            self.optimizer = None

    def _state(self) -> dict[str, Tensor]:
        """What a checkpoint holds. Weights are the optimizer's masters: the compute weights are their rounding."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = {f"buffer/{n}": t for n, t in self.model.state_dict().items() if n not in parameters}
        return self._trained().tensors() | buffers

    def _move(self, device: torch.device) -> None:
        if self.config.cpu_offload:
            return
        self.network.root.to(device)
        if self.optimizer is not None:
            self.optimizer.move(device)

    def _trained(self) -> Optimizer:
        if self.optimizer is None:
            raise ValueError("this engine is not trainable, or closed")
        return self.optimizer


Engine = TorchEngine  # what `trainer: {name: torch}` stands for
