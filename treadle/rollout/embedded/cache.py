"""Keys and values of running sequences, and the attention over them.

One dense slot per running sequence and layer: keys [R, K, C, D], of which sequence `i` owns row `i` and uses its first
tokens. Suffixes: R rows · K key/value heads · G query heads that share one · C capacity · L longest row now ·
S new positions of this pass · D head size · H = K·G query heads.

Memory is rows × longest sequence: one very long sequence makes every row's slot as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_STEP = 64  # positions that capacity grows by, at least


class KeyValueCache:
    """Slots that grow in steps, never per token. Fresh memory is zero: a masked position must not hold a NaN."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._rows = 0
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for pair in self._layers.values() for x in pair)

    def drop(self) -> None:
        """Give the memory back; rows and their contents are gone."""
        self._rows = self._capacity = 0
        self._layers.clear()

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for this many rows of this many positions, contents kept."""
        if rows > self._rows:
            self._rows = min(self._max_rows, max(rows, 2 * self._rows))
        if capacity > self._capacity:
            wanted = max(capacity, self._capacity + self._capacity // 4)
            self._capacity = -(-wanted // _STEP) * _STEP
        for layer, pair in self._layers.items():
            self._layers[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def slots(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of one layer, [R, K, C, D] each; `key` and `value` [1, K, S, D] say what they must hold."""
        if layer not in self._layers:
            self._layers[layer] = (self._fresh(key), self._fresh(value))
        return self._layers[layer]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another's."""
        for pair in self._layers.values():
            for slots in pair:
                slots[target, :, :length] = slots[source, :, :length]

    def read(self, row: int, length: int) -> list[tuple[int, Tensor, Tensor]]:
        """A copy of a row's first positions, layer by layer."""
        return [(n, k[row, :, :length].clone(), v[row, :, :length].clone()) for n, (k, v) in self._layers.items()]

    def write(self, row: int, states: Iterable[tuple[int, Tensor, Tensor]]) -> None:
        """Put what `read` gave at the start of a row."""
        for layer, key, value in states:
            slots = self.slots(layer, key[None], value[None])
            slots[0][row, :, : key.shape[1]] = key
            slots[1][row, :, : value.shape[1]] = value

    def _fresh(self, like: Tensor) -> Tensor:
        # CPU kernels for a few query rows per head are several times slower in bfloat16 than in float32.
        dtype = torch.float32 if like.device.type == "cpu" else like.dtype
        return like.new_zeros((self._rows, like.shape[1], self._capacity, like.shape[3]), dtype=dtype)

    def _grown(self, slots: Tensor) -> Tensor:
        rows, heads, capacity, size = slots.shape
        if (rows, capacity) == (self._rows, self._capacity):
            return slots
        grown = slots.new_zeros((self._rows, heads, self._capacity, size))
        grown[:rows, :, :capacity] = slots
        return grown


@dataclass(frozen=True, slots=True)
class Span:
    """New positions `start … stop` of one row; its earlier positions are in the cache."""

    row: int
    start: int
    stop: int


class PackedPlan:
    """Many new tokens for each of a few rows, laid end to end: prompts, or what a preempted row had sampled."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span]) -> None:
        self._cache = cache
        self._spans = spans
        self.longest = max(span.stop for span in spans)
        self.layers: set[int] = set()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        self.layers.add(layer)
        keys, values = self._cache.slots(layer, k, v)
        out, offset = [], 0
        for span in self._spans:
            new = slice(offset, offset := offset + span.stop - span.start)
            keys[span.row, :, span.start : span.stop] = k[0, :, new]
            values[span.row, :, span.start : span.stop] = v[0, :, new]
            own_q, own_k, own_v, mask = q[:, :, new], k[:, :, new], v[:, :, new], None
            if span.start:
                own_q = own_q.to(keys.dtype)
                own_k, own_v = (slots[None, span.row, :, : span.stop] for slots in (keys, values))
                shape = (span.stop - span.start, span.stop)
                mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(span.start)
            attended = F.scaled_dot_product_attention(
                own_q, own_k, own_v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
            out.append(attended.to(q.dtype))
        return torch.cat(out, dim=2)


class DecodePlan:
    """One new token for each of the rows 0 … R-1: all rows attend at once, over slots padded to the longest."""

    def __init__(self, cache: KeyValueCache, length_R: Tensor) -> None:
        """length_R: positions already in the cache, int64."""
        self._cache = cache
        self._at_R = length_R
        self._row_R = torch.arange(len(length_R), device=length_R.device)
        self.longest = int(length_R.max()) + 1
        self._hidden_R11L = (torch.arange(self.longest, device=length_R.device) > length_R[:, None])[:, None, None]
        self.layers: set[int] = set()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        self.layers.add(layer)
        keys, values = self._cache.slots(layer, k, v)
        keys[self._row_R, :, self._at_R] = k[0].transpose(0, 1).to(keys.dtype)
        values[self._row_R, :, self._at_R] = v[0].transpose(0, 1).to(values.dtype)
        rows, heads = len(self._row_R), keys.shape[1]
        # The query heads that share a key head become the rows of one matrix product: keys are never repeated.
        q_RKGD = q[0].transpose(0, 1).reshape(rows, heads, -1, q.shape[-1]).to(keys.dtype)
        score_RKGL = torch.matmul(q_RKGD * scaling, keys[:rows, :, : self.longest].transpose(2, 3))
        prob_RKGL = score_RKGL.masked_fill_(self._hidden_R11L, float("-inf")).float().softmax(-1).to(values.dtype)
        out_RKGD = torch.matmul(prob_RKGL, values[:rows, :, : self.longest])
        return out_RKGD.to(q.dtype).reshape(1, rows, q.shape[1], -1).transpose(1, 2)
