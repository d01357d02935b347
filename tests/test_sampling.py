"""Sampling: the right distribution, its log-prob, and noise that depends on nothing but key and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.rollout.embedded.sampling import sample, truncate, uniforms
from treadle.types import SamplingParams

BITS = st.integers(0, 2**64 - 1)


def draw(logit_V: torch.Tensor, params: SamplingParams, uniform_R: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Many draws from one distribution."""
    rows = len(uniform_R)
    return sample(logit_V.expand(rows, -1), [params] * rows, uniform_R)


# ---------------------------------------------------------------------- noise


@given(st.lists(st.tuples(BITS, st.integers(0, 2**32)), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_noise_is_a_function_of_key_and_position(pairs: list[tuple[int, int]]) -> None:
    together = uniforms([n for n, _ in pairs], [p for _, p in pairs])
    alone = [uniforms([n], [p])[0] for n, p in reversed(pairs)]
    assert together.tolist() == alone[::-1]
    assert ((together > 0) & (together < 1)).all()


def test_noise_is_known() -> None:
    """The values themselves: recorded runs must sample the same after an upgrade."""
    known = [0.28176129772258507, 0.6262666033818561, 0.010883643394212439]  # by plain integer arithmetic
    assert uniforms([0, 1, 2**64 - 1], [0, 7, 123]).tolist() == known


def test_noise_is_uniform_and_uncorrelated_along_keys_and_positions() -> None:
    keys, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    grid = uniforms(keys.ravel().tolist(), positions.ravel().tolist()).reshape(300, 300)
    counts, _ = np.histogram(grid, bins=100, range=(0, 1))
    assert ((counts - 900) ** 2 / 900).sum() < 160  # χ² with 99 degrees of freedom: 160 is beyond p = 1e-4
    for one, next_to_it in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), next_to_it.ravel())[0, 1]) < 0.015


# ---------------------------------------------------------------------- the distribution


@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 255, 256, 257, 1000]), st.floats(0.2, 3))
@settings(max_examples=40, deadline=None)
def test_each_token_owns_an_interval_as_wide_as_its_probability(seed: int, vocabulary: int, temperature: float) -> None:
    """Inverse CDF: token v is drawn for u in [P(< v), P(≤ v)), so the middles of these intervals give every token."""
    logit_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    prob_V = (logit_V.double() / temperature).softmax(-1)
    edge_V = prob_V.cumsum(-1)
    clear_V = prob_V > 1e-5  # narrower than rounding in float32
    token_R, logprob_R = draw(logit_V, SamplingParams(temperature), (edge_V - prob_V / 2).numpy())
    assert token_R[clear_V].tolist() == torch.arange(vocabulary)[clear_V].tolist()
    torch.testing.assert_close(logprob_R[clear_V], prob_V.log()[clear_V].float(), atol=1e-5, rtol=0)


def test_frequencies_are_those_of_the_softmax() -> None:
    torch.manual_seed(0)
    logit_V = torch.randn(600) * 1.5
    token_R, _ = draw(logit_V, SamplingParams(), uniforms([11] * 60_000, list(range(60_000))))
    expected_V = logit_V.double().softmax(-1) * 60_000
    counts_V = token_R.bincount(minlength=600)
    assert ((counts_V - expected_V) ** 2 / expected_V).sum() < 740  # χ², 599 degrees of freedom, p ≈ 1e-4


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([5, 256, 700]),
    st.integers(0, 40),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([0.5, 1.0, 1.7]),
)
@settings(max_examples=60, deadline=None)
def test_logprob_is_that_of_the_truncated_distribution(
    seed: int, vocabulary: int, top_k: int, top_p: float, temperature: float
) -> None:
    logit_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    # by hand, in the order temperature, top-k, top-p
    prob_V = (logit_V.double() / temperature).softmax(-1)
    order = sorted(range(vocabulary), key=lambda v: -float(logit_V[v]))[: top_k or None]
    whole, kept, reached = sum(float(prob_V[v]) for v in order), [], 0.0
    for v in order:
        if reached >= top_p * whole - 1e-12 and top_p < 1:
            break
        kept.append(v)
        reached += float(prob_V[v])
    token_R, logprob_R = draw(logit_V, SamplingParams(temperature, top_k, top_p), uniforms([seed] * 200, range(200)))
    assert set(token_R.tolist()) <= set(kept)
    expected_R = (prob_V[token_R] / reached).log().float()
    torch.testing.assert_close(logprob_R, expected_R, atol=2e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [4, 256, 300])
def test_a_token_of_probability_zero_is_never_drawn(vocabulary: int) -> None:
    logit_V = torch.full((vocabulary,), -math.inf)
    logit_V[[1, 2]] = torch.tensor([0.3, -0.2])
    ends = np.array([2.0**-53, 1e-300, 0.5, 1 - 2.0**-53, np.nextafter(1, 0)])
    token_R, logprob_R = draw(logit_V, SamplingParams(), ends)
    assert set(token_R.tolist()) == {1, 2}
    assert logprob_R.isfinite().all()


def test_equal_logits_under_top_k_keep_exactly_k() -> None:
    kept = truncate(torch.zeros(1000), 10, 1.0).isfinite().nonzero()[:, 0]
    assert kept.tolist() == list(range(10))


def test_greedy_takes_the_largest_and_reports_the_unscaled_softmax() -> None:
    torch.manual_seed(1)
    logit_RV = torch.randn(3, 500)
    greedy = SamplingParams(temperature=0.0, top_k=1, top_p=0.1)
    token_R, logprob_R = sample(logit_RV, [greedy] * 3, np.array([0.1, 0.5, 0.9]))
    assert token_R.tolist() == logit_RV.argmax(-1).tolist()
    torch.testing.assert_close(logprob_R, logit_RV.log_softmax(-1).amax(-1), atol=1e-6, rtol=0)


def test_rows_with_different_parameters_do_not_disturb_each_other() -> None:
    torch.manual_seed(2)
    logit_RV = torch.randn(4, 300) * 2
    before = logit_RV.clone()
    params = [SamplingParams(), SamplingParams(0.0), SamplingParams(0.7, top_k=5), SamplingParams(1.3, top_p=0.6)]
    uniform_R = np.array([0.2, 0.4, 0.6, 0.8])
    token_R, logprob_R = sample(logit_RV, params, uniform_R)
    for i, p in enumerate(params):
        token, logprob = sample(logit_RV[i : i + 1], [p], uniform_R[i : i + 1])
        assert (token.item(), logprob.item()) == (token_R[i].item(), logprob_R[i].item())
    assert torch.equal(logit_RV, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_nan(bad: float) -> None:
    logit_RV = torch.randn(2, 300)
    logit_RV[0, 17] = bad
    _, logprob_R = sample(logit_RV, [SamplingParams()] * 2, np.array([0.5, 0.5]))
    assert logprob_R.isnan().tolist() == [True, False]
