"""Rows are taken out of a batch, and results laid together, run by run: the same as token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import dispatch
from tests.batches import annotated, assert_same, batches, flat, quick
from treadle import batch as module
from treadle.batch import Batch, Counts, shared_prefix
from treadle.controller.sharding import split

BY_RUNS, BY_TOKENS = 0, 1 << 40


@quick
@given(batch=batches(), data=st.data())
def test_runs_and_tokens_move_the_same(batch: Batch, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=8))
    order = data.draw(st.permutations(range(len(batch))))
    cut = data.draw(st.integers(0, len(batch)))
    parts = [order[:cut], order[cut:]]
    found: list[tuple[Batch, dict[str, torch.Tensor]]] = []
    with pytest.MonkeyPatch.context() as patch:
        for long in (BY_RUNS, BY_TOKENS):
            patch.setattr(module, "_LONG", long)
            results = [{n: flat(batch.select(p))[n] for n in ("token_T", "reward_N")} for p in parts]
            found.append((batch.select(rows), batch.gather(parts, results)))
    assert_same(found[0][0], found[1][0])
    for _, whole in found:
        for name, tensor in whole.items():
            assert torch.equal(tensor, getattr(batch, name))


@quick
@given(batch=batches())
def test_rows_are_counted_as_they_were(batch: Batch) -> None:
    for view in (batch, batch.compact()):
        trained_N = view.trained_N
        assert view.count() == Counts(int(trained_N.sum()), int((trained_N > 0).sum()))


@pytest.mark.parametrize(
    ("rows", "shared"),
    [([[1, 2, 3]], 3), ([[1, 2], [1, 2, 3]], 2), ([[1, 2, 4], [1, 2, 3]], 2), ([[2], [1]], 0), ([[], [1]], 0)],
)
def test_what_all_rows_begin_with(rows: list[list[int]], shared: int) -> None:
    assert shared_prefix([torch.tensor(row, dtype=torch.int64) for row in rows]) == shared


def test_what_the_benchmark_counts() -> None:
    """A copy to cut a batch, one to send it, one of results, one to lay them together: nothing else."""
    whole = annotated(dispatch.make(6))
    rows = split(whole.units(dispatch.ATTENTION), 4)
    with dispatch.counted() as copied:
        parts = [whole.select(mine) for mine in rows]
        whole.gather(rows, [{name: getattr(part, name) for name in dispatch.RESULTS} for part in parts])
    results = 4 * 2 * len(whole.token_T)
    assert copied == {"select": dispatch.size_of(whole) + 8 * 3, "put": 0, "results": results, "gather": results}
    assert dispatch.floor(whole) == dispatch.size_of(whole) + 2 * results
