"""Micro-batch planning: whole bundles, the budget, the same plan for a mini-batch alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_help import make_batch
from treadle.data.packing import balance, plan

rows = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=14)


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60))
def test_bins_hold_each_item_once_and_keep_to_the_capacity(sizes: list[int], capacity: int) -> None:
    bins = balance(sizes, capacity)
    assert sorted(i for items in bins for i in items) == list(range(len(sizes)))
    assert all(items for items in bins)
    assert all(len(items) == 1 or sum(sizes[i] for i in items) <= capacity for items in bins)


def test_bins_are_few_and_about_equal() -> None:
    loads = [sum([9, 8, 7, 6, 5, 4, 3, 2][i] for i in items) for items in balance([9, 8, 7, 6, 5, 4, 3, 2], 23)]
    assert loads == [22, 22]


@given(rows, st.integers(1, 40), st.integers(1, 3), st.data())
def test_plan_covers_trained_rows_and_parts_no_bundle(
    lengths: list[tuple[int, int]], budget: int, minibatches: int, data: st.DataObject
) -> None:
    n = len(lengths)
    bundle_N = torch.tensor(data.draw(st.lists(st.integers(0, n), min_size=n, max_size=n)))
    signal_N = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    batch = make_batch(lengths).replace(bundle_N=bundle_N, signal_N=signal_N, minibatch_N=bundle_N % minibatches)
    with_signal, all_rows = plan(batch, budget), plan(batch, budget, everything=True)

    flat = [row for rows in all_rows for row in rows]
    assert len(flat) == len(set(flat))
    assert set(flat) >= set((batch.trained_N > 0).nonzero()[:, 0].tolist())
    for part in all_rows:
        bundles = set(bundle_N[part].tolist())
        assert all(set((bundle_N == b).nonzero()[:, 0].tolist()) <= set(part) for b in bundles)
        assert len(bundles) == 1 or int(batch.length_N[part].sum()) <= budget
        assert len(set(batch.minibatch_N[part].tolist())) == 1
    assert all(part in all_rows for part in with_signal)
    assert all(bool(signal_N[part].any()) for part in with_signal)
    lit = signal_N & (batch.trained_N > 0)
    assert set(lit.nonzero()[:, 0].tolist()) <= {row for part in with_signal for row in part}


@given(rows, st.integers(1, 40), st.integers(1, 3))
def test_a_minibatch_alone_is_planned_as_inside_the_whole(
    lengths: list[tuple[int, int]], budget: int, minibatches: int
) -> None:
    batch = make_batch(lengths, minibatches=minibatches)
    alone = []
    for number, part in zip(batch.minibatch_N.unique().tolist(), batch.minibatches(), strict=True):
        where = (batch.minibatch_N == number).nonzero()[:, 0]
        alone += [where[rows].tolist() for rows in plan(part, budget)]
    assert plan(batch, budget) == alone


def test_equal_answers_of_a_group_are_planned_together() -> None:
    batch = make_batch([(3, 2)] * 4).replace(token_T=torch.arange(5).repeat(4), group_N=torch.zeros(4).long())
    assert plan(batch, 5) == [[0, 1, 2, 3]]


def test_many_rows_of_more_than_half_a_bin_are_planned_at_once() -> None:
    assert balance([6] * 20_000, 10) == [[i] for i in range(20_000)]
