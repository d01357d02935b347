"""How the ranks of a training engine are laid out, and what they tell each other beside tensors of the model.

Dimensions, the slowest first: "replicate" ranks hold copies of the same weights, "shard" ranks one copy together. Both
are data-parallel: every rank has rows of its own. A pipeline dimension would come before them, expert, sequence and
tensor dimensions behind them, and ranks that differ only in those would get the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from treadle.errors import ConfigError, TreadleError

T = TypeVar("T")
REPLICATE, SHARD = "replicate", "shard"


def make_mesh(ranks: int, shard: int | None) -> DeviceMesh:
    """All `ranks` of the process group, `shard` of which (None: all) share one copy of the weights.

    A collective: every rank calls it. Raises `ConfigError` for a number that does not divide `ranks`.
    """
    size = ranks if shard is None else shard
    if size < 1 or ranks % size:
        allowed = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ConfigError(f"trainer.shard_ranks={shard} does not divide the {ranks} ranks; allowed: {allowed}, or null")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (ranks // size, size), mesh_dim_names=(REPLICATE, SHARD))


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this rank speaks for all."""
    return mesh is None or mesh.get_rank() == 0


def tell(value: T, mesh: DeviceMesh | None) -> list[T]:
    """The `value` of every rank, by rank."""
    if mesh is None:
        return [value]
    values: list[T] = [value] * mesh.size()
    dist.all_gather_object(values, value)
    return values


def most(count: int, mesh: DeviceMesh | None) -> int:
    """The largest `count` of any rank."""
    if mesh is None:
        return count
    largest = torch.tensor(count, device=mesh.device_type)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def together(work: Callable[[], T], mesh: DeviceMesh | None) -> T:
    """What `work` returns, or the first error of any rank on all of them, so that none waits for one that has failed.

    `work` itself must not wait for other ranks.
    """
    if mesh is None:
        return work()
    try:
        result = work()
    except Exception as error:  # whatever it is, the others must hear of it
        tell((type(error) if isinstance(error, TreadleError) else RuntimeError, f"{error}"), mesh)
        raise
    told: list[Any] = tell(None, mesh)
    for rank, failure in enumerate(told):
        if failure is not None:
            kind, text = failure
            raise kind(f"{text} (on rank {rank})")
    return result
