"""One publish to engines in other processes, as both the publisher and the engines see it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.errors import WeightSyncError
from treadle.weights.digest import Manifest, compare
from treadle.weights.stream import Address, Sent


class MovedOn(WeightSyncError):
    """The policy's weights are no longer those of the version that was asked for."""


@dataclass(frozen=True)
class Shipment:
    """`sent` is resolved when the sender has handed everything over; what arrived is verified against it."""

    address: Address
    version: int
    expected: Manifest | None = None  # what this version's publish sent: others must be the same
    sent: asyncio.Future[Sent] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def verify(self, who: str, manifests: Sequence[Manifest]) -> None:
        """Raise `WeightSyncError` naming the first tensor that a process of `who` got otherwise than it was sent."""
        sent = await asyncio.shield(self.sent)  # others wait for it, too
        if self.expected is not None and sent.manifest != self.expected:
            raise MovedOn(f"the policy has left version {self.version}")
        for manifest in manifests:
            compare(sent.manifest, manifest, self.version, f"rollout engine {who}")
