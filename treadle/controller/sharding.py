"""Cutting what a call is about over ranks, by what it costs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

from treadle.types import Unit

SPREAD = 0.009
"""Between the dearest and the mean rank: families are parted only where they would make it larger."""


class Shardable(Protocol):
    """What can be cut over ranks and laid together again."""

    def units(self, attention: float) -> Sequence[Unit]:
        """All rows; `attention` is the cost of a token's looking at one token, in costs of a token by itself."""
        ...

    def select(self, rows: Sequence[int]) -> Any:
        """These rows, in this order."""
        ...

    def gather(self, rows: Sequence[Sequence[int]], results: Sequence[Any]) -> Any:
        """What the ranks found about their rows, laid together in the order of this."""
        ...


def split(units: Sequence[Unit], ranks: int) -> list[list[int]]:
    """Rows of each rank, in ascending order; deterministic. Where there are fewer units than ranks, some get none."""
    if ranks == 1:
        return [sorted(row for unit in units for row in unit.rows)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    parts: dict[int, list[Unit]] = {}
    for unit in units:
        parts.setdefault(unit.part, []).append(unit)
    for part in parts.values():
        for share, rows in zip(shares, _spread(part, ranks), strict=True):
            share += rows
    return [sorted(share) for share in shares]


def _spread(units: Sequence[Unit], ranks: int) -> list[list[int]]:
    """Stretches of the order that there is, where they are even enough: those are taken without a copy.

    Else whole families go, the dearest first, to the rank that has least. Then units move or change places between the
    dearest and the cheapest rank as long as that brings them nearer.
    """
    cost = [unit.cost for unit in units]
    families: dict[int, list[int]] = {}
    for i, unit in enumerate(units):
        families.setdefault(unit.family, []).append(i)
    if (stretches := _in_a_row([[units[i] for i in members] for members in families.values()], ranks)) is not None:
        return stretches
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for members in sorted(families.values(), key=lambda members: -sum(cost[i] for i in members)):
        least = loads.index(min(loads))
        shares[least] += members
        loads[least] += sum(cost[i] for i in members)
    for share in shares:
        share.sort(key=lambda i: (cost[i], i))
    mean = sum(loads) / ranks
    while max(loads) > (1 + SPREAD) * mean or min(loads) < (1 - SPREAD) * mean:
        most, least = loads.index(max(loads)), loads.index(min(loads))
        if not _nearer(shares[most], shares[least], loads[most] - loads[least], cost):
            break
        for rank in (most, least):
            loads[rank] = sum(cost[i] for i in shares[rank])
    return [[row for i in share for row in units[i].rows] for share in shares]


def _in_a_row(families: Sequence[Sequence[Unit]], ranks: int) -> list[list[int]] | None:
    """Rows of as many stretches of whole families, unless their costs lie too far apart."""
    until = list(accumulate((sum(unit.cost for unit in members) for members in families), initial=0.0))
    ideal = [until[-1] * rank / ranks for rank in range(ranks + 1)]
    cuts = [min((at := bisect_left(until, goal)), at - 1, key=lambda i: abs(until[i] - goal)) for goal in ideal[1:-1]]
    cuts = [0, *cuts, len(families)]
    mean = until[-1] / ranks
    if not all(abs(until[b] - until[a] - mean) < SPREAD * mean for a, b in pairwise(cuts)):
        return None
    return [[row for members in families[a:b] for unit in members for row in unit.rows] for a, b in pairwise(cuts)]


def _nearer(most: list[int], least: list[int], gap: float, cost: Sequence[float]) -> bool:
    """Move a unit, or let two change places, such that the gap becomes as small as it can; False if none does it."""
    dear, cheap = [cost[i] for i in most], [0.0, *(cost[i] for i in least)]  # 0: nothing comes back
    best, found = gap, None
    for given, price in enumerate(dear):
        at = bisect_left(cheap, price - gap / 2)
        for taken in (at - 1, at):
            if 0 <= taken < len(cheap) and abs(gap - 2 * (price - cheap[taken])) < best * (1 - 1e-9):
                best, found = abs(gap - 2 * (price - cheap[taken])), (given, taken)
    if found is None:
        return False
    given, taken = found
    moved = most.pop(given)
    if taken:
        back = least.pop(taken - 1)
        most.insert(bisect_left(most, (cost[back], back), key=lambda i: (cost[i], i)), back)
    least.insert(bisect_left(least, (cost[moved], moved), key=lambda i: (cost[i], i)), moved)
    return True
