"""GAE as a scan against the plain recursion, over ragged packed sequences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import annotated, batches, group, quick, trajectory
from treadle.algorithms.gae import BLOCK, discounted_sums, gae
from treadle.algorithms.ppo import PPO, PPOConfig
from treadle.batch import Batch
from treadle.types import Ended, Provenance


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def plain_sums(term: list[float], lengths: list[int], decay: float) -> list[float]:
    """y_t = x_t + decay · y_{t+1}, a trajectory after the other."""
    result: list[float] = []
    for length in lengths:
        row, term = term[:length], term[length:]
        after, sums = 0.0, []
        for x in reversed(row):
            after = x + decay * after
            sums.append(after)
        result += reversed(sums)
    return result


def plain_gae(
    reward: list[float], value: list[float], sampled: list[bool], bootstrap: float, gamma: float, lam: float
) -> list[float]:
    """Advantages at every sampled token of one whole trajectory, walking back over all its tokens."""
    next_value, after, found = bootstrap, 0.0, []
    for r, v, action in zip(reversed(reward), reversed(value), reversed(sampled), strict=True):
        if action:
            after = r + gamma * next_value - v + gamma * lam * after
            next_value = v
            found.append(after)
    return found[::-1]


def test_by_hand() -> None:
    # Terminated: δ = (0 + 4 - 2, 1 + 0 - 4) = (2, -3). Truncated, after which the critic expects 6: δ = (3 + 6 - 1).
    advantage_T = gae(
        reward_T=torch.tensor([0.0, 1.0, 3.0]),
        value_T=torch.tensor([2.0, 4.0, 1.0]),
        bootstrap_N=torch.tensor([0.0, 6.0]),
        offset_N1=offsets([2, 1]),
        gamma=1.0,
        lam=0.5,
    )
    assert advantage_T.tolist() == [2 - 0.5 * 3, -3, 8]


def test_discount_by_hand() -> None:
    value_T, bootstrap_N = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([8.0])
    advantage_T = gae(torch.zeros(3), value_T, bootstrap_N, offsets([3]), gamma=0.5, lam=1.0)
    # δ = γV' - V = (0, 0, 0): a critic that agrees with itself leaves nothing over.
    assert advantage_T.tolist() == [0, 0, 0]


@quick
@given(
    st.lists(st.one_of(st.integers(0, 5), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])), max_size=6),
    st.sampled_from([0.0, 0.5, 0.95, 0.999, 1.0]),
    st.integers(0, 100),
)
def test_the_scan_is_the_recursion(lengths: list[int], decay: float, seed: int) -> None:
    term_T = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found_T = discounted_sums(term_T, offsets(lengths), decay)
    expected_T = torch.tensor(plain_sums(term_T.tolist(), lengths, decay), dtype=torch.float64)
    torch.testing.assert_close(found_T, expected_T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [1.0, 0.999, 0.95, 0.5, 1e-3])
def test_long_sequences_neither_overflow_nor_underflow(decay: float) -> None:
    lengths = [8192, 1, 0, BLOCK * BLOCK + 1]  # two levels of carries
    term_T = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(0))
    found_T = discounted_sums(term_T, offsets(lengths), decay)
    expected_T = torch.tensor(plain_sums(term_T.tolist(), lengths, decay))
    torch.testing.assert_close(found_T, expected_T, rtol=2e-6, atol=0)


def test_nothing_to_sum() -> None:
    assert discounted_sums(torch.zeros(0), offsets([]), 0.95).shape == (0,)
    assert gae(torch.zeros(0), torch.zeros(0), torch.ones(2), offsets([0, 0]), 1.0, 1.0).shape == (0,)


def test_a_trajectory_that_is_not_finite_stays_alone() -> None:
    term_T = torch.ones(3 * BLOCK)
    term_T[BLOCK + 1] = math.nan
    found_T = discounted_sums(term_T, offsets([BLOCK, BLOCK, BLOCK]), 1.0)
    assert bool(found_T[:BLOCK].isfinite().all())
    assert bool(found_T[2 * BLOCK :].isfinite().all())
    assert bool(found_T[BLOCK : BLOCK + 2].isnan().all())


def test_steps_over_what_the_environment_said() -> None:
    """The two sampled turns follow each other as if nothing stood between; a cut trajectory bootstraps."""
    rows = [trajectory("pssees", 1.0), trajectory("pssees", 1.0, Ended.TRUNCATED), trajectory("psss", 1.0)]
    batch = annotated(Batch.pack([group(0, rows)]))
    value_T = torch.full_like(batch.reward_T, math.nan).masked_scatter(batch.mask_T, torch.tensor([1.0, 2.0, 3.0] * 3))
    # A bootstrap value on a row that terminated must not be used, whatever it is.
    batch = batch.replace(value_T=value_T, bootstrap_N=torch.tensor([100.0, 5.0, math.nan]))
    done = PPO(PPOConfig(lam=1.0)).advantages(batch.compact())
    assert done.return_T is not None
    assert done.return_T.tolist() == pytest.approx([1, 1, 1, 6, 6, 6, 1, 1, 1])
    assert done.advantage_T is not None
    raw_T = torch.tensor([0.0, -1, -2, 5, 4, 3, 0, -1, -2])
    torch.testing.assert_close(done.advantage_T, (raw_T - raw_T.mean()) / (raw_T.std() + 1e-6))


@quick
@given(batches(), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.7, 1.0]))
def test_ppo_returns_are_those_of_a_walk_over_the_whole_trajectory(batch: Batch, gamma: float, lam: float) -> None:
    batch = annotated(batch)
    done = batch.expanded(PPO(PPOConfig(gamma=gamma, lam=lam)).advantages(batch.compact()))
    assert done.return_T is not None
    assert batch.value_T is not None
    assert batch.bootstrap_N is not None
    for row in range(len(batch)):
        of_row = batch.row_T == row
        sampled = (batch.provenance_T[of_row] == Provenance.SAMPLED).tolist()
        if batch.baseline_N[row]:
            assert bool(done.return_T[of_row].isnan().all())
            continue
        values = batch.value_T[of_row].tolist()
        bootstrap = float(batch.bootstrap_N[row]) if batch.truncated_N[row] else 0.0
        advantages = plain_gae(batch.reward_T[of_row].tolist(), values, sampled, bootstrap, gamma, lam)
        expected = [
            a + v for a, v in zip(advantages, [v for v, s in zip(values, sampled, strict=True) if s], strict=True)
        ]
        assert done.return_T[of_row][torch.tensor(sampled)].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
