"""Cutting a batch into micro-batches: a pure function of the batch, so that every pass over it can use the same cut.

Matrix products change in their last bits with the number of rows. A ratio of two passes at equal weights is therefore
exactly 1 only when both passes use the same micro-batches; that is why the plan looks at nothing but the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.batch import Batch


def plan(batch: Batch, budget: int, everything: bool = False) -> list[list[int]]:
    """Rows of each micro-batch, of `budget` tokens at most unless one bundle alone is longer.

    Micro-batches lie inside mini-batches, and planning one mini-batch alone gives the same ones. Bundles are never
    parted. Bundles without signal are left out, or come in micro-batches of their own if `everything` is asked for;
    those without a trained token are always left out.
    """
    lengths, trained = batch.length_N.tolist(), batch.trained_N.tolist()
    signal = batch.signal_N.tolist()
    bundles: dict[tuple[int, int], list[int]] = {}
    for row, at in enumerate(zip(batch.minibatch_N.tolist(), batch.bundle_N.tolist(), strict=True)):
        bundles.setdefault(at, []).append(row)
    microbatches: list[list[int]] = []
    for minibatch in sorted({minibatch for minibatch, _ in bundles}):
        mine = [rows for (at, _), rows in bundles.items() if at == minibatch and any(trained[r] for r in rows)]
        lit = [rows for rows in mine if any(signal[r] for r in rows)]
        dark = [rows for rows in mine if not any(signal[r] for r in rows)]
        for part in (lit, dark) if everything else (lit,):
            bins = balance([sum(lengths[r] for r in rows) for rows in part], budget)
            microbatches += [sorted(chain.from_iterable(part[i] for i in items)) for items in bins]
    return microbatches


def balance(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes` in as few bins as needed, none above `capacity` unless it holds a single item, about equally
    full. Longest first into the emptiest bin; deterministic."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    small = [i for i in order if sizes[i] <= capacity]
    alone = [[i] for i in order if sizes[i] > capacity]
    count = -(-sum(sizes[i] for i in small) // capacity)
    while (bins := _spread(sizes, small, count, capacity)) is None:
        count += 1
    return alone + bins


def _spread(sizes: Sequence[int], order: Sequence[int], count: int, capacity: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for i in order:
        emptiest = load.index(min(load))
        if load[emptiest] + sizes[i] > capacity:
            return None
        bins[emptiest].append(i)
        load[emptiest] += sizes[i]
    return bins
