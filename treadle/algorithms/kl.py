"""Estimates of KL(policy ‖ reference) from the sampled tokens alone. Suffix T: trained tokens.

With x = log π(token) − log π_ref(token), tokens drawn from π (Schulman 2020, "Approximating KL divergence"):

====  ==================  =====================================  ==================================================
name  value               estimates the KL                       expected gradient, as a term of a loss
====  ==================  =====================================  ==================================================
k1    x                   without bias; can be negative          zero: says nothing
k2    x² / 2              with bias, small where π ≈ π_ref       that of KL(π ‖ π_ref): right
k3    e^(−x) − 1 + x      without bias, little variance, ≥ 0     that of KL(π_ref ‖ π), the other direction
abs   |x|                 not; a distance                        E[sign(x) ∇ log π]
====  ==================  =====================================  ==================================================

k1+, k3+ and abs+ have the value of their name and the gradient of k2, the right one. In a reward only the value
counts. All of it holds for tokens drawn from π itself: at the later optimizer steps of a batch it is approximate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from treadle.algorithms.ratio import SATURATION

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]

FAR = 1e4
"""Nats. Log-probs further apart than this count as this far, so that a square stays finite on any finite input."""


def kl(logprob_T: Tensor, reference_logprob_T: Tensor, estimator: Estimator) -> Tensor:
    """The estimate for each token, with the gradient that the table above names; exactly 0 for equal log-probs."""
    x_T = (logprob_T - reference_logprob_T).clamp(-FAR, FAR)
    half_square_T = x_T.square() / 2
    match estimator.removesuffix("+"):
        case "k1":
            value_T = x_T
        case "k2":
            value_T = half_square_T
        case "abs":
            value_T = x_T.abs()
        case _:
            back_T = (-x_T).clamp(max=SATURATION)
            value_T = back_T.expm1() - back_T
    if estimator.endswith("+"):
        return value_T.detach() + (half_square_T - half_square_T.detach())
    return value_T


def adapted(coefficient: float, measured: float, target: float) -> float:
    """The next KL coefficient: a proportional controller in log space (Ziegler et al. 2019, arXiv 1909.08593, §2.2).

    It moves by at most 2 % per step, towards the `target`, which has the unit of `measured` (here nats per token).
    """
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coefficient * (1 + 0.1 * error)
