"""Sending only what changed: indices and values of the elements whose bits differ from the last publish.

Late in training with a small learning rate most bfloat16 weights do not change in a step. An element costs an index
beside its value, so a tensor that changed much is sent whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from treadle.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

INDEX, VALUE = "#index", "#value"  # no module's name has a #
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Encoder:
    """The sender's side; keeps a copy of what it sent."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}
        self._held: set[str] = set()  # names that the receivers have since the last whole session
        self.elements = self.unchanged = 0  # of the session

    def begin(self, whole: bool) -> None:
        """Begin a session; `whole`: for receivers that may hold nothing."""
        self.elements = self.unchanged = 0
        if whole:
            self._held.clear()

    def encode(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """`tensor`, or the elements of it that changed (int32 [changed], and their values)."""
        new = tensor.detach().cpu().contiguous()
        self.elements += new.numel()
        last, held = self._last.get(name), name in self._held
        self._held.add(name)
        if last is None or last.shape != new.shape or last.dtype != new.dtype:
            self._last[name] = new.clone()
            yield name, new
            return
        flat = new.reshape(-1)
        bits = _BITS[new.element_size()]
        index = (flat.view(bits) != last.reshape(-1).view(bits)).nonzero()[:, 0].int()
        self.unchanged += new.numel() - index.numel()
        last.copy_(new)
        if not held or index.numel() * (4 + new.element_size()) >= new.nbytes or new.numel() >= 2**31:
            yield name, new
        else:
            yield name + INDEX, index
            yield name + VALUE, flat[index]


class Decoder:
    """The receiver's side; keeps a copy of what it received, and gives whole tensors out."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._index: tuple[str, Tensor] | None = None

    def decode(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by their own names. Raises `WeightSyncError` for a change of what is not held."""
        if name.endswith(INDEX):
            self._index = (name.removesuffix(INDEX), tensor.clone())  # the next bucket may lie in the same memory
        elif name.endswith(VALUE):
            of = name.removesuffix(VALUE)
            if self._index is None or self._index[0] != of or of not in self._held:
                raise WeightSyncError(f"changes of '{of}' arrived, but not what they change")
            held, index = self._held[of], self._index[1]
            if index.shape != tensor.shape:
                raise WeightSyncError(f"'{of}': {index.numel()} elements changed, {tensor.numel()} values arrived")
            held.view(-1)[index.long()] = tensor
            self._index = None
            yield of, held
        else:
            self._held[name] = tensor.detach().clone()
            yield name, self._held[name]
