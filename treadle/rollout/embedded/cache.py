"""Keys and values of running sequences.

A *slot* holds the positions of one sequence, or of one prompt that several sequences share. Slots of one capacity stand
densely on a *shelf*: keys and values [R, K, C, D] for each layer, with C = 64, 128, 256 and so on; a slot that is full
moves to the next shelf. So nothing grows per token, memory is about twice what the tokens need at most, and all
sequences of a shelf can attend in one batched product without paying for a much longer one.

Suffixes: R slots · K key/value heads · C capacity · D head size · S new positions of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST = 64


@dataclass(eq=False, slots=True)
class Slot:
    shelf: Shelf
    index: int

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, stop, D] of the first positions: a view."""
        keys, values = self.shelf.layers[layer]
        return keys[self.index, :, :stop], values[self.index, :, :stop]

    def write(self, layer: int, start: int, key_KSD: Tensor, value_KSD: Tensor) -> None:
        keys, values = self.shelf.of(layer, key_KSD, value_KSD)
        keys[self.index, :, start : start + key_KSD.shape[1]] = key_KSD
        values[self.index, :, start : start + value_KSD.shape[1]] = value_KSD

    def copy_from(self, other: Slot, length: int) -> None:
        for layer in other.shelf.layers:
            self.write(layer, 0, *other.read(layer, length))


class Shelf:
    """Slots of one capacity; the i-th of `slots` has index i."""

    def __init__(self, capacity: int, dtype: torch.dtype | None) -> None:
        self.capacity, self._dtype = capacity, dtype
        self.slots: list[Slot] = []
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._room = 0  # slots that there is memory for

    def add(self, count: int) -> list[Slot]:
        needed = len(self.slots) + count
        if needed > self._room:
            self._room = max(needed, min(2 * self._room, self._room + 64))
            self.layers = {n: (self._grown(k), self._grown(v)) for n, (k, v) in self.layers.items()}
        new = [Slot(self, i) for i in range(len(self.slots), needed)]
        self.slots += new
        return new

    def retain(self, kept: Set[Slot]) -> None:
        """Forget all other slots; the last ones fill the holes."""
        stay = [s for s in self.slots if s in kept]
        if len(stay) == len(self.slots):
            return
        holes = [i for i, s in enumerate(self.slots[: len(stay)]) if s not in kept]
        movers = [s for s in self.slots[len(stay) :] if s in kept]
        self._copy([s.index for s in movers], self, holes)
        for slot, hole in zip(movers, holes, strict=True):
            slot.index, self.slots[hole] = hole, slot
        del self.slots[len(stay) :]

    def hand_over(self, leaving: Sequence[Slot], to: Shelf) -> None:
        """Move slots, contents and all, to a shelf of a larger capacity."""
        places = to.add(len(leaving))
        self._copy([s.index for s in leaving], to, [p.index for p in places])
        self.retain({*self.slots} - {*leaving})
        for slot, place in zip(leaving, places, strict=True):
            slot.shelf, slot.index = to, place.index
            to.slots[place.index] = slot

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, made the first time: for heads such as those of these tensors [K, …, D]."""
        if layer not in self.layers:
            self.layers[layer] = (self._fresh(key), self._fresh(value))
        return self.layers[layer]

    def _copy(self, sources: Sequence[int], to: Shelf, targets: Sequence[int]) -> None:
        if sources:
            for layer, (keys, values) in self.layers.items():
                their_keys, their_values = to.of(layer, keys[0], values[0])
                their_keys[targets, :, : self.capacity] = keys[sources]
                their_values[targets, :, : self.capacity] = values[sources]

    def _fresh(self, like: Tensor) -> Tensor:
        """Zeros, for a masked position must not hold a NaN."""
        heads, size, dtype = like.shape[-3 if like.dim() == 4 else 0], like.shape[-1], self._dtype or like.dtype
        if like.is_cuda:  # the heads of a position stand together, as variable-length attention reads them
            return like.new_zeros((self._room, self.capacity, heads, size), dtype=dtype).transpose(1, 2)
        return like.new_zeros((self._room, heads, self.capacity, size), dtype=dtype)

    def _grown(self, before: Tensor) -> Tensor:
        grown = self._fresh(before)
        grown[: len(self.slots)] = before[: len(self.slots)]
        return grown


class Shelves(Mapping[int, Shelf]):
    """Slots of all capacities; the shelves by capacity."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        """dtype: None for that of what is written first."""
        self._dtype = dtype
        self._shelves: dict[int, Shelf] = {}

    def __getitem__(self, capacity: int) -> Shelf:
        return self._shelves[capacity]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._shelves))

    def __len__(self) -> int:
        return len(self._shelves)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for shelf in self.values() for pair in shelf.layers.values() for x in pair)

    def add(self, lengths: Sequence[int]) -> list[Slot]:
        """A slot for each length."""
        wanted = [self._capacity(length) for length in lengths]
        new = {c: iter(self._shelf(c).add(wanted.count(c))) for c in dict.fromkeys(wanted)}
        return [next(new[c]) for c in wanted]

    def make_room(self, length: Mapping[Slot, int]) -> None:
        """Move every slot that is too small for the length it needs."""
        small = [s for s, needed in length.items() if needed > s.shelf.capacity]
        moves: dict[tuple[Shelf, int], list[Slot]] = {}
        for slot in small:
            moves.setdefault((slot.shelf, self._capacity(length[slot])), []).append(slot)
        for (shelf, capacity), leaving in moves.items():
            shelf.hand_over(leaving, self._shelf(capacity))

    def retain(self, kept: Set[Slot]) -> None:
        """Forget all other slots; their memory stays for the next ones."""
        for shelf in self._shelves.values():
            shelf.retain(kept)

    def drop(self) -> None:
        """Give the memory back, contents and all."""
        self._shelves.clear()

    def _shelf(self, capacity: int) -> Shelf:
        return self._shelves.setdefault(capacity, Shelf(capacity, self._dtype))

    @staticmethod
    def _capacity(length: int) -> int:
        return max(_SMALLEST, 1 << (length - 1).bit_length())


@dataclass(eq=False, slots=True)
class Row:
    """Where one sequence is: its first `shared` positions in the slot of a prompt, the others in its own."""

    own: Slot
    prompt: Slot | None = None
    shared: int = 0

    def write(self, layer: int, start: int, key_KSD: Tensor, value_KSD: Tensor) -> None:
        self.own.write(layer, start - self.shared, key_KSD, value_KSD)

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, stop, D] of the first positions."""
        own = self.own.read(layer, stop - self.shared)
        if self.prompt is None:
            return own
        first = self.prompt.read(layer, self.shared)
        return torch.cat([first[0], own[0]], 1), torch.cat([first[1], own[1]], 1)
