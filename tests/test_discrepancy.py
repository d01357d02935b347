"""What a step says of the gap between sampler and trainer, and of what was rejected for it: values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.batches import group, trajectory
from treadle.algorithms.correction import CorrectionConfig
from treadle.algorithms.grpo import GRPO, GRPOConfig
from treadle.batch import Batch
from treadle.recipes.measure import measure_batch
from treadle.types import Ended


def measured(batch: Batch, groups: list) -> dict[str, float]:  # type: ignore[type-arg]
    return {name: value.value for name, value in measure_batch(groups, batch, 3).items()}


def test_the_gap_by_hand() -> None:
    groups = [group(0, [trajectory("pss", 1.0), trajectory("ps", 0.0)])]
    batch = Batch.pack(groups)  # sampled with log-probs -0.2, -0.3 and -0.2
    x = [0.1, -0.2, 0.5]
    old_T = batch.sampling_logprob_T.clone()
    old_T[batch.mask_T] += torch.tensor(x)
    found = measured(batch.replace(old_logprob_T=old_T), groups)
    r = [math.exp(v) for v in x]
    assert found["discrepancy/kl"] == pytest.approx(sum(a - 1 - v for a, v in zip(r, x, strict=True)) / 3, rel=1e-4)
    reverse = sum(a * v - a + 1 for a, v in zip(r, x, strict=True)) / 3
    assert found["discrepancy/kl_reverse"] == pytest.approx(reverse, rel=1e-4)
    assert found["discrepancy/chi2"] == pytest.approx(sum((a - 1) ** 2 for a in r) / 3, rel=1e-4)
    whole = (math.exp(0.1 - 0.2) - 1) ** 2, (math.exp(0.5) - 1) ** 2
    assert found["discrepancy/chi2_sequence"] == pytest.approx(sum(whole) / 2, rel=1e-4)
    assert found["discrepancy/perplexity_sampler"] == pytest.approx(math.exp((0.2 + 0.3 + 0.2) / 3), rel=1e-5)
    assert found["discrepancy/perplexity_trainer"] == pytest.approx(math.exp((0.1 + 0.5 - 0.3) / 3), rel=1e-5)
    assert found["discrepancy/effective_share"] == pytest.approx(sum(r) ** 2 / sum(a * a for a in r) / 3, rel=1e-5)


def test_equal_policies_have_no_gap() -> None:
    groups = [group(0, [trajectory("pss", 1.0), trajectory("ps", 0.0)])]
    batch = Batch.pack(groups)
    found = measured(batch.replace(old_logprob_T=batch.sampling_logprob_T), groups)
    for name in ("kl", "kl_reverse", "chi2", "chi2_sequence"):
        assert found[f"discrepancy/{name}"] == 0
    assert found["discrepancy/effective_share"] == pytest.approx(1)


def test_what_is_rejected_is_counted() -> None:
    groups = [group(0, [trajectory("pss", 1.0), trajectory("pss", 0.0, Ended.TRUNCATED), trajectory("ps", 0.0)])]
    batch = GRPO(GRPOConfig(truncated="reject")).estimate(Batch.pack(groups))
    found = measured(batch, groups)
    assert found["correction/rejected"] == pytest.approx(1 / 3)
    assert found["correction/rejected_tokens"] == pytest.approx(2 / 5)

    batch = Batch.pack(groups)
    old_T = batch.sampling_logprob_T.clone()
    old_T[1] += 2.0  # one token of the first sample
    correction = CorrectionConfig(reject="token")
    done = GRPO(GRPOConfig(correction=correction)).estimate(batch.replace(old_logprob_T=old_T))
    found = measured(done, groups)
    assert found["correction/rejected"] == 0
    assert found["correction/rejected_tokens"] == pytest.approx(1 / 5)
    assert found["discrepancy/max"] == 0  # of the tokens that are trained


def test_a_gap_that_cannot_be_exponentiated_stays_finite() -> None:
    groups = [group(0, [trajectory("pss", 1.0), trajectory("ps", 0.0)])]
    batch = Batch.pack(groups)
    for far in (1e4, -1e4):
        found = measured(batch.replace(old_logprob_T=batch.sampling_logprob_T + far), groups)
        named = {n: v for n, v in found.items() if n.startswith("discrepancy/") and n != "discrepancy/correlation"}
        assert all(math.isfinite(v) for v in named.values()), named
        assert far > 0 or found["discrepancy/kl"] == pytest.approx(1e4, rel=1e-3)
