"""The parts of a decode step that are not the model's business: products, norms, attention, sampling.

Two implementations do the same: plain PyTorch (`plain.py`), and a small C++ library (`native/`) where it was built.
Suffixes: S positions of a pass · R rows · E hidden size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from treadle.rollout.embedded.cache import Row
    from treadle.rollout.embedded.plans import Plan
    from treadle.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Rotation:
    """What happens to queries and keys before they attend: a norm of each head (or none), then a rotation (or none)."""

    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    cosine_SD: Tensor | None
    sine_SD: Tensor | None


Projection = Callable[["Tensor"], "Tensor"]
"""[S, inputs] to [S, outputs], in the kernels' activation type."""


class Kernels(Protocol):
    name: Literal["torch", "native"]
    copies_weights: bool  # projections hold copies, and must be made again when the weights have changed
    shares_prompts: bool  # rows attend to a prompt where it is; otherwise each row gets a copy of it
    activation: torch.dtype  # between the products; the residual stream is float32
    cache_dtype: torch.dtype | None  # None: that of the keys and values

    def projection(self, linears: Sequence[nn.Linear]) -> Projection:
        """Several linear layers of one input as one product, outputs side by side."""
        ...

    def add_norm(self, x_SE: Tensor, delta_SE: Tensor | None, weight_E: Tensor, eps: float) -> Tensor:
        """Add `delta_SE` to the float32 `x_SE` in place; the root-mean-square norm of the sum."""
        ...

    def rotate(self, qkv: Tensor, heads: int, groups: int, turn: Rotation) -> None:
        """Norm and rotate queries and keys of `qkv` [S, (H + 2 K) · D], in place."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half of the columns, times the second half."""
        ...

    def order(self, row: Row) -> tuple[int, int]:
        """Sorts the rows of a decode pass."""
        ...

    def decode_plan(self, rows: Sequence[Row], lengths: Sequence[int], device: torch.device) -> Plan:
        """One new token for each row, `lengths` positions of which are in the cache."""
        ...

    def sample(
        self, logit_RV: Tensor, params_R: Sequence[SamplingParams], uniform_R: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """As `sampling.sample`, for logits of any type."""
        ...
