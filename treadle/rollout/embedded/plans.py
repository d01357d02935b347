"""Who attends to whom in one pass of the rollout engine: the plans behind the attention hook.

Suffixes: S new positions of this pass, laid end to end · R rows · H query heads · K key/value heads · G = H / K ·
D head size · C capacity of a slot · L longest row of a shelf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.rollout.embedded.cache import Row, Shelf


class Plan(ABC):
    """An `attention.AttentionPlan`. Own decoders call `attend`, Hugging Face modules come through the hook."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.layers: set[int] = set()

    @abstractmethod
    def attend(self, layer: int, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scaling: float) -> Tensor:
        """Put the new keys and values in the cache; what the queries see, [S, H · D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        self.layers.add(layer)
        q_SHD, k_SKD, v_SKD = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        return self.attend(layer, q_SHD, k_SKD, v_SKD, scaling).view(q_SHD.shape).transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class Span:
    """New positions `start … stop` of one row; its earlier positions are in the cache."""

    row: Row
    start: int
    stop: int


class PromptPlan(Plan):
    """Many new tokens for each of a few rows: prompts, or what a preempted row had sampled."""

    def __init__(self, spans: Sequence[Span]) -> None:
        super().__init__(max(span.stop for span in spans))
        self._spans = spans

    def attend(self, layer: int, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scaling: float) -> Tensor:
        out_SHD, offset = torch.empty_like(q_SHD), 0
        for span in self._spans:
            new = slice(offset, offset := offset + span.stop - span.start)
            q, k, v = (x[new].transpose(0, 1) for x in (q_SHD, k_SKD, v_SKD))
            span.row.write(layer, span.start, k, v)
            mask = None
            if span.start:
                k, v = span.row.read(layer, span.stop)
                q = q.to(k.dtype)
                mask = q.new_ones((span.stop - span.start, span.stop), dtype=torch.bool).tril(span.start)
            attended_1HSD = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
            out_SHD[new] = attended_1HSD[0].transpose(0, 1)
        return out_SHD.flatten(1)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Rows of one shelf, slot by slot: the rows `rows` of the pass."""

    shelf: Shelf
    rows: slice
    index_R: Tensor
    at_R: Tensor  # positions that are in the cache
    longest: int
    hidden_R11L: Tensor | None


class ShelfPlan(Plan):
    """One new token for each row, in plain PyTorch: the rows of a shelf attend at once, padded to their longest."""

    masks = True

    def __init__(self, rows: Sequence[Row], lengths: Sequence[int], device: torch.device) -> None:
        """rows: all that are in the cache, in the order of `in_shelves`; lengths: positions already there."""
        super().__init__(max(lengths) + 1)
        self._stretches: list[_Stretch] = []
        begin = 0
        for shelf in dict.fromkeys(row.own.shelf for row in rows):
            part = slice(begin, begin := begin + len(shelf.slots))
            at_R, longest = torch.tensor(lengths[part], device=device), max(lengths[part]) + 1
            hidden = None
            if self.masks and min(lengths[part]) + 1 < longest:
                hidden = (torch.arange(longest, device=device) > at_R[:, None])[:, None, None]
            index_R = torch.arange(len(at_R), device=device)
            self._stretches.append(_Stretch(shelf, part, index_R, at_R, longest, hidden))

    def attend(self, layer: int, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scaling: float) -> Tensor:
        out = [self._stretch(layer, s, q_SHD[s.rows], k_SKD[s.rows], v_SKD[s.rows], scaling) for s in self._stretches]
        return torch.cat(out).to(q_SHD.dtype)

    @staticmethod
    def _stretch(layer: int, at: _Stretch, q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, scaling: float) -> Tensor:
        keys, values = at.shelf.of(layer, k_RKD.transpose(0, 1), v_RKD.transpose(0, 1))
        keys[at.index_R, :, at.at_R] = k_RKD.to(keys.dtype)
        values[at.index_R, :, at.at_R] = v_RKD.to(values.dtype)
        (rows, heads, size), groups = q_RHD.shape, keys.shape[1]
        # The query heads that share a key head become the rows of one matrix product: keys are never repeated.
        q_RKGD = q_RHD.reshape(rows, groups, heads // groups, size).to(keys.dtype)
        score_RKGL = torch.matmul(q_RKGD * scaling, keys[:rows, :, : at.longest].transpose(2, 3))
        if at.hidden_R11L is not None:
            score_RKGL = score_RKGL.masked_fill_(at.hidden_R11L, float("-inf"))
        prob_RKGL = score_RKGL.float().softmax(-1).to(values.dtype)
        return torch.matmul(prob_RKGL, values[:rows, :, : at.longest]).view(rows, heads * size)


def in_shelves(row: Row) -> tuple[int, int]:
    """The order of rows that `ShelfPlan` wants."""
    return (row.own.shelf.capacity, row.own.index)


class FlashPlan(ShelfPlan):
    """The same by variable-length FlashAttention. Only on a GPU; not run by the tests."""

    masks = False

    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Equal for plans that differ in lengths alone: a captured graph can serve them all."""
        return tuple(
            (len(s.at_R), s.shelf.capacity, *(keys.data_ptr() for keys, _ in s.shelf.layers.values()))
            for s in self._stretches
        )

    def take_lengths(self, other: FlashPlan) -> None:
        for mine, theirs in zip(self._stretches, other._stretches, strict=True):
            mine.at_R.copy_(theirs.at_R)

    @staticmethod
    def _stretch(layer: int, at: _Stretch, q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, scaling: float) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        keys, values = at.shelf.of(layer, k_RKD.transpose(0, 1), v_RKD.transpose(0, 1))
        keys[at.index_R, :, at.at_R] = k_RKD
        values[at.index_R, :, at.at_R] = v_RKD
        bounds_N1 = F.pad(at.index_R + 1, (1, 0)).int()
        attended = varlen_attn(
            q_RHD,
            keys.transpose(1, 2).flatten(0, 1),  # as they lie in memory: slot after slot, position after position
            values.transpose(1, 2).flatten(0, 1),
            bounds_N1,
            bounds_N1 * at.shelf.capacity,
            1,
            at.shelf.capacity,
            scale=scaling,
            enable_gqa=q_RHD.shape[1] != k_RKD.shape[1],
            seqused_k=(at.at_R + 1).int(),
        )
        assert isinstance(attended, Tensor)
        return attended.flatten(1)
