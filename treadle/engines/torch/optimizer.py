"""AdamW over float32 (or float64) weights, whatever precision computes.

Where the compute weights are bfloat16, each has a float32 master here: gradients are added up in float32, the master
is updated, and its rounding is copied back in place, so that whoever shares the compute weights sees the new ones.
Bytes per parameter: 2 compute + 4 master + 8 moments, and 4 of gradient during a step.

Where the weights are sharded, their float32 parts are the masters, as plain tensors in the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treadle.engines.torch.sharding import like, local, total_norm
from treadle.errors import TrainingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from treadle.engines.torch.config import Config

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did."""

    grad_norm: float  # before clipping
    learning_rate: float
    applied: bool  # False: the gradient was not finite and nothing changed


class Optimizer:
    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: Config,
        total_steps: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`parameters` by name, tied ones once; sharded over `mesh`, if there is one."""
        self.config, self.total_steps, self.mesh = config, total_steps, mesh
        self.taken = 0  # steps so far, skipped ones included: what the schedule goes by
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.compute = dict(parameters)
        self.masters = {n: self._master(p) for n, p in self.compute.items()}
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(_move_gradient, self.masters[n]))
            for n, p in self.compute.items()
            if _is_half(p)
        ]
        matrices = [p for p in self.masters.values() if p.ndim > 1]
        others = [p for p in self.masters.values() if p.ndim <= 1]  # norms and biases
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            fused=True,
        )

    def learning_rate(self, step: int) -> float:
        """Rate of the step with this number, from 0: a linear warm-up, then the schedule."""
        peak, warmup = self.config.learning_rate, self.config.warmup_steps
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        match self.config.schedule:
            case "constant":
                return peak
            case "linear":
                return peak * (1 - progress)
            case "cosine":
                return peak * (1 + math.cos(math.pi * progress)) / 2

    def step(self) -> Update:
        """Use up the gradient. One that is not finite changes nothing; too many in a row raise `TrainingError`."""
        for name, p in self.masters.items():
            sharded = self.compute[name]
            if sharded is not p and sharded.grad is not None:
                p.grad, sharded.grad = local(sharded.grad), None
            if p.grad is None:  # the same as a gradient of zero: momentum and weight decay go on
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in self.masters.values() if p.grad is not None]
        norm = total_norm(torch.nn.utils.get_total_norm(gradients), self.mesh)
        rate = self.learning_rate(self.taken)
        finite = bool(norm.isfinite())
        if finite:
            if self.config.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.config.max_grad_norm, norm)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
            self.publish()
        self.adamw.zero_grad()
        self.taken += 1
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped_steps:
            raise TrainingError(
                f"the gradient was not finite in {self.skipped_in_a_row} steps in a row (max_skipped_steps); "
                "lower learning_rate, or look at the last samples and advantages for what is not finite"
            )
        return Update(float(norm), rate, finite)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the compute weights, in place."""
        pairs = [(p, self.masters[n]) for n, p in self.compute.items() if _is_half(p)]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])  # pyright: ignore[reportPrivateImportUsage]

    @property
    def updates(self) -> int:
        """Steps that changed the weights."""
        return self.taken - self.skipped

    def tensors(self) -> dict[str, Tensor]:
        """The state, by name: every weight at full precision, and its moments once there are any."""
        named = {f"weight/{name}": p.detach() for name, p in self.masters.items()}
        for moment in MOMENTS if self.updates else ():
            named |= {f"{moment}/{name}": self.adamw.state[p][moment] for name, p in self.masters.items()}
        return {name: like(self.compute[name.partition("/")[2]], part) for name, part in named.items()}

    def counters(self) -> dict[str, int]:
        return {"taken": self.taken, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def prepare(self, counters: Mapping[str, int]) -> None:
        """Set the counters and lay out the moments that go with them, for `tensors` to be overwritten."""
        self.taken, self.skipped = counters["taken"], counters["skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        self.adamw.state.clear()
        for p in self.masters.values() if self.updates else ():
            step = torch.tensor(float(self.updates), device=p.device)
            self.adamw.state[p] = {"step": step, **{moment: torch.zeros_like(p) for moment in MOMENTS}}

    def move(self, device: torch.device) -> None:
        """Take masters and moments to a device. Weights that are their own masters stay where the model is."""
        for name, p in self.masters.items():
            if _is_half(self.compute[name]):
                p.data = p.data.to(device)
            elif self.mesh is not None:
                p.data = local(self.compute[name])
            state = self.adamw.state.get(p, {})
            for key, value in state.items():
                state[key] = value.to(device)

    def _master(self, p: nn.Parameter) -> nn.Parameter:
        if self.mesh is not None:
            return nn.Parameter(local(p))
        return nn.Parameter(p.detach().float()) if _is_half(p) else p

    def close(self) -> None:
        """Free masters, moments and gradients, and let go of the compute weights."""
        for hook in self._hooks:
            hook.remove()
        self.adamw.zero_grad()
        self.adamw.state.clear()
        self.adamw.param_groups.clear()
        self.masters.clear()
        self.compute.clear()


def _is_half(parameter: Tensor) -> bool:
    return parameter.dtype.itemsize < 4


def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    """Runs as soon as a compute weight has its gradient, so that the half-precision gradients never all exist."""
    assert parameter.grad is not None
    gradient, parameter.grad = parameter.grad.float(), None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
