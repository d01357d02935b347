"""Drawing tokens: exact inverse-CDF sampling with noise that is a function of (key, position) and nothing else.

Suffixes: R rows · V vocabulary · C chunks of the vocabulary · W entries of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.types import SamplingParams

_CHUNK = 256  # about √V: sums of chunks, then one chunk, instead of a cumulative sum over the whole vocabulary
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TINY = torch.finfo(torch.float64).tiny


def uniforms(noise_R: Sequence[int], position_R: Sequence[int]) -> np.ndarray:
    """One number in (0, 1) for each (64-bit noise key, token position); float64 [R], 52 random bits.

    Two rounds of SplitMix64 (Steele, Lea, Flood 2014), counter-based: the first spreads the key, the second the
    position.
    """
    key_R, at_R = np.asarray(noise_R, np.uint64), np.asarray(position_R, np.uint64)
    bits_R = _mix(_mix(key_R + _GOLDEN) + at_R * _GOLDEN)
    return ((bits_R >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def sample(logits_RV: Tensor, params_R: Sequence[SamplingParams], uniform_R: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    logits_RV float32. Returns token_R (int64) and logprob_R (float32): the log-prob of the distribution drawn from,
    that is after temperature, top-k, then top-p, renormalised. Greedy rows (temperature 0) draw from a point mass,
    whose log-prob would always be 0; they report the log-prob at temperature 1 instead. A row whose logits are not
    finite numbers gets a log-prob of NaN.
    """
    greedy = [p.temperature == 0 for p in params_R]
    temperature_R = logits_RV.new_tensor([p.temperature or 1.0 for p in params_R])
    scaled_RV = logits_RV if bool((temperature_R == 1).all()) else logits_RV / temperature_R[:, None]
    cut = [i for i, p in enumerate(params_R) if not greedy[i] and (p.top_k or p.top_p < 1)]
    if cut:
        scaled_RV = scaled_RV.clone()
        for i in cut:
            scaled_RV[i] = truncate(scaled_RV[i], params_R[i].top_k, params_R[i].top_p)

    peak_R1 = scaled_RV.amax(-1, keepdim=True)
    weight_RV = (scaled_RV - peak_R1).exp_()
    token_R, total_R = _invert(weight_RV, torch.from_numpy(uniform_R).to(logits_RV.device))
    if any(greedy):
        token_R = torch.where(torch.tensor(greedy, device=token_R.device), scaled_RV.argmax(-1), token_R)
    chosen_R = (scaled_RV.gather(-1, token_R[:, None]) - peak_R1)[:, 0].double()
    return token_R, (chosen_R - total_R.log()).float()


def truncate(logit_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with -inf outside the `top_k` largest (0: all) and, of these, outside the smallest set whose probability
    reaches `top_p`. Among equal logits the lower ids stay."""
    order_V = logit_V.sort(descending=True, stable=True).indices
    kept_K = order_V[: top_k or None]
    if top_p < 1:
        prob_K = logit_V[kept_K].double().softmax(-1)
        kept_K = kept_K[prob_K.cumsum(-1) - prob_K < top_p]
    return torch.full_like(logit_V, float("-inf")).index_copy(0, kept_K, logit_V[kept_K])


def _invert(weight_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the cumulated weights pass `uniform_R` of their total, and that total (float64).

    Chunk sums are searched first, then one chunk. What is left for the chunk is rescaled to the chunk's own cumulated
    sum, and each search keeps strictly below its last entry, so rounding can never choose a token of weight zero.
    """
    vocabulary = weight_RV.shape[-1]
    spare = -vocabulary % _CHUNK
    padded_RV = F.pad(weight_RV, (0, spare)) if spare else weight_RV
    weight_RCW = padded_RV.view(len(weight_RV), -1, _CHUNK)
    sum_RC = weight_RCW.sum(-1).double()
    chunk_R, left_R, total_R = _search(sum_RC, uniform_R)
    chosen_RW = weight_RCW[torch.arange(len(weight_RV), device=weight_RV.device), chunk_R].double()
    within_R, _, _ = _search(chosen_RW, left_R)
    return (chunk_R * _CHUNK + within_R).clamp(max=vocabulary - 1), total_R


def _search(weight_RX: Tensor, fraction_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the cumulated weights pass a fraction of their total; the fraction of that entry which lies before it; the
    total."""
    cumulated_RX = weight_RX.cumsum(-1)
    total_R = cumulated_RX[:, -1]
    target_R = torch.minimum(fraction_R * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    at_R1 = torch.searchsorted(cumulated_RX, target_R[:, None], right=True).clamp(max=weight_RX.shape[-1] - 1)
    entry_R1 = weight_RX.gather(-1, at_R1)
    before_R1 = cumulated_RX.gather(-1, at_R1) - entry_R1
    fraction_R1 = ((target_R[:, None] - before_R1) / entry_R1.clamp(min=_TINY)).clamp(0, 1)
    return at_R1[:, 0], fraction_R1[:, 0], total_R


def _mix(value_R: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    value_R = (value_R ^ (value_R >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value_R = (value_R ^ (value_R >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value_R ^ (value_R >> np.uint64(31))
