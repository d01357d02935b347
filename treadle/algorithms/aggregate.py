"""The normaliser rule: how per-token terms become one number.

    token-mean                 Σ / T
    sequence-mean-token-mean   Σᵢ (Σ / Tᵢ) / N
    sequence-mean-token-sum    Σ / N
    constant                   Σ / (N·L)

T and N count trained tokens and trajectories of the whole mini-batch (`Counts`), Tᵢ the trained tokens of trajectory
i. Each part of a mini-batch divides by the counts of the whole, so the parts' numbers add up to the whole's, however
it was cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch, Counts
    from treadle.handles import Term


def aggregate(term: Term, batch: Batch, counts: Counts) -> Tensor:
    """This part's addend of the loss: the terms of a compact batch of whole trajectories, summed, divided by the
    counts of the whole mini-batch and multiplied by the term's coefficient. 0 where there is nothing to sum."""
    if term.term_T.shape != batch.token_T.shape:
        raise ValueError(
            f"a loss term has shape {tuple(term.term_T.shape)}; it needs one value for each of the "
            f"{len(batch.token_T)} trained tokens, and the engine does the summing"
        )
    tokens, sequences = max(counts.tokens, 1), max(counts.sequences, 1)
    match term.aggregate:
        case "token-mean":
            total = term.term_T.sum() / tokens
        case "sequence-mean-token-mean":
            total = (batch.sum_N(term.term_T) / batch.trained_N.clamp(min=1)).sum() / sequences
        case "sequence-mean-token-sum":
            total = term.term_T.sum() / sequences
        case "constant":
            total = term.term_T.sum() / (sequences * term.length)
    return term.coefficient * total
