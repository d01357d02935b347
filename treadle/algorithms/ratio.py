"""Probability ratios of two policies at the sampled tokens. Suffix T: trained tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch

SATURATION = 20.0
"""Nats. A log-ratio is held within ± this before it is exponentiated, so that a ratio is finite whatever the inputs
(e^20 ≈ 5e8); beyond it the ratio is constant and has no gradient."""


def ratio(logprob_T: Tensor, old_logprob_T: Tensor) -> Tensor:
    """π(token) / π_old(token), with gradient; exactly 1 where the log-probs are equal."""
    return (logprob_T - old_logprob_T).clamp(-SATURATION, SATURATION).exp()


def sequence_ratio(batch: Batch, logprob_T: Tensor, old_logprob_T: Tensor) -> Tensor:
    """(π(answer) / π_old(answer))^(1 / length): the geometric mean of an answer's ratios at each of its tokens, [T]."""
    mean_N = batch.sum_N(logprob_T - old_logprob_T) / batch.length_N.clamp(min=1)
    return mean_N.clamp(-SATURATION, SATURATION).exp()[batch.row_T]
