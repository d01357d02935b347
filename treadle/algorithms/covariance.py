"""Covariance of log-prob and advantage, token by token, and choices by it. Suffix T: trained tokens of a mini-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def covariance(logprob_T: Tensor, advantage_T: Tensor) -> Tensor:
    """(log π − mean)·(A − mean) of each token, whose mean is their covariance; float64 (Cui et al. 2025, arXiv
    2505.22617, eq. 9)."""
    x_T, a_T = logprob_T.detach().double(), advantage_T.double()
    return (x_T - x_T.mean()) * (a_T - a_T.mean())


def largest(value_T: Tensor, share: float) -> Tensor:
    """The largest values, a `share` of all and at least one; bool. Equal ones stand or fall together."""
    if not len(value_T):
        return value_T > 0
    return value_T >= value_T.topk(max(int(share * len(value_T)), 1)).values[-1]


def drawn(value_T: Tensor, able_T: Tensor, share: float) -> Tensor:
    """A `share` of all tokens, at least one, drawn from those able; bool. All of these where they are fewer.

    The draw looks random but is a function of each value's bits: the order of tokens does not change it.
    """
    import torch

    count = min(max(int(share * len(value_T)), 1), int(able_T.sum()))
    if not count:
        return able_T
    bits_T = value_T.double().view(torch.int64)
    noise_T = (bits_T ^ (bits_T >> 29)) * 0x2545F4914F6CDD1D  # xorshift*, wraps around
    noise_T = ((noise_T ^ (noise_T >> 32)) & 0x7FFFFFFF).masked_fill(~able_T, -1)
    return able_T & (noise_T >= noise_T.topk(count).values[-1])
