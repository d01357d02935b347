"""Publishing: the policy's weights reach the rollout engine, and the engine proves that it uses them.

Every publish is attested before anything sampled under it may train:

1. *bytes*: what the engine holds equals what the trainer sent, tensor by tensor (nothing to compare where both use
   the same tensors);
2. *behaviour*: the engine samples a probe, and the policy must score its tokens as the engine did, and closer than the
   policy of the publish before would have, wherever the two differ by more than rounding. The probe is always the same
   request, so a cache that outlived a load shows, as do a tied head left old or an adapter that was never applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.batch import Batch
from treadle.errors import WeightSyncError
from treadle.types import Group, Kind, Max, Prompt, Request, Sample, Statistics

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.handles import Agent, Device, ModelHandle, OnPublish, RolloutHandle

Weights = Iterable[tuple[str, "Tensor"]]

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Nats that a probe token's log-prob may differ by, for trainer and engine cut their matrix products differently."""
ROUNDING = 8.0
"""A change of this many times the gaps seen so far is more than rounding."""


@dataclass
class LocalPublisher:
    """Publishes inside one process: by copy, or by stamping a version where trainer and engine share tensors."""

    policy: ModelHandle
    rollout: RolloutHandle
    device: Device
    probe: Prompt
    agent: Agent  # answers the probe in a few tokens
    tolerance: float
    on_publish: OnPublish
    sent: Callable[[], Weights] | None  # None: shared, nothing is copied
    held: Callable[[], Weights] | None
    _before: tuple[list[int], np.ndarray] | None = field(default=None, init=False)
    _gap: float = field(default=1e-6, init=False)  # the largest seen; at first some float32 rounding of a log-prob

    async def __call__(self, version: int) -> Statistics:
        await self.rollout.load(self.sent() if self.sent else None, version, self.on_publish)
        if self.sent is not None and self.held is not None:
            sent, held = self.sent, self.held
            await self.device.run(lambda: compare(sent(), held(), version), 0)
        return {"publish/probe_gap": Max(await self._attest(version))}

    async def _attest(self, version: int) -> float:
        """The largest difference on the probe, in nats."""
        (trajectory,) = await self.agent(Request(self.probe, Kind.EVALUATION), "probe.0", self.rollout)
        sampled = trajectory.version_T >= 0
        tokens, engine_C = trajectory.token_T[sampled].tolist(), trajectory.logprob_T[sampled]
        if (stamped := set(trajectory.version_T[sampled].tolist())) != {version}:
            raise WeightSyncError(f"version {version} was published, but the probe's tokens carry {sorted(stamped)}")
        whole = replace(trajectory, temperature=1.0)
        batch = Batch.pack([Group(0, self.probe, (Sample("probe", Kind.TRAIN, (whole,)),))])
        policy_C = (await self.policy.annotate(batch))["old_logprob_T"][batch.mask_T].numpy()
        gap = float(np.abs(engine_C - policy_C).max())
        if not gap <= self.tolerance:  # NaN must not pass
            raise WeightSyncError(
                f"version {version} did not reach the rollout engine: trainer and engine differ by {gap:.3g} nats on a "
                f"probe (at most {self.tolerance:g} at this precision). {_LOOKS_LIKE}"
            )
        if self._before is not None and self._before[0] == tokens:
            change = float(np.abs(self._before[1] - policy_C).max())
            behind = float(np.abs(self._before[1] - engine_C).max())
            if behind < gap and change > ROUNDING * max(behind, self._gap):
                raise WeightSyncError(
                    f"version {version} did not reach the rollout engine: on a probe it answers as the version before "
                    f"({behind:.3g} nats off), not as the trainer ({gap:.3g} nats off). {_LOOKS_LIKE}"
                )
        self._before = (tokens, policy_C)
        self._gap = max(self._gap, gap)
        return gap


_LOOKS_LIKE = "A stale cache, an old tied head or a weight that was not loaded looks like this"


def compare(sent: Weights, held: Weights, version: int) -> None:
    """Raise `WeightSyncError` naming the first tensor that did not arrive bit for bit."""
    import torch

    there = dict(held)
    for name, tensor in sent:
        if name not in there:
            raise WeightSyncError(f"version {version}: '{name}' was published but the rollout engine does not hold it")
        if there[name].dtype != tensor.dtype or not torch.equal(there[name], tensor):
            raise WeightSyncError(f"version {version}: '{name}' in the rollout engine differs from the trainer's")
