"""Where a run stands, kept in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.recipes.collect import Collector
    from treadle.recipes.system import System


@dataclass(frozen=True)
class Position:
    """Where a run stands."""

    step: int = 0  # steps done
    version: int = 0  # of the weights that generate
    evaluated: int | None = None  # the step after which they were last evaluated
    saved: int | None = None  # the step of the last checkpoint
    data_ended: bool = False


async def save(system: System, now: Position, collector: Mapping[str, object]) -> Position:
    """Write a checkpoint: the place in the run and in the data, the algorithm, every trained role."""
    now = replace(now, saved=now.step)
    state = {"position": asdict(now), "collector": collector, "algorithm": system.algorithm.state()}
    with system.record.checkpoint(now.step, state) as path:
        for role, model in system.learners.items():
            await model.save(path / role)
    return now


async def restore(system: System, collector: Collector) -> Position:
    """Go on from the latest checkpoint, or begin."""
    found = system.record.restore()
    if found is None:
        return Position()
    path, state = found
    for role, model in system.learners.items():
        await model.load(path / role)
    system.algorithm.restore(state["algorithm"])
    collector.restore(state["collector"])
    return Position(**state["position"])
