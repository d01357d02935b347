"""The decode step's parts by the native library (`kernels.cpp`), on a CPU.

Products read the weights where the model has them: nothing is copied, so nothing can be stale. Only where the processor
has instructions for bfloat16 products, those of bfloat16 models go to oneDNN, over copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from treadle.native import library
from treadle.rollout.embedded.cache import Row
from treadle.rollout.embedded.kernels import Projection, Rotation
from treadle.rollout.embedded.plain import fast_products, packed
from treadle.rollout.embedded.plans import Plan
from treadle.rollout.embedded.sampling import sample
from treadle.types import SamplingParams

TYPES = (torch.float32, torch.bfloat16)


class NativeKernels:
    """`kernels.Kernels` compiled for this processor."""

    name: Literal["torch", "native"] = "native"
    shares_prompts = True

    def __init__(self, dtype: torch.dtype) -> None:
        library.load()
        self._ops = torch.ops.treadle
        self.copies_weights = dtype == torch.bfloat16 and fast_products(dtype)
        self.activation = dtype if self.copies_weights else torch.float32
        self.cache_dtype: torch.dtype | None = dtype

    def projection(self, linears: Sequence[nn.Linear]) -> Projection:
        if self.copies_weights:
            return packed(linears, self.activation)
        biased = linears[0].bias is not None

        def product(x_SI: Tensor) -> Tensor:
            weights = [linear.weight for linear in linears]
            return self._ops.linear(x_SI, weights, [linear.bias for linear in linears] if biased else [])

        return product

    def add_norm(self, x_SE: Tensor, delta_SE: Tensor | None, weight_E: Tensor, eps: float) -> Tensor:
        return self._ops.add_norm(x_SE, delta_SE, weight_E, eps, self.activation)

    def rotate(self, qkv: Tensor, heads: int, groups: int, turn: Rotation) -> None:
        self._ops.rotate(qkv, heads, groups, turn.q_norm_D, turn.k_norm_D, turn.eps, turn.cosine_SD, turn.sine_SD)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._ops.silu_mul(gate_up)

    def order(self, row: Row) -> tuple[int, int]:
        """Rows that share a prompt stand together, so that it is read from memory once."""
        return (row.prompt.shelf.capacity, row.prompt.index) if row.prompt is not None else (0, 0)

    def decode_plan(self, rows: Sequence[Row], lengths: Sequence[int], device: torch.device) -> Plan:
        return PlacePlan(rows, lengths)

    def sample(
        self, logit_RV: Tensor, params_R: Sequence[SamplingParams], uniform_R: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        if any(p.temperature and (p.top_k or p.top_p < 1) for p in params_R):
            return sample(logit_RV.float(), params_R, uniform_R)
        temperature_R = torch.tensor([p.temperature for p in params_R])
        return self._ops.sample(logit_RV.contiguous(), temperature_R, torch.from_numpy(uniform_R))


class PlacePlan(Plan):
    """One new token for each row: every row attends over its own length, and to its prompt where the prompt is."""

    def __init__(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        super().__init__(max(lengths) + 1)
        self._shelves = list(dict.fromkeys(slot.shelf for r in rows for slot in (r.own, r.prompt) if slot is not None))
        number = {shelf: i for i, shelf in enumerate(self._shelves)}
        self._place = torch.tensor(
            [
                (
                    *((number[r.prompt.shelf], r.prompt.index) if r.prompt is not None else (0, 0)),
                    r.shared,
                    number[r.own.shelf],
                    r.own.index,
                    length - r.shared,
                )
                for r, length in zip(rows, lengths, strict=True)
            ]
        )

    def attend(self, layer: int, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scaling: float) -> Tensor:
        pairs = [shelf.of(layer, k_SKD.transpose(0, 1), v_SKD.transpose(0, 1)) for shelf in self._shelves]
        keys, values = [k for k, _ in pairs], [v for _, v in pairs]
        return torch.ops.treadle.attend(q_SHD, k_SKD, v_SKD, keys, values, self._place, scaling)
