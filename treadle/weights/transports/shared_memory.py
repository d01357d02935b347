"""Weights through shared memory: the sender copies each tensor once, every receiver on the machine maps the same bytes.

Segments stay from one publish to the next, for fresh pages cost three times what copying does. Staged, there is one for
each bucket; otherwise two, used by turns.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch

from treadle.errors import WeightSyncError
from treadle.weights.transports import mailbox

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.weights.stream import Address, Bucket

_ALIGNMENT = 64


class _Segment:
    """A file in memory, mapped."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        """`size`: make it; None: open it."""
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if size is not None else 0)
        try:
            descriptor = os.open(path, flags, 0o600)
            try:
                if size is not None:
                    os.posix_fallocate(descriptor, 0, size)  # a full memory shows here; later it would kill the process
                self.map = mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            if size is None:
                raise WeightSyncError(f"{path}: weights cannot be read: {error}") from error
            path.unlink(missing_ok=True)
            raise WeightSyncError(
                f"no room for {size / 1e6:.0f} MB of weights in shared memory ({path.parent}): {error.strerror}. "
                "Make it larger, set rollout.weights.transport=files, or rollout.weights.staged=false with a small "
                "bucket_mb"
            ) from error
        self.path = path
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def there(self) -> bool:
        """Whether it can still be opened as it was made: some program may have swept it away."""
        try:
            return self.path.stat().st_size == len(self.map)
        except OSError:
            return False


class Sender(mailbox.PostingSender):
    """Copies into segments, which lie in the directory too."""

    host = True

    def __init__(self) -> None:
        super().__init__()
        self._segments: list[_Segment] = []

    def close(self) -> None:
        super().close()
        self._segments.clear()

    def put(self, bucket: Bucket) -> None:
        slot = self._count if self._address.staged else self._count % 2
        if slot < self._count:
            self._box.wait_taken(self._count - 2)
        offsets, end = [], 0
        for tensor in bucket.values():
            offsets.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        segment = self._segment(slot, end)
        tensors = []
        for (name, tensor), offset in zip(bucket.items(), offsets, strict=True):
            place = segment.bytes[offset : offset + tensor.nbytes]
            place.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        self._post({"segment": str(segment.path), "tensors": tensors})

    def _segment(self, slot: int, size: int) -> _Segment:
        size = max(size, 1)
        while len(self._segments) <= slot:
            self._segments.append(self._new(size))
        if len(self._segments[slot].map) < size or not self._segments[slot].there():
            self._segments[slot].path.unlink(missing_ok=True)
            self._segments[slot] = self._new(size)
        return self._segments[slot]

    def _new(self, size: int) -> _Segment:
        # A name that never was: a receiver may still have an older segment open, of another sender too.
        return _Segment(Path(self._address.place) / f"segment-{uuid4().hex}", size)


class Receiver:
    """Maps the sender's segments; they are not copied where a publish is staged."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._segments: dict[str, _Segment] = {}

    def buckets(self, address: Address) -> Iterator[Bucket]:
        for index, note in mailbox.notes(address):
            segment = self._segment(note["segment"])
            bucket = {name: _view(segment, *where) for name, *where in note["tensors"]}
            if not address.staged:
                bucket = {name: tensor.clone() for name, tensor in bucket.items()}
                mailbox.take(address, self._who, index)
            yield bucket
            del bucket  # not held while the next one is waited for

    def _segment(self, path: str) -> _Segment:
        if path not in self._segments:
            self._segments = {p: s for p, s in self._segments.items() if os.path.exists(p)}
            self._segments[path] = _Segment(Path(path))
        return self._segments[path]


def _view(segment: _Segment, dtype: str, shape: list[int], offset: int) -> Tensor:
    kind = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    if offset + size > len(segment.map):
        raise WeightSyncError(f"a segment of {len(segment.map)} bytes ends inside a tensor of {size} bytes at {offset}")
    return segment.bytes[offset : offset + size].view(kind).view(shape)
