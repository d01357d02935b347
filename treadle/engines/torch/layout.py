"""Laying trajectories out for one pass so that what several of them begin with is computed once.

Trajectories of a group share their prompt. They are laid out as a tree of two levels: a *trunk*, the tokens that all of
a family begin with, and then each one's *branch*. A trajectory without family is a trunk alone. Nothing is padded.

Suffixes: S laid-out tokens · T tokens of all trajectories end to end, each with its own copy of what it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.data.packing import families, shared_prefix


@dataclass(frozen=True, slots=True)
class Segment:
    """Laid-out tokens `start … stop` that follow each other in a trajectory."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Tree:
    """A trunk and the branches that grow from its end; they are laid out right behind it, one after the other."""

    trunk: Segment
    branches: tuple[Segment, ...]

    @property
    def crown(self) -> Segment:
        """All branches together."""
        return Segment(self.branches[0].start, self.branches[-1].stop)


@dataclass(frozen=True, slots=True)
class Layout:
    """`[1, 2, 3, 4]` and `[1, 2, 5]` of one family, and `[7]`::

    token_S    [1, 2, 3, 4, 5, 7]       trees  trunk 0:2 with branches 2:4, 4:5 · trunk 5:6
    position_S [0, 1, 2, 3, 2, 0]       place_T [0, 1, 2, 3, 0, 1, 4, 5]
    """

    token_S: Tensor
    position_S: Tensor  # within its trajectory
    place_T: Tensor  # where each token of each trajectory lies
    lengths: tuple[int, ...]  # of the trajectories
    trees: tuple[Tree, ...]

    def __len__(self) -> int:
        return len(self.token_S)


def lay_out(rows: Sequence[Tensor], family_of: Sequence[int]) -> Layout:
    """The layout of these trajectories' tokens; those of one family share what they all begin with."""
    trees: list[Tree] = []
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    places: list[Tensor] = [torch.empty(0)] * len(rows)
    size = 0

    def lay(row: Tensor, begin: int) -> Segment:
        nonlocal size
        tokens.append(row[begin:])
        positions.append(torch.arange(begin, len(row)))
        size += len(row) - begin
        return Segment(size - (len(row) - begin), size)

    for members in families(family_of):
        mine = [rows[i] for i in members]
        shared = shared_prefix(mine) if len(mine) > 1 else 0
        if not shared:
            for i in members:
                trees.append(Tree(lay(rows[i], 0), ()))
                places[i] = torch.arange(trees[-1].trunk.start, size)
            continue
        trunk = lay(mine[0][:shared], 0)
        branches = [lay(row, shared) for row in mine]
        for i, branch in zip(members, branches, strict=True):
            places[i] = torch.cat([torch.arange(trunk.start, trunk.stop), torch.arange(branch.start, branch.stop)])
        trees.append(Tree(trunk, tuple(branches)))
    return Layout(
        torch.cat(tokens), torch.cat(positions), torch.cat(places), tuple(len(row) for row in rows), tuple(trees)
    )
