"""Publishing: the policy's weights reach the rollout engine, and the engine proves that it uses them.

Every publish is attested twice before anything sampled under it may train:

1. *bytes*: what the engine holds equals what the trainer sent, tensor by tensor (nothing to compare where both use
   the same tensors);
2. *behaviour*: a probe is the first request after the load, and the policy must score its tokens as the engine did.
   This catches what bytes cannot: a stale prefix cache, a tied head left old, an adapter that was never applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.batch import Batch
from treadle.errors import WeightSyncError
from treadle.types import Group, Kind, Max, Sample, Statistics

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.handles import Agent, Device, ModelHandle, OnPublish, RolloutHandle
    from treadle.types import Request

Weights = Iterable[tuple[str, "Tensor"]]


@dataclass
class LocalPublisher:
    """Publishes inside one process: by copy, or by stamping a version where trainer and engine share tensors."""

    policy: ModelHandle
    rollout: RolloutHandle
    device: Device
    probe: Request
    agent: Agent
    tolerance: float  # nats that a probe token's log-prob may differ by
    on_publish: OnPublish
    sent: Callable[[], Weights] | None  # None: shared, nothing is copied
    held: Callable[[], Weights] | None

    async def __call__(self, version: int) -> Statistics:
        await self.rollout.load(self.sent() if self.sent else None, version, self.on_publish)
        if self.sent is not None and self.held is not None:
            sent, held = self.sent, self.held
            await self.device.run(lambda: compare(sent(), held(), version), 0)
        return {"publish/probe_gap": Max(await self._probe(version))}

    async def _probe(self, version: int) -> float:
        trajectories = await self.agent(self.probe, f"probe/{version}.0", self.rollout)
        stamped = set(trajectories[0].version_T[trajectories[0].version_T >= 0].tolist())
        if stamped != {version}:
            raise WeightSyncError(f"version {version} was published, but the probe's tokens carry {sorted(stamped)}")
        sample = Sample("probe", Kind.TRAIN, tuple(trajectories))
        batch = Batch.pack([Group(0, self.probe.prompt, (sample,))])
        scored_T = (await self.policy.annotate(batch))["old_logprob_T"]
        gap = float((scored_T - batch.sampling_logprob_T)[batch.mask_T].abs().max())
        if not gap <= self.tolerance:  # NaN must not pass
            raise WeightSyncError(
                f"version {version} did not reach the rollout engine: trainer and engine differ by {gap:.3g} nats on a "
                f"probe (at most {self.tolerance:g} at this precision). A stale cache, an old tied head or a weight "
                "that was not loaded looks like this"
            )
        return gap


def compare(sent: Weights, held: Weights, version: int) -> None:
    """Raise `WeightSyncError` naming the first tensor that did not arrive bit for bit."""
    import torch

    there = dict(held)
    for name, tensor in sent:
        if name not in there:
            raise WeightSyncError(f"version {version}: '{name}' was published but the rollout engine does not hold it")
        if there[name].dtype != tensor.dtype or not torch.equal(there[name], tensor):
            raise WeightSyncError(f"version {version}: '{name}' in the rollout engine differs from the trainer's")
