"""Digests of tensors: what both sides of a publish compare, tensor by tensor, however the stream was cut."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

from treadle.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

Manifest = Mapping[str, str]
"""What each tensor is, by name: dtype, shape and a digest of its bytes."""

_GOLDEN, _OTHER = 0x1E3779B97F4A7C15, 0x42B2AE3D27D4EB4F
_PIECE = 1 << 24  # bytes that a host's thread digests at a time
_WORDS = 1 << 20  # a GPU's digest takes so many words at a time: 16 MB of help


def describe(tensor: Tensor) -> str:
    """`float32[49152, 576] 3f…`. The digest is XXH3 (128 bits) where the bytes are in the host's memory, of a large
    tensor that of its pieces' digests; on a GPU two sums of the words, weighted by odd functions of their positions,
    mod 2^64. All see a changed bit, and two elements that changed places."""
    raw = raw_bytes(tensor)
    digest = _host(raw) if raw.device.type == "cpu" else weighted(raw)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {digest}"


def compare(sent: Manifest, held: Manifest, version: int, who: str) -> None:
    """Raise `WeightSyncError` naming the first tensor of `who` that is not what was sent."""
    for name, what in sent.items():
        if name not in held:
            raise WeightSyncError(f"version {version}: '{name}' was published, but {who} does not hold it")
        if held[name] != what:
            raise WeightSyncError(
                f"version {version}: '{name}' in {who} differs from the trainer's: {held[name]} there, {what} here"
            )
    if extra := sorted(held.keys() - sent.keys()):
        raise WeightSyncError(f"version {version}: {who} holds '{extra[0]}', which was not published")


def raw_bytes(tensor: Tensor) -> Tensor:
    """Its bytes, flat, in its own memory if that is contiguous."""
    import torch

    # The last dimension is one that torch makes, for a single element's stride may be any.
    return tensor.detach().contiguous().reshape(-1).unsqueeze(-1).view(torch.uint8).reshape(-1)


def _host(raw: Tensor) -> str:
    import xxhash

    if raw.numel() <= _PIECE:
        return xxhash.xxh3_128_hexdigest(raw.numpy().data if raw.numel() else b"")
    pieces = (piece.numpy().data for piece in raw.split(_PIECE))
    return xxhash.xxh3_128_hexdigest(b"".join(_threads().map(xxhash.xxh3_128_digest, pieces)))


@cache
def _threads() -> ThreadPoolExecutor:
    """Memory gives more than one thread takes, and Python's lock is not held meanwhile."""
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads stay behind
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "treadle-digest")


def weighted(raw: Tensor) -> str:
    """The digest that needs nothing but arithmetic on tensors, so the bytes stay where they are."""
    import torch

    if raw.storage_offset() % 4:  # a slice of a larger tensor, which does not begin with a word
        raw = raw.clone()
    spare = -raw.numel() % 4
    words = torch.cat([raw, raw.new_zeros(spare)]).view(torch.int32) if spare else raw.view(torch.int32)
    sums = [0, 0]
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS].long()
        place = torch.arange(start, start + part.numel(), device=part.device)
        for i, factor in enumerate((_GOLDEN, _OTHER)):
            mixed = place * factor
            mixed ^= mixed >> 29
            sums[i] += int((part * (mixed * factor | 1)).sum())
    return "".join(f"{total & (1 << 64) - 1:016x}" for total in sums)
