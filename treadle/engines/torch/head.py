"""From hidden states to per-token quantities without ever holding the logits of a whole batch.

Suffixes: M trained positions · C positions of one chunk · V vocabulary · K given ids of a position · E hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from treadle.handles import Outputs

if TYPE_CHECKING:
    from collections.abc import Set

    from treadle.handles import Quantity

_KEPT_BYTES = 1 << 30  # of probabilities, from forward to backward


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

    def backward(self, grad_CV: Tensor, logit_CV: Tensor | None) -> Tensor:
        """Gradient of the raw logits from that of the finished ones, which only a cap needs."""
        if self.cap is not None and logit_CV is not None:
            grad_CV = grad_CV * (1 - (logit_CV / self.cap).square())
        return grad_CV if self.scale == 1.0 else grad_CV * self.scale


def accurate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What per-token quantities are kept in: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def logits(hidden_CE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, rule: LogitRule) -> Tensor:
    """Logits as the architecture defines them, in float32 (float64 for a float64 model); [C, V].

    The product itself is made in the weights' dtype, as the model's own head makes it.
    """
    raw_CV = F.linear(hidden_CE.to(weight_VE.dtype), weight_VE, bias_V)
    return rule(raw_CV.to(accurate_dtype(raw_CV.dtype)))


def quantities(
    hidden_ME: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    label_M: Tensor,
    given_MK: Tensor | None,
    temperature_M: Tensor | None,
    needs: Set[Quantity],
    rule: LogitRule,
    chunk: int,
) -> Outputs:
    """Log-prob of the labels and of the given ids, entropy and Σp² of softmax(logits / temperature), whichever are
    needed, with gradient. `temperature_M` None: 1 everywhere, which saves passes over the logits.

    `chunk` rows of logits exist at a time. The backward pass makes them again, but for the first ones, whose
    probabilities are kept in a bounded piece of memory.
    """
    wanted = ("entropy" in needs, "sum_p2" in needs)
    found = _Quantities.apply(
        hidden_ME, weight_VE, bias_V, label_M, given_MK, temperature_M, wanted, rule, chunk, torch.is_grad_enabled()
    )
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
        temperature_M: Tensor | None,
        wanted: tuple[bool, bool],
        rule: LogitRule,
        chunk: int,
        trains: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        accurate = accurate_dtype(hidden_ME.dtype)
        logprob_M, entropy_M, sum_p2_M, norm_M = (hidden_ME.new_empty(len(label_M), dtype=accurate) for _ in range(4))
        given_logprob_MK = None if given_MK is None else hidden_ME.new_empty(given_MK.shape, dtype=accurate)
        kept: deque[Tensor] = deque()  # of the first chunks
        room = _KEPT_BYTES if trains and rule.cap is None else 0
        for at in _chunks(len(label_M), chunk):
            logit_CV = logits(hidden_ME[at], weight_VE, bias_V, rule)
            if temperature_M is not None:
                logit_CV.div_(temperature_M[at, None])
            peak_C1 = logit_CV.amax(-1, keepdim=True)
            weight_CV = logit_CV.sub_(peak_C1).exp()  # in place: a new piece of memory costs as much as the arithmetic
            total_C = weight_CV.sum(-1)
            norm_C = total_C.log()
            norm_M[at] = norm_C + peak_C1[:, 0]
            logprob_M[at] = logit_CV.gather(-1, label_M[at, None])[:, 0] - norm_C
            if given_MK is not None and given_logprob_MK is not None:
                given_logprob_MK[at] = logit_CV.gather(-1, given_MK[at]) - norm_C[:, None]
            if wanted[0]:
                entropy_M[at] = norm_C - logit_CV.mul_(weight_CV).sum(-1) / total_C
            if wanted[1]:
                sum_p2_M[at] = torch.linalg.vecdot(weight_CV, weight_CV) / total_C.square()
            room -= weight_CV.nbytes
            if room >= 0:
                kept.append(weight_CV.div_(total_C[:, None]))
        ctx.save_for_backward(
            hidden_ME, weight_VE, bias_V, label_M, given_MK, temperature_M, entropy_M, sum_p2_M, norm_M
        )
        ctx.rule, ctx.chunk, ctx.kept = rule, chunk, kept
        ctx.set_materialize_grads(False)
        return logprob_M, entropy_M if wanted[0] else None, sum_p2_M if wanted[1] else None, given_logprob_MK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_ME, weight_VE, bias_V, label_M, given_MK, temperature_M, entropy_M, sum_p2_M, norm_M = ctx.saved_tensors
        accurate, compute = accurate_dtype(hidden_ME.dtype), weight_VE.dtype
        grad_hidden_ME = torch.empty_like(hidden_ME)
        # Summed over chunks in float32: bfloat16 would lose what the later chunks add.
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=accurate) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=accurate) if ctx.needs_input_grad[2] else None
        for at in _chunks(len(label_M), ctx.chunk):
            p_CV: Tensor | None = ctx.kept.popleft() if ctx.kept else None
            logit_CV = logp_CV = None
            if p_CV is None or grads[1] is not None:  # the entropy's gradient needs the log-probs themselves
                logit_CV = logits(hidden_ME[at], weight_VE, bias_V, ctx.rule)
                tempered_CV = logit_CV if temperature_M is None else logit_CV / temperature_M[at, None]
                logp_CV = tempered_CV - norm_M[at, None]
                p_CV = logp_CV.exp()
            assert p_CV is not None
            grad_CV = _softmax_backward(
                p_CV,
                logp_CV,
                label_M[at],
                None if given_MK is None else given_MK[at],
                [None if g is None else g[at].reshape(-1, g[0].numel()) for g in grads],
                entropy_M[at, None],
                sum_p2_M[at, None],
            )
            if temperature_M is not None:
                grad_CV.div_(temperature_M[at, None])
            grad_CV = ctx.rule.backward(grad_CV, logit_CV).to(compute)
            grad_hidden_ME[at] = grad_CV @ weight_VE
            if grad_weight_VE is not None and compute == accurate:
                grad_weight_VE.addmm_(grad_CV.T, hidden_ME[at])
            elif grad_weight_VE is not None:
                grad_weight_VE += grad_CV.T @ hidden_ME[at].to(compute)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        return grad_hidden_ME, grad_weight_VE, grad_bias_V, *(None,) * 7


def _softmax_backward(
    p_CV: Tensor,
    logp_CV: Tensor | None,
    label_C: Tensor,
    given_CK: Tensor | None,
    grads: list[Tensor | None],
    entropy_C1: Tensor,
    sum_p2_C1: Tensor,
) -> Tensor:
    """Gradient of the tempered logits z, with p = softmax(z), in the place of p:

    ∂ log p(label) = 1[label] - p        ∂ H = -p (log p + H)        ∂ Σp² = 2p (p - Σp²)
    """
    grad_logprob_C1, grad_entropy_C1, grad_sum_p2_C1, grad_given_CK = grads
    factor_CV = torch.zeros_like(entropy_C1)  # of p; one column unless entropy or Σp² have a part in it
    if grad_logprob_C1 is not None:
        factor_CV = factor_CV - grad_logprob_C1
    if grad_given_CK is not None:
        factor_CV = factor_CV - grad_given_CK.sum(-1, keepdim=True)
    if grad_entropy_C1 is not None and logp_CV is not None:
        factor_CV = factor_CV - grad_entropy_C1 * (logp_CV + entropy_C1)
    if grad_sum_p2_C1 is not None:
        factor_CV = factor_CV + 2 * grad_sum_p2_C1 * (p_CV - sum_p2_C1)
    grad_CV = p_CV.mul_(factor_CV)
    if grad_logprob_C1 is not None:
        grad_CV.scatter_add_(-1, label_C[:, None], grad_logprob_C1)
    if grad_given_CK is not None and given_CK is not None:
        grad_CV.scatter_add_(-1, given_CK, grad_given_CK)
    return grad_CV


def _chunks(total: int, limit: int) -> Iterator[slice]:
    """Parts of about equal size, none above the limit."""
    count = -(-total // limit)
    return (slice(total * i // count, total * (i + 1) // count) for i in range(count))
