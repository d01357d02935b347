"""From hidden states to per-token quantities without ever holding the logits of a whole batch.

Suffixes: M trained positions · C positions of one chunk · V vocabulary · K given ids of a position · E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.handles import Outputs

if TYPE_CHECKING:
    from collections.abc import Set

    from treadle.handles import Quantity


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What an architecture does to its logits: x → cap · tanh(scale · x / cap)."""

    scale: float = 1.0  # Cohere multiplies, Granite divides
    cap: float | None = None  # Gemma 2 squeezes

    @classmethod
    def of(cls, settings: dict[str, Any]) -> LogitRule:
        """The rule that a Hugging Face configuration, as a dictionary, states."""
        scale = settings.get("logit_scale", 1.0) / settings.get("logits_scaling", 1.0)
        return cls(scale, settings.get("final_logit_softcapping"))

    def __call__(self, raw_CV: Tensor) -> Tensor:
        logit_CV = raw_CV if self.scale == 1.0 else raw_CV * self.scale
        return logit_CV if self.cap is None else self.cap * torch.tanh(logit_CV / self.cap)

    def backward(self, grad_CV: Tensor, logit_CV: Tensor) -> Tensor:
        """Gradient of the raw logits from that of the finished ones."""
        if self.cap is not None:
            grad_CV = grad_CV * (1 - (logit_CV / self.cap).square())
        return grad_CV if self.scale == 1.0 else grad_CV * self.scale


def accurate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What per-token quantities are kept in: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def logits(hidden_CE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, rule: LogitRule) -> Tensor:
    """Logits as the architecture defines them, in float32 (float64 for a float64 model); [C, V].

    The product itself is made in the weights' dtype, as the model's own head makes it.
    """
    raw_CV = F.linear(hidden_CE, weight_VE, bias_V)
    return rule(raw_CV.to(accurate_dtype(raw_CV.dtype)))


def quantities(
    hidden_ME: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    label_M: Tensor,
    given_MK: Tensor | None,
    temperature_M: Tensor,
    needs: Set[Quantity],
    rule: LogitRule,
    chunk: int,
) -> Outputs:
    """Log-prob of the labels and of the given ids, entropy and Σp² of softmax(logits / temperature), whichever are
    needed, with gradient.

    `chunk` rows of logits exist at a time; the backward pass makes them again.
    """
    wanted = ("entropy" in needs, "sum_p2" in needs)
    found = _Quantities.apply(hidden_ME, weight_VE, bias_V, label_M, given_MK, temperature_M, wanted, rule, chunk)
    return Outputs(*found)


class _Quantities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        label_M: Tensor,
        given_MK: Tensor | None,
        temperature_M: Tensor,
        wanted: tuple[bool, bool],
        rule: LogitRule,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        accurate = accurate_dtype(hidden_ME.dtype)
        logprob_M, entropy_M, sum_p2_M = (hidden_ME.new_empty(len(label_M), dtype=accurate) for _ in range(3))
        given_logprob_MK = None if given_MK is None else hidden_ME.new_empty(given_MK.shape, dtype=accurate)
        for at in _chunks(len(label_M), chunk):
            logit_CV = logits(hidden_ME[at], weight_VE, bias_V, rule).div_(temperature_M[at, None])
            norm_C = logit_CV.logsumexp(-1)
            logprob_M[at] = logit_CV.gather(-1, label_M[at, None])[:, 0] - norm_C
            if given_MK is not None and given_logprob_MK is not None:
                given_logprob_MK[at] = logit_CV.gather(-1, given_MK[at]) - norm_C[:, None]
            if any(wanted):
                p_CV = (logit_CV - norm_C[:, None]).exp_()
                entropy_M[at] = norm_C - torch.linalg.vecdot(p_CV, logit_CV)
                sum_p2_M[at] = torch.linalg.vecdot(p_CV, p_CV)
        ctx.save_for_backward(hidden_ME, weight_VE, bias_V, label_M, given_MK, temperature_M, entropy_M, sum_p2_M)
        ctx.rule, ctx.chunk = rule, chunk
        ctx.set_materialize_grads(False)
        return logprob_M, entropy_M if wanted[0] else None, sum_p2_M if wanted[1] else None, given_logprob_MK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_ME, weight_VE, bias_V, label_M, given_MK, temperature_M, entropy_M, sum_p2_M = ctx.saved_tensors
        accurate = accurate_dtype(hidden_ME.dtype)
        grad_hidden_ME = torch.empty_like(hidden_ME)
        # Summed over chunks in float32: bfloat16 would lose what the later chunks add.
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=accurate) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=accurate) if ctx.needs_input_grad[2] else None
        for at in _chunks(len(label_M), ctx.chunk):
            logit_CV = logits(hidden_ME[at], weight_VE, bias_V, ctx.rule)
            per_chunk = [None if g is None else g[at].reshape(-1, g[0].numel()) for g in grads]
            tempered_CV, given_CK = logit_CV / temperature_M[at, None], None if given_MK is None else given_MK[at]
            grad_CV = _softmax_backward(
                tempered_CV, label_M[at], given_CK, per_chunk, entropy_M[at, None], sum_p2_M[at, None]
            )
            grad_CV = ctx.rule.backward(grad_CV.div_(temperature_M[at, None]), logit_CV).to(hidden_ME.dtype)
            grad_hidden_ME[at] = grad_CV @ weight_VE
            if grad_weight_VE is not None:
                grad_weight_VE += grad_CV.T @ hidden_ME[at]
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        return grad_hidden_ME, grad_weight_VE, grad_bias_V, *(None,) * 6


def _softmax_backward(
    logit_CV: Tensor,
    label_C: Tensor,
    given_CK: Tensor | None,
    grads: list[Tensor | None],
    entropy_C1: Tensor,
    sum_p2_C1: Tensor,
) -> Tensor:
    """Gradient of the tempered logits z, with p = softmax(z):

    ∂ log p(label) = 1[label] - p        ∂ H = -p (log p + H)        ∂ Σp² = 2p (p - Σp²)
    """
    grad_logprob_C1, grad_entropy_C1, grad_sum_p2_C1, grad_given_CK = grads
    logp_CV = logit_CV.log_softmax(-1)
    p_CV = logp_CV.exp()
    grad_CV = torch.zeros_like(p_CV)
    if grad_logprob_C1 is not None:
        grad_CV.addcmul_(p_CV, grad_logprob_C1, value=-1).scatter_add_(-1, label_C[:, None], grad_logprob_C1)
    if grad_given_CK is not None and given_CK is not None:
        grad_CV.addcmul_(p_CV, grad_given_CK.sum(-1, keepdim=True), value=-1)
        grad_CV.scatter_add_(-1, given_CK, grad_given_CK)
    if grad_entropy_C1 is not None:
        grad_CV.addcmul_(p_CV * (logp_CV + entropy_C1), grad_entropy_C1, value=-1)
    if grad_sum_p2_C1 is not None:
        grad_CV.addcmul_(p_CV * (p_CV - sum_p2_C1), grad_sum_p2_C1, value=2)
    return grad_CV


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))
