"""Attention over packed trajectories: each token sees its own trajectory up to itself, and nothing is padded.

Suffixes: H query heads · K key/value heads · S packed positions · D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedAttention:
    """The `AttentionPlan` of trajectories of these lengths, laid end to end."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.longest = max(self.lengths)
        self.bounds_N1 = F.pad(torch.tensor(self.lengths, device=device).cumsum(0), (1, 0)).int()

    def __call__(self, _: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q [1, H, S, D] and k, v [1, K, S, D], rotated; the result [1, H, S, D]."""
        if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
            return self._flash(q, k, v, scaling)
        if q.device.type == "cpu" and q.dtype == torch.bfloat16:  # as exact as it can be, and 4 × faster backward
            return self._each(q.float(), k.float(), v.float(), scaling).to(q.dtype)
        return self._each(q, k, v, scaling)

    def _each(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        # `split`, not slices: its backward joins the parts once, where each slice would fill a whole zero tensor.
        parts = zip(*(x.split(self.lengths, dim=2) for x in (q, k, v)), strict=True)
        gqa = q.shape[1] != k.shape[1]
        return torch.cat(
            [F.scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=gqa) for part in parts],
            dim=2,
        )

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Variable-length FlashAttention. Only on a GPU; not run by the tests."""
        from torch.nn.attention.varlen import varlen_attn

        q_SHD, k_SKD, v_SKD = (x[0].transpose(0, 1) for x in (q, k, v))
        bounds_N1, longest, gqa = self.bounds_N1, self.longest, q.shape[1] != k.shape[1]
        result = varlen_attn(
            q_SHD,
            k_SKD,
            v_SKD,
            bounds_N1,
            bounds_N1,
            longest,
            longest,
            scale=scaling,
            window_size=(-1, 0),  # causal
            enable_gqa=gqa,
        )
        assert isinstance(result, Tensor)
        return result.transpose(0, 1)[None]
