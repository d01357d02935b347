"""What a step is measured by, beside what the engines report. Every mean is over samples or tokens, never of means."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from treadle.types import Ended, Group, Kind, Max, Mean, Sample, Statistics

if TYPE_CHECKING:
    from treadle.batch import Batch
    from treadle.runs.progress import Progress


class Stopwatch:
    """Seconds by stage of one step: `with watch("update"): …`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._progress.stage(stage, 0, 1)
        begin = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - begin
        self._progress.stage(stage, 1, 1)


def measure_batch(groups: Sequence[Group], batch: Batch, version: int) -> Statistics:
    """Rewards, lengths, signal and staleness of the groups of one step, trained under weights `version`."""
    samples = [s for g in groups for s in g.usable if s.kind is Kind.TRAIN]
    trajectories = [t for s in samples for t in s.trajectories]
    failed = sum(s.failure is not None for g in groups for s in g.samples)
    asked = sum(len(g.samples) for g in groups)
    age = version - np.concatenate([t.version_T[t.version_T >= 0] for t in trajectories] or [np.empty(0, np.int32)])
    reward, parts = _rewards(samples)
    return {
        "reward/mean": reward,
        **{f"reward/{name}": part for name, part in parts.items()},
        "reward/equal_groups": Mean(sum(_equal(g) for g in groups), len(groups)),
        "response/tokens": Mean(sum(t.sampled_tokens for t in trajectories), len(trajectories)),
        "response/tokens_max": Max(max((t.sampled_tokens for t in trajectories), default=0)),
        "response/truncated": Mean(sum(t.ended is Ended.TRUNCATED for t in trajectories), len(trajectories)),
        "response/with_signal": Mean(int(batch.signal_N.sum()), int((~batch.baseline_N).sum())),
        "samples/failed": Mean(failed, asked),
        "staleness/mean": Mean(int(age.sum()), age.size),
        "staleness/max": Max(int(age.max()) if age.size else 0),
    }


def measure_evaluation(groups: Mapping[str, Sequence[Group]]) -> Statistics:
    """Mean reward and length over held-out samples, for each way of sampling: "sampled", "greedy"."""
    statistics: dict[str, Mean | Max] = {}
    for way, found in groups.items():
        samples = [s for g in found for s in g.usable]
        trajectories = [t for s in samples for t in s.trajectories]
        asked = sum(len(g.samples) for g in found)
        statistics[f"evaluation/{way}_failed"] = Mean(asked - len(samples), asked)
        mean, parts = _rewards(samples)
        statistics[f"evaluation/{way}"] = mean
        statistics |= {f"evaluation/{way}/{name}": part for name, part in parts.items()}
        statistics[f"evaluation/{way}_tokens"] = Mean(sum(t.sampled_tokens for t in trajectories), len(trajectories))
    return statistics


def _rewards(samples: Sequence[Sample]) -> tuple[Mean, dict[str, Mean]]:
    """Mean reward over samples, and those of its parts where it has several."""
    rewards = [s.reward for s in samples if s.reward is not None]
    names = sorted({name for r in rewards for name in r.parts})
    parts = {name: [r.parts[name] for r in rewards if name in r.parts] for name in names}
    whole = Mean(sum(r.value for r in rewards), len(rewards))
    return whole, {name: Mean(sum(found), len(found)) for name, found in parts.items() if len(names) > 1}


def _equal(group: Group) -> bool:
    """Whether a group's rewards say nothing about which sample was better."""
    values = [s.reward.value for s in group.usable if s.reward is not None]
    return not values or max(values) == min(values)
