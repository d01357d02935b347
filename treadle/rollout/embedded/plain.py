"""The decode step's parts in plain PyTorch, on any device.

On a CPU the products use copies of the weights, joined and laid out as oneDNN wants them; a bfloat16 model on a
processor without instructions for bfloat16 products is computed in float32, which is several times faster there.
Suffixes: S positions of a pass · R rows · E hidden size · O, I outputs and inputs of a product · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.rollout.embedded.cache import Row
from treadle.rollout.embedded.kernels import Projection, Rotation
from treadle.rollout.embedded.plans import FlashPlan, Plan, ShelfPlan, in_shelves
from treadle.rollout.embedded.sampling import sample
from treadle.types import SamplingParams

_USUAL_ROWS = 64  # that the layout of packed weights is chosen for; any number of rows may come
_FEW_ROWS = 4  # up to which the weights as they are take less time


class PlainKernels:
    """`kernels.Kernels` without a compiler."""

    name: Literal["torch", "native"] = "torch"
    copies_weights = True
    shares_prompts = False

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        cpu = device.type == "cpu"
        self.activation = dtype if not cpu or fast_products(dtype) else torch.float32
        # CPU kernels for a few query rows per head are several times slower in bfloat16 than in float32.
        self.cache_dtype = torch.float32 if cpu else None
        self._flash = not cpu and dtype in (torch.bfloat16, torch.float16)

    def projection(self, linears: Sequence[nn.Linear]) -> Projection:
        return packed(linears, self.activation)

    def add_norm(self, x_SE: Tensor, delta_SE: Tensor | None, weight_E: Tensor, eps: float) -> Tensor:
        if delta_SE is not None:
            x_SE += delta_SE
        return F.rms_norm(x_SE, (x_SE.shape[-1],), weight_E.float(), eps).to(self.activation)

    def rotate(self, qkv: Tensor, heads: int, groups: int, turn: Rotation) -> None:
        head_SND = qkv.view(len(qkv), heads + 2 * groups, -1)[:, : heads + groups]
        if turn.q_norm_D is not None and turn.k_norm_D is not None:
            for part, weight_D in ((head_SND[:, :heads], turn.q_norm_D), (head_SND[:, heads:], turn.k_norm_D)):
                part.copy_(F.rms_norm(part.float(), weight_D.shape, weight_D.float(), turn.eps))
        if turn.cosine_SD is not None and turn.sine_SD is not None:
            turned = head_SND.float()
            half = turned.shape[-1] // 2
            across = torch.cat((-turned[..., half:], turned[..., :half]), -1)
            head_SND.copy_((turned * turn.cosine_SD[:, None]).addcmul_(across, turn.sine_SD[:, None]))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def order(self, row: Row) -> tuple[int, int]:
        return in_shelves(row)

    def decode_plan(self, rows: Sequence[Row], lengths: Sequence[int], device: torch.device) -> Plan:
        return (FlashPlan if self._flash else ShelfPlan)(rows, lengths, device)

    def sample(
        self, logit_RV: Tensor, params_R: Sequence[SamplingParams], uniform_R: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        return sample(logit_RV.float(), params_R, uniform_R)


def fast_products(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for matrix products in this type."""
    if dtype != torch.bfloat16:
        return True
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_bf16") or able.get("avx512_bf16"))


def packed(linears: Sequence[nn.Linear], dtype: torch.dtype) -> Projection:
    """One product over a copy of the weights of several linear layers."""
    weight_OI = torch.cat([linear.weight.detach().to(dtype) for linear in linears])
    biases = [linear.bias.detach().to(dtype) for linear in linears if linear.bias is not None]
    bias_O = torch.cat(biases) if biases else None
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return lambda x_SI: F.linear(x_SI, weight_OI, bias_O)
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _USUAL_ROWS)
    as_it_is = linears[0].weight.dtype == dtype

    def product(x_SI: Tensor) -> Tensor:
        if as_it_is and len(x_SI) <= _FEW_ROWS:
            return torch.cat([F.linear(x_SI, linear.weight, linear.bias) for linear in linears], 1)
        return torch.ops.mkldnn._linear_pointwise(x_SI, laid_out, bias_O, "none", [], "")

    return product
