"""Weights by collective broadcast: one process group of the sender (rank 0) and all receivers, over gloo or NCCL.

The group is this transport's own, whatever other groups a process is in, and is made anew when receivers come or go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from treadle.errors import WeightSyncError
from treadle.weights.digest import raw_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.weights.stream import Address, Bucket


class _Group:
    """A process group for broadcasts from rank 0."""

    def __init__(self, address: Address, rank: int) -> None:
        host, _, port = address.place.rpartition(":")
        wait, world = timedelta(seconds=address.timeout), len(address.receivers) + 1
        self.key = (address.place, address.receivers)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        store = TCPStore(host, int(port), world, is_master=rank == 0, timeout=wait)
        prefixed = PrefixStore("weights", store)
        if self.device.type == "cuda":  # not run by the tests
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            self._group: Any = dist.ProcessGroupNCCL(prefixed, rank, world, options)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, world, wait)

    def broadcast(self, tensor: Tensor) -> None:
        # As bytes: not every back end knows every dtype.
        self._group.broadcast(raw_bytes(tensor), 0).wait()

    def receive(self, dtype: str, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(list(shape), dtype=getattr(torch, dtype), device=self.device)
        self.broadcast(tensor)
        return tensor

    def tell(self, note: Any) -> None:
        body = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8).to(self.device)
        self.broadcast(torch.tensor([len(body)], device=self.device))
        self.broadcast(body)

    def hear(self) -> Any:
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.broadcast(length)
        body = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.broadcast(body)
        return json.loads(body.cpu().numpy().tobytes())


class Sender:
    """Rank 0; `address.place` is its host and a port that was free."""

    host = False

    def __init__(self) -> None:
        self._group: _Group | None = None

    def begin(self, address: Address) -> None:
        with _failures(address):
            if self._group is None or self._group.key != (address.place, address.receivers):
                self._group = None
                self._group = _Group(address, 0)
        self._address = address

    def put(self, bucket: Bucket) -> None:
        assert self._group is not None
        with _failures(self._address):
            self._group.tell([[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in bucket.items()])
            for tensor in bucket.values():
                self._group.broadcast(tensor.detach().to(self._group.device))

    def end(self) -> None:
        assert self._group is not None
        with _failures(self._address):
            self._group.tell(None)

    def close(self) -> None:
        self._group = None


class Receiver:
    """Rank 1 and up, in the order of `address.receivers`."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._group: _Group | None = None

    def buckets(self, address: Address) -> Iterator[Bucket]:
        with _failures(address):
            if self._group is None or self._group.key != (address.place, address.receivers):
                self._group = None
                self._group = _Group(address, address.receivers.index(self._who) + 1)
            group = self._group  # a publish that was given up may wait on its own while the next one goes on
            while (tensors := group.hear()) is not None:
                yield {name: group.receive(dtype, shape) for name, dtype, shape in tensors}


@contextmanager
def _failures(address: Address) -> Iterator[None]:
    """A peer that died or hung, as an error of ours."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise WeightSyncError(
            f"broadcasting weights from {address.place} to {', '.join(address.receivers)} failed within "
            f"{address.timeout:g} s: {error}"
        ) from error
