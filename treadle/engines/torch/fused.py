"""Decoder layers of Llama-like models as few large steps, for training in float32 on a CPU.

Between two matrix products a Hugging Face layer makes a dozen passes over its activations, and keeps most of them for
the backward pass. Here norms, rotation, attention over the layout and the gated activation are one step each, forward
and backward, by the native library (`make native`). Layers keep their weights and modules; they take this way only
when a pass asks for it and no part of theirs has a hook, so that `Network.prove` compares it with the model's own.

Suffixes: S laid-out positions · E hidden size · I, O inputs and outputs of a product · D head size.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treadle.attention import ROTARY_FAMILY, sliding_window
from treadle.engines.torch.attention import TreeAttention
from treadle.native import library

if TYPE_CHECKING:
    from treadle.engines.torch.network import Network

logger = logging.getLogger(__name__)
_OPS: Any = torch.ops.treadle


def fuse(network: Network) -> bool:
    """Let the decoder layers take the fused way in passes whose plan says so; False where they cannot."""
    config = network.model.config
    kind: str = config.model_type
    fits = kind in ROTARY_FAMILY and config.hidden_act == "silu" and sliding_window(network.settings) is None
    if not fits or (network.dtype, network.device.type) != (torch.float32, "cpu"):
        return False
    if not library.built():
        logger.info("%s trains through its own layers; `make native` compiles faster ones", network.name)
        return False
    library.load()
    logger.info("%s trains through fused layers", network.name)
    for layer in network.layers:
        layer.forward = partial(_layer, layer, type(layer).forward, kind)
    return True


def _layer(layer: Any, usual: Any, kind: str, hidden_states: Tensor, plan: Any = None, **others: Any) -> Tensor:
    if not isinstance(plan, TreeAttention) or not plan.fused or not _plain(layer):
        return usual(layer, hidden_states, plan=plan, **others)
    attention, mlp = layer.self_attn, layer.mlp
    x_SE = hidden_states[0]
    h_SE = _norm(layer.input_layernorm, x_SE)
    qkv = _product(h_SE, attention.q_proj, attention.k_proj, attention.v_proj)
    size: int = attention.head_dim
    heads, keys = attention.q_proj.out_features // size, attention.k_proj.out_features // size
    if kind == "qwen3":
        q, k, v = qkv.split([heads * size, keys * size, keys * size], 1)
        q, k = (
            _norm(norm, x.contiguous().view(-1, size)).view(x.shape)
            for norm, x in ((attention.q_norm, q), (attention.k_norm, k))
        )
        qkv = torch.cat([q, k, v], 1)
    rotates = kind != "smollm3" or attention.use_rope
    turn = [x[0] for x in others["position_embeddings"]] if rotates else [None, None]
    attended = _Attention.apply(qkv, heads, keys, *turn, plan.segments, attention.scaling)
    x_SE = x_SE + _product(attended, attention.o_proj)
    gate_up = _product(_norm(layer.post_attention_layernorm, x_SE), mlp.gate_proj, mlp.up_proj)
    return x_SE[None] + _product(_Gate.apply(gate_up), mlp.down_proj)[None]  # FSDP wants no view


def _plain(layer: Any) -> bool:
    """Whether its parts do what they are called: an adapter hooks into a linear layer, or stands in its place."""
    parts = [part for part in layer.modules() if part is not layer]
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    linears += (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return not hooked and all(type(linear) is nn.Linear for linear in linears)


def _norm(norm: Any, x: Tensor) -> Tensor:
    return _Norm.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[return-value]


def _product(x_SI: Tensor, *linears: nn.Linear) -> Tensor:
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears] if linears[0].bias is not None else []
    return _Product.apply(x_SI, len(weights), *weights, *biases)  # type: ignore[return-value]


class _Norm(torch.autograd.Function):
    """Root-mean-square norm of rows (Zhang, Sennrich 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _OPS.add_norm(x, None, weight, eps, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_OPS.norm_backward(grad.contiguous(), *ctx.saved_tensors, ctx.eps), None


class _Product(torch.autograd.Function):
    """Several linear layers of one input, their outputs side by side: their shares of the input's gradient are summed
    by the products themselves."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, count: int, *weights_and_biases: Tensor) -> Tensor:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.save_for_backward(x_SI, *weights)
        ctx.biased = bool(biases)
        out_SO = x_SI.new_empty(len(x_SI), sum(len(weight_OI) for weight_OI in weights))
        for i, (part, weight_OI) in enumerate(zip(_parts(out_SO, weights), weights, strict=True)):
            if biases:
                torch.addmm(biases[i], x_SI, weight_OI.T, out=part)
            else:
                torch.mm(x_SI, weight_OI.T, out=part)
        return out_SO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_SI, *weights = ctx.saved_tensors
        parts = _parts(grad_SO, weights)
        grad_x_SI = parts[0] @ weights[0]
        for part, weight_OI in zip(parts[1:], weights[1:], strict=True):
            grad_x_SI.addmm_(part, weight_OI)
        biases = [part.sum(0) for part in parts] if ctx.biased else []
        return grad_x_SI, None, *(part.T @ x_SI for part in parts), *biases


def _parts(joined_SO: Tensor, weights: Any) -> tuple[Tensor, ...]:
    return joined_SO.split([len(weight_OI) for weight_OI in weights], 1)


class _Gate(torch.autograd.Function):
    """SiLU of the first half of the columns, times the second half (Shazeer 2020)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _OPS.silu_mul(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _OPS.silu_mul_backward(grad.contiguous(), *ctx.saved_tensors)


class _Attention(torch.autograd.Function):
    """Rotation of queries and keys (Su et al. 2021), then attention over the layout.

    `qkv` [S, (H + 2 K) · D] is rotated where it lies, for nothing else reads it. Scores are made again in the backward
    pass (Dao et al. 2022).
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        heads: int,
        keys: int,
        cosine_SD: Tensor | None,
        sine_SD: Tensor | None,
        segments: Tensor,
        scaling: float,
    ) -> Tensor:
        _OPS.rotate(qkv, heads, keys, None, None, 0.0, cosine_SD, sine_SD)
        out, norm = _OPS.tree_attend(qkv, heads, keys, segments, scaling)
        ctx.save_for_backward(qkv, out, norm, cosine_SD, sine_SD, segments)
        ctx.shape = (heads, keys, scaling)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, out, norm, cosine_SD, sine_SD, segments = ctx.saved_tensors
        heads, keys, scaling = ctx.shape
        found = _OPS.tree_attend_backward(grad.contiguous(), qkv, out, norm, heads, keys, segments, scaling)
        back_SD = None if sine_SD is None else -sine_SD
        _OPS.rotate(found, heads, keys, None, None, 0.0, cosine_SD, back_SD)
        return found, *(None,) * 6
