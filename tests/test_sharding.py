"""Batches over ranks: cut by cost, laid together again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import annotated, assert_same, batches, flat, quick
from tests.engine_help import make_batch
from treadle.batch import Batch, shared_prefix
from treadle.controller.sharding import split
from treadle.handles import Learned
from treadle.types import Mean, Unit

# ---------------------------------------------------------------------- split


@st.composite
def units(draw: st.DrawFn) -> list[Unit]:
    """Any: in bundles, families and parts of any size, some of them free of cost."""
    rows = iter(draw(st.permutations(range(60))))
    sizes = draw(st.lists(st.integers(1, 4), max_size=20))
    costs = st.one_of(st.just(0.0), st.floats(0.1, 1e4))
    return [
        Unit(list(itertools.islice(rows, size)), draw(costs), draw(st.integers(0, 5)), draw(st.integers(0, 3)))
        for size in sizes
    ]


@quick
@given(units(), st.integers(1, 9))
def test_every_row_goes_to_one_rank_and_bundles_stay_whole(units: list[Unit], ranks: int) -> None:
    shares = split(units, ranks)
    assert len(shares) == ranks
    assert all(share == sorted(share) for share in shares)
    of = {row: rank for rank, share in enumerate(shares) for row in share}
    assert sorted(itertools.chain(*shares)) == sorted(row for unit in units for row in unit.rows)
    assert all(len({of[row] for row in unit.rows}) == 1 for unit in units)
    assert split(units, ranks) == shares


@quick
@given(units(), st.integers(1, 9))
def test_each_part_is_cut_as_if_it_were_all_there_is(units: list[Unit], ranks: int) -> None:
    shares = split(units, ranks)
    for part in {unit.part for unit in units}:
        mine = [unit for unit in units if unit.part == part]
        rows = {row for unit in mine for row in unit.rows}
        assert [[row for row in share if row in rows] for share in shares] == split(mine, ranks)


def loads(units: Sequence[Unit], shares: Sequence[Sequence[int]]) -> list[float]:
    rank = {row: rank for rank, share in enumerate(shares) for row in share}
    found = [0.0] * len(shares)
    for unit in units:
        found[rank[unit.rows[0]]] += unit.cost
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("attention", [0.0, 1e-4])
def test_ranks_differ_by_at_most_two_percent(ranks: int, size: int, attention: float) -> None:
    """Log-normal lengths, 32 units a rank, alone and in families; with attention a unit's cost grows quadratically."""
    for seed in range(3):
        random = np.random.default_rng([seed, ranks, size])
        length = np.exp(random.normal(6.0, 0.8, 32 * ranks))
        cost = length + attention * length**2 / 2
        units = [Unit([i], float(c), i // size) for i, c in enumerate(cost)]
        if max(cost) > 0.9 * sum(cost) / ranks:
            continue  # nothing can balance that
        found = loads(units, split(units, ranks))
        assert max(found) / min(found) - 1 <= 0.02


def test_families_stay_together_where_that_is_fair() -> None:
    random = np.random.default_rng(0)
    units = [Unit([i], float(c), i // 8) for i, c in enumerate(np.exp(random.normal(6.0, 0.8, 2048)))]
    of = {row: rank for rank, share in enumerate(split(units, 8)) for row in share}
    parted = sum(len({of[row] for row in range(8 * f, 8 * f + 8)}) > 1 for f in range(256))
    assert parted <= 26


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_of_many_rows_ranks_get_stretches(ranks: int) -> None:
    random = np.random.default_rng(0)
    units = [Unit([i], float(c), i // 4) for i, c in enumerate(np.exp(random.normal(6.0, 0.5, 1024 * ranks)))]
    shares = split(units, ranks)
    assert list(itertools.chain(*shares)) == list(range(len(units)))
    assert all(share[0] % 4 == 0 for share in shares)
    found = loads(units, shares)
    assert max(found) / min(found) - 1 <= 0.02


def test_fewer_units_than_ranks_leave_some_ranks_empty() -> None:
    shares = split([Unit([0, 1], 5.0, 0), Unit([2], 1.0, 1)], 4)
    assert sorted(shares) == [[], [], [0, 1], [2]]
    assert split([], 3) == [[], [], []]


# ---------------------------------------------------------------------- Batch


def test_a_stretch_of_a_batch_is_taken_without_a_copy() -> None:
    batch = make_batch([(3, 4), (2, 2), (1, 5), (4, 1)])
    part = batch.select([1, 2])
    assert part.token_T.tolist() == batch.token_T[7:17].tolist()
    assert part.token_T.untyped_storage().data_ptr() == batch.token_T.untyped_storage().data_ptr()
    assert part.token_T.is_contiguous()
    apart = batch.select([0, 2])
    assert apart.token_T.untyped_storage().data_ptr() != batch.token_T.untyped_storage().data_ptr()


@quick
@given(batches(), st.integers(1, 5))
def test_what_ranks_find_is_laid_together_as_if_found_about_the_whole(batch: Batch, ranks: int) -> None:
    batch = annotated(batch)
    shares = split(batch.units(1e-3), ranks)
    parts = [batch.select(rows) for rows in shares]
    fields = flat(batch)
    sent = {name: value for name, value in fields.items() if "." not in name and name != "offset_N1"}
    sent |= {"routing_T": batch.extras_T["routing"], "level_N": batch.extras_N["level"]}

    def results(part: Batch) -> dict[str, torch.Tensor]:
        own = flat(part)
        found = {name: own[name] for name in sent if name in own}
        return found | {"routing_T": part.extras_T["routing"], "level_N": part.extras_N["level"]}

    gathered = batch.gather(shares, [results(part) for part in parts])
    assert gathered.keys() == sent.keys()
    for name, value in sent.items():
        torch.testing.assert_close(gathered[name], value, rtol=0, atol=0, equal_nan=True)
    assert all(part.count() == batch.count() for part in parts)


@quick
@given(batches(), st.integers(1, 5))
def test_what_ranks_learned_is_merged(batch: Batch, ranks: int) -> None:
    shares = split(batch.units(0.0), ranks)
    parts = [batch.select(rows) for rows in shares]
    found = [Learned({"length": Mean(float(len(p.token_T)), float(len(p)))}, {"token_T": p.token_T}) for p in parts]
    learned = batch.gather(shares, found)
    assert learned.statistics["length"].value == pytest.approx(len(batch.token_T) / len(batch))
    assert torch.equal(learned.seen["token_T"], batch.token_T)


@quick
@given(batches(), st.data())
def test_any_rows_in_any_order_are_those_rows(batch: Batch, data: Any) -> None:
    """`select` copies runs of neighbours at once; whatever the order, a row is what it was."""
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=12))
    part = batch.select(rows)
    assert len(part) == len(rows)
    for at, row in enumerate(rows):
        assert_same(part.select([at]).replace(counts=None), batch.select([row]).replace(counts=None))
        lo, hi = batch.offset_N1[row], batch.offset_N1[row + 1]
        begin, end = part.offset_N1[at], part.offset_N1[at + 1]
        assert torch.equal(part.token_T[begin:end], batch.token_T[lo:hi])
        assert torch.equal(part.extras_T["routing"][begin:end], batch.extras_T["routing"][lo:hi])


@quick
@given(batches())
def test_units_are_bundles_that_cost_what_their_passes_do(batch: Batch) -> None:
    """A group's common beginning counts once, spread over its rows."""
    attention = 0.01
    units = batch.units(attention)
    assert sorted(row for unit in units for row in unit.rows) == list(range(len(batch)))
    length = batch.length_N.tolist()
    tokens = batch.token_T.split(length)
    for unit in units:
        assert len(set(batch.bundle_N[unit.rows].tolist())) == 1
        assert {unit.family} == set(batch.group_N[unit.rows[:1]].tolist())
    for family in set(batch.group_N.tolist()):
        rows = (batch.group_N == family).nonzero()[:, 0].tolist()
        once = shared_prefix([tokens[row] for row in rows]) if len(rows) > 1 else 0
        whole = sum(length[row] - once + attention * (length[row] ** 2 - once**2) / 2 for row in rows)
        whole += once + attention * once**2 / 2
        # a bundle may hold rows of one group only
        assert sum(u.cost for u in units if u.family == family) == pytest.approx(whole)
