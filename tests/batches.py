"""Small groups and batches for tests: layouts by letter, and hypothesis strategies over ragged, interleaved ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from treadle.batch import Batch
from treadle.types import Ended, Group, Kind, Prompt, Provenance, Reward, Sample, Trajectory

LETTER = {"p": Provenance.PROMPT, "s": Provenance.SAMPLED, "e": Provenance.ENVIRONMENT}


def trajectory(
    layout: str,
    reward: float | Reward | None = 0.0,
    ended: Ended = Ended.TERMINATED,
    bundle: int | None = None,
    extras_T: Mapping[str, np.ndarray] | None = None,
    extras_N: Mapping[str, np.ndarray] | None = None,
) -> Trajectory:
    """`trajectory("ppsses", 1.0)`: prompt, prompt, sampled, sampled, environment, sampled; token ids 100, 101, …"""
    provenance_T = np.array([LETTER[c] for c in layout], np.uint8)
    sampled_T = provenance_T == Provenance.SAMPLED
    at_T = np.arange(len(layout))
    turns = [list(run) for kind, run in groupby(range(len(layout)), key=lambda i: layout[i]) if kind == "s"]
    return Trajectory(
        prompt=Prompt("test:1", 0, (), (1,)),
        token_T=100 + at_T,
        provenance_T=provenance_T,
        logprob_T=np.where(sampled_T, -0.1 * (1 + at_T), np.nan).astype(np.float32),
        version_T=np.where(sampled_T, 3, -1).astype(np.int32),
        turn_ends=tuple(run[-1] for run in turns),
        ended=ended,
        reward=Reward(float(reward)) if isinstance(reward, int | float) else reward,
        bundle=bundle,
        extras_T=extras_T or {},
        extras_N=extras_N or {},
    )


def group(index: int, samples: Sequence[Trajectory | Sequence[Trajectory] | Sample]) -> Group:
    """A group of samples, each given as one trajectory, several, or whole."""
    done: list[Sample] = []
    for i, given in enumerate(samples):
        if isinstance(given, Sample):
            done.append(given)
        else:
            rows = (given,) if isinstance(given, Trajectory) else tuple(given)
            done.append(Sample(f"{index}.{i}", Kind.TRAIN, rows))
    return Group(index, Prompt("test:1", index, (), (1,)), tuple(done))


def rewarded(*groups: Sequence[float], layout: str = "pss") -> Batch:
    """A batch of one-trajectory samples with these rewards."""
    return Batch.pack([group(i, [trajectory(layout, float(r)) for r in g]) for i, g in enumerate(groups)])


def flat(batch: Batch) -> dict[str, torch.Tensor]:
    """Every tensor of a batch by name, extras included."""
    tensors: dict[str, torch.Tensor] = {}
    for field in dataclasses.fields(batch):
        value: Any = getattr(batch, field.name)
        if isinstance(value, Mapping):
            tensors |= {f"{field.name}.{name}": v for name, v in value.items()}
        elif isinstance(value, torch.Tensor):
            tensors[field.name] = value
    return tensors


def assert_same(one: Batch, other: Batch) -> None:
    """Equal in every field, bit for bit, NaN equal to NaN."""
    a, b = flat(one), flat(other)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


def annotated(batch: Batch, seed: int = 0) -> Batch:
    """`batch` with what passes over models would have found, NaN wherever nothing is trained."""
    noise = torch.Generator().manual_seed(seed)

    def found(scale: float) -> torch.Tensor:
        return torch.where(batch.mask_T, scale * torch.randn(len(batch.token_T), generator=noise), math.nan)

    old_T = -found(1.0).abs()
    return batch.replace(
        sampling_logprob_T=old_T + found(0.01),
        old_logprob_T=old_T,
        reference_logprob_T=old_T + found(0.3),
        value_T=found(1.0),
        bootstrap_N=torch.where(batch.truncated_N, torch.randn(len(batch), generator=noise), 0.0),
    )


# ---------------------------------------------------------------------- strategies

quick = settings(deadline=None, max_examples=50)

# Also without a sampled token, and with the environment in between or at the end.
layouts = st.sampled_from(["ps", "p", "pp", "pps", "psss", "pses", "psseess", "ppse", "psesesee", "ppsssessssss"])
rewards = st.one_of(st.sampled_from([0.0, 1.0, 0.1, 0.5]), st.floats(-100, 100))


@st.composite
def trajectories(draw: st.DrawFn, reward: float) -> Trajectory:
    layout = draw(layouts)
    length = len(layout)
    return trajectory(
        layout,
        Reward(reward, parts={"correct": reward, "short": float(-length)}),
        draw(st.sampled_from([Ended.TERMINATED, Ended.TRUNCATED])),
        draw(st.sampled_from([None, None, 0, 1])),
        {"routing": np.arange(2 * length, dtype=np.int64).reshape(length, 2)},
        {"level": np.array(float(length), np.float32)},
    )


@st.composite
def samples(draw: st.DrawFn, identity: str) -> Sample:
    if draw(st.integers(0, 9)) == 0:
        return Sample(identity, Kind.TRAIN, (), failure="the tool broke")
    kind = draw(st.sampled_from([Kind.TRAIN] * 5 + [Kind.BASELINE]))
    reward = draw(rewards)
    return Sample(identity, kind, tuple(draw(st.lists(trajectories(reward), min_size=1, max_size=3))))


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """One to four groups of one to five samples, at least one of which did not fail."""
    indices = draw(st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True))
    found = [
        Group(
            i, Prompt("test:1", i, (), (1,)), tuple(draw(samples(f"{i}.{k}")) for k in range(draw(st.integers(1, 5))))
        )
        for i in indices
    ]
    if not any(g.usable for g in found):
        found.append(group(99, [draw(trajectories(1.0))]))
    return found


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A packed batch whose rows lie in any order, so that groups interleave."""
    batch = Batch.pack(draw(groups()), minibatches=draw(st.integers(1, 3)))
    return batch.select(draw(st.permutations(range(len(batch))))).replace(counts=None)
