"""Attention over laid-out trajectories: each token sees its own trajectory up to itself, and nothing is padded.

Suffixes: H query heads · K key/value heads · S laid-out positions · T positions of all trajectories end to end, each
with its own copy of what it shares · D head size · B segments of one bucket · L positions of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from treadle.engines.torch.layout import Layout, Segment, Tree

_FILLED = 0.75  # of a bucket's longest segment that its shortest has, at least


class TreeAttention:
    """The `AttentionPlan` of a layout."""

    def __init__(self, layout: Layout, device: torch.device, fused: bool = False) -> None:
        """`fused`: layers that can take the way of `fused.py` do."""
        self.fused = fused
        self.longest = max(layout.lengths)
        self.lengths = layout.lengths
        self.place_T = layout.place_T.to(device)
        self.trees = layout.trees
        segments = [s for tree in layout.trees for s in (tree.trunk, *tree.branches) if len(s)]
        self.buckets = [_Bucket.of(segments, device) for segments in _by_length(segments)]
        self.forks = [tree for tree in layout.trees if tree.branches and len(tree.crown)]

    @cached_property
    def segments(self) -> Tensor:
        """Each segment's first position and the one after its last, then the same of the trunk before it (or nothing),
        family by family; [segments, 4], on the CPU."""
        found = []
        for tree in self.trees:
            trunk, begin = tree.trunk, tree.trunk.start
            found += [
                (s.start, s.stop, *((begin, begin) if s is trunk else (begin, trunk.stop)))
                for s in (trunk, *tree.branches)
                if len(s)
            ]
        return torch.tensor(found, dtype=torch.int64).view(-1, 4)

    def __call__(self, _: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q [1, H, S, D] and k, v [1, K, S, D], rotated; the result [1, H, S, D]."""
        if q.device.type == "cpu":
            # In float32 even where the weights are not: as exact as it can be, and bfloat16's backward is 4 × slower.
            accurate = torch.promote_types(q.dtype, torch.float32)
            each = (x[0].transpose(0, 1).to(accurate) for x in (q, k, v))
            result_SHD: Any = _Attend.apply(*each, self, scaling)
            return result_SHD.to(q.dtype).transpose(0, 1)[None]
        flash = q.dtype in (torch.bfloat16, torch.float16)
        return self.unshared(q, k, v, scaling, self._flash if flash else self._each)

    def unshared(
        self, q: Tensor, k: Tensor, v: Tensor, scaling: float, attend: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """The same with a copy of the trunk for every branch: the plain definition, and the way of a GPU, where
        attention over short trunks costs nothing beside the matrix products that are still shared."""
        copies = [x.index_select(2, self.place_T) for x in (q, k, v)]
        result_T = (attend or self._each)(*copies, scaling=scaling)
        first_S = torch.empty(q.shape[2], dtype=torch.int64, device=q.device)
        first_S[self.place_T.flip(0)] = torch.arange(len(self.place_T), device=q.device).flip(0)
        return result_T.index_select(2, first_S)

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

        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q, k, v))
        bounds_N1 = F.pad(torch.tensor(self.lengths, device=q.device).cumsum(0), (1, 0)).int()
        result = varlen_attn(
            q_THD,
            k_TKD,
            v_TKD,
            bounds_N1,
            bounds_N1,
            self.longest,
            self.longest,
            scale=scaling,
            window_size=(-1, 0),  # causal
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(result, Tensor)
        return result.transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Segments of about the same length that attend to themselves in one call. The short ones are filled up with copies
    of their last position: later than all real ones, so none of these sees them."""

    index_BL: Tensor
    at: slice | None  # the same, where all follow each other without a gap
    filler_BL: Tensor | None  # None: all are of one length
    real_R: Tensor  # of the B·L positions those that are no fillers

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> _Bucket:
        at_L = torch.arange(max(len(s) for s in segments))
        last_B1 = torch.tensor([[s.stop - 1] for s in segments])
        index_BL = torch.tensor([[s.start] for s in segments]) + at_L
        filler_BL = index_BL > last_B1
        real_R = (~filler_BL).view(-1).nonzero()[:, 0]
        filled = filler_BL.to(device) if filler_BL.any() else None
        first, total = segments[0].start, index_BL.numel()
        dense = filled is None and torch.equal(index_BL.view(-1), torch.arange(first, first + total))
        at = slice(first, first + total) if dense else None
        return cls(index_BL.minimum(last_B1).to(device), at, filled, real_R.to(device))

    def gather(self, x_SHD: Tensor) -> Tensor:
        """[B, H, L, D]; [B, H, L] of [S, H]."""
        x_RHD = x_SHD[self.at] if self.at is not None else x_SHD.index_select(0, self.index_BL.view(-1))
        return x_RHD.view(*self.index_BL.shape, *x_SHD.shape[1:]).transpose(1, 2)

    def scatter(self, x_BHLD: Tensor, into_SHD: Tensor) -> None:
        """Lay real positions back."""
        x_RHD, index_R = x_BHLD.transpose(1, 2).flatten(0, 1), self.index_BL.view(-1)
        if self.at is not None:
            into_SHD[self.at] = x_RHD
            return
        if self.filler_BL is not None:
            x_RHD, index_R = x_RHD.index_select(0, self.real_R), index_R.index_select(0, self.real_R)
        into_SHD.index_copy_(0, index_R, x_RHD)


class _Attend(torch.autograd.Function):
    """Every segment attends to itself; branches attend to their trunk, too, and the two results are merged by their
    softmax normalisers. Backward, each part is given the merged ones and yields its exact share of the gradient, as in
    ring attention (Liu et al. 2023). Both ways use torch's CPU FlashAttention, whose normaliser the public function
    does not return."""

    @staticmethod
    def forward(ctx: Any, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, plan: TreeAttention, scaling: float) -> Tensor:
        out_SHD = torch.empty_like(q_SHD, memory_format=torch.contiguous_format)
        norm_SH = out_SHD.new_empty(out_SHD.shape[:2])
        for bucket in plan.buckets:
            own = (bucket.gather(x) for x in (q_SHD, k_SKD, v_SKD))
            out_BHLD, norm_BHL = _flash_forward(*own, 0.0, True, scale=scaling)
            bucket.scatter(out_BHLD, out_SHD)
            bucket.scatter(norm_BHL, norm_SH)
        for tree in plan.forks:
            q, k, v = _fork(tree, q_SHD, k_SKD, v_SKD)
            out, norm = _flash_forward(q, k, v, 0.0, False, scale=scaling)
            out_XHD, norm_XH = out[0].transpose(0, 1), norm[0].transpose(0, 1)
            own_XHD, own_XH = (x[tree.crown.start : tree.crown.stop] for x in (out_SHD, norm_SH))
            own_XHD.lerp_(out_XHD, (norm_XH - own_XH).sigmoid()[..., None])
            own_XH.copy_(torch.logaddexp(own_XH, norm_XH))
        ctx.save_for_backward(q_SHD, k_SKD, v_SKD, out_SHD, norm_SH)
        ctx.plan, ctx.scaling = plan, scaling
        return out_SHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SHD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_SHD, k_SKD, v_SKD, out_SHD, norm_SH = ctx.saved_tensors
        plan: TreeAttention = ctx.plan
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_SHD, k_SKD, v_SKD)]
        for bucket in plan.buckets:
            grad_BHLD, q, k, v, out, norm = (
                bucket.gather(x) for x in (grad_SHD, q_SHD, k_SKD, v_SKD, out_SHD, norm_SH)
            )
            if bucket.filler_BL is not None:
                grad_BHLD = grad_BHLD.masked_fill(bucket.filler_BL[:, None, :, None], 0)
            found = _flash_backward(grad_BHLD, q, k, v, out, norm, 0.0, True, scale=ctx.scaling)
            for whole, part in zip(grads, found, strict=True):
                bucket.scatter(part, whole)
        for tree in plan.forks:
            q, k, v = _fork(tree, q_SHD, k_SKD, v_SKD)
            crown = slice(tree.crown.start, tree.crown.stop)
            grad, out, norm = (x[crown].transpose(0, 1)[None] for x in (grad_SHD, out_SHD, norm_SH))
            found = _flash_backward(grad, q, k, v, out, norm, 0.0, False, scale=ctx.scaling)
            trunk = slice(tree.trunk.start, tree.trunk.stop)
            for whole, part, at in zip(grads, found, (crown, trunk, trunk), strict=True):
                whole[at] += part[0].transpose(0, 1)
        return *grads, None, None


_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _fork(tree: Tree, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of the branches, keys and values of their trunk; [1, heads, positions, D]."""
    crown, trunk = slice(tree.crown.start, tree.crown.stop), slice(tree.trunk.start, tree.trunk.stop)
    return tuple(x[at].transpose(0, 1)[None] for x, at in ((q_SHD, crown), (k_SKD, trunk), (v_SKD, trunk)))  # type: ignore[return-value]


def _by_length(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments in buckets in which they are of about the same length."""
    buckets: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: (-len(s), s.start)):
        if buckets and len(segment) >= _FILLED * len(buckets[-1][0]):
            buckets[-1].append(segment)
        else:
            buckets.append([segment])
    return buckets
