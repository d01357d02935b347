"""Cutting a batch into micro-batches: a pure function of the batch, so that every pass over it can use the same cut.

Matrix products change in their last bits with the number of rows. A ratio of two passes at equal weights is therefore
exactly 1 only when both passes use the same micro-batches; that is why the plan looks at nothing but the batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heapreplace
from itertools import chain
from typing import TYPE_CHECKING

from treadle.batch import shared_prefix

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


def plan(batch: Batch, budget: int, everything: bool = False) -> list[list[int]]:
    """Rows of each micro-batch, of `budget` tokens at most unless one bundle alone is longer.

    A group's rows stay together while they fit, and what they all begin with counts once, as an engine computes it.
    Micro-batches lie inside mini-batches, and planning one mini-batch alone gives the same ones. Bundles are never
    parted. Bundles without signal are left out, or come in micro-batches of their own if `everything` is asked for;
    those without a trained token are always left out.
    """
    trained, signal = (batch.trained_N > 0).tolist(), batch.signal_N.tolist()
    minibatch, group = batch.minibatch_N.tolist(), batch.group_N.tolist()
    tokens = batch.token_T.split(batch.length_N.tolist())
    bundles = families(zip(minibatch, batch.bundle_N.tolist(), strict=True))
    bundles = [rows for rows in bundles if any(trained[r] for r in rows)]
    numbers = [minibatch[rows[0]] for rows in bundles]
    microbatches: list[list[int]] = []
    for members in sorted(families(numbers), key=lambda members: numbers[members[0]]):
        mine = [bundles[i] for i in members]
        lit = [rows for rows in mine if any(signal[r] for r in rows)]
        dark = [rows for rows in mine if not any(signal[r] for r in rows)]
        for part in (lit, dark) if everything else (lit,):
            pieces, sizes = _pieces(tokens, group, part, budget)
            bins = balance(sizes, budget)
            microbatches += [sorted(chain.from_iterable(pieces[i] for i in items)) for items in bins]
    return microbatches


def families(keys: Iterable[object]) -> list[list[int]]:
    """Indices that have the same key, together, in order of their first."""
    found: dict[object, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return list(found.values())


def balance(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes` in as few bins as needed, none above `capacity` unless it holds a single item, about equally
    full. Longest first into the emptiest bin; deterministic."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    small = [i for i in order if sizes[i] <= capacity]
    alone = [[i] for i in order if sizes[i] > capacity]
    total, large = sum(sizes[i] for i in small), sum(2 * sizes[i] > capacity for i in small)  # no two large ones fit
    fewest = max(-(-total // capacity), large, min(len(small), 1))  # an item may have no size
    count = bisect_left(range(len(small)), True, fewest, key=lambda n: _spread(sizes, small, n, capacity) is not None)
    bins = _spread(sizes, small, count, capacity)
    assert bins is not None  # an item a bin always fits
    return alone + bins


def _pieces(
    tokens: Sequence[Tensor], group: Sequence[int], bundles: Sequence[list[int]], budget: int
) -> tuple[list[list[int]], list[int]]:
    """Rows that are to stay together, and their size in tokens: whole groups, or parts of those that are too large.

    `tokens` and `group` are those of every row of the batch.
    """
    pieces: list[list[int]] = []
    sizes: list[int] = []
    for members in families(group[rows[0]] for rows in bundles):
        mine = [bundles[i] for i in members]
        rows = list(chain.from_iterable(mine))
        shared = shared_prefix([tokens[r] for r in rows]) if len(rows) > 1 else 0
        own = [sum(len(tokens[r]) - shared for r in rows) for rows in mine]
        for items in balance(own, max(budget - shared, 1)):
            pieces.append(list(chain.from_iterable(mine[i] for i in items)))
            sizes.append(shared + sum(own[i] for i in items))
    return pieces, sizes


def _spread(sizes: Sequence[int], order: Sequence[int], count: int, capacity: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]  # a heap: the emptiest bin first
    for i in order:
        load, number = loads[0]
        if load + sizes[i] > capacity:
            return None
        bins[number].append(i)
        heapreplace(loads, (load + sizes[i], number))
    return bins
