"""Small batches to try an algorithm on: drawn by hypothesis, so that what breaks a law shrinks to the least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st

from treadle.batch import Batch
from treadle.types import Ended, Group, Kind, Prompt, Provenance, Reward, Sample, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2
"""Of the policy; tokens were sampled by it, or by older ones."""
LETTER = {"p": Provenance.PROMPT, "s": Provenance.SAMPLED, "e": Provenance.ENVIRONMENT}


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample: its trajectories as letters (p prompt, s sampled, e environment), and what it earned."""

    layouts: tuple[str, ...]
    reward: float
    truncated: bool = False

    def __str__(self) -> str:
        return f"{' + '.join(self.layouts)} earns {self.reward:g}" + (", truncated" if self.truncated else "")


@dataclass(frozen=True, slots=True)
class Case:
    """Groups of answers, and how far apart the policies are; `seed` draws the log-probs."""

    groups: tuple[tuple[Answer, ...], ...]
    far: float = 0.0  # nats, standard deviation of log π − log π_old and of the others
    seed: int = 0
    baseline: bool = False  # the first answer of each group is its baseline sample

    def __str__(self) -> str:
        lines = [f"    group {i}: " + " | ".join(map(str, group)) for i, group in enumerate(self.groups)]
        return "\n".join([*lines, f"    log-probs {self.far:g} nats apart (seed {self.seed})"])

    def _repr_pretty_(self, printer: Any, _: bool) -> None:  # how hypothesis shows what it drew
        printer.text(f"\n{self}")

    def batch(self) -> Batch:
        """As it comes from the rollout engine. What passes over models would find is among the extras (`Truth`)."""
        batch = Batch.pack(self.records())
        noise = torch.Generator().manual_seed(self.seed)
        old_T, value_T, sum_p2_T, entropy_T, *moved = torch.rand(7, len(batch.token_T), generator=noise)
        # Far apart, the old policy may have been all but sure that a token would not come.
        old_T = -3 * old_T - 0.05 - (self.far if self.far > 1 else 0.0) * value_T
        sampler_T, reference_T, now_T = ((old_T + self.far * _normal(x)).clamp(-1e4, 0.0) for x in moved)
        known = Truth(old_T, reference_T, value_T, old_T.exp() * sum_p2_T, now_T, entropy_T, sampler_T)
        bootstrap_N = torch.rand(len(batch), generator=noise)
        return known.hidden(batch.replace(extras_N={"truth/bootstrap_N": bootstrap_N}))

    def records(self) -> list[Group]:
        return [_group(i, answers, self.baseline) for i, answers in enumerate(self.groups)]


@dataclass(frozen=True, slots=True)
class Truth:
    """What models say of every token, [T]; a batch carries it where an algorithm does not look."""

    old_T: Tensor
    reference_T: Tensor
    value_T: Tensor
    sum_p2_T: Tensor
    now_T: Tensor
    entropy_T: Tensor
    sampler_T: Tensor

    def hidden(self, batch: Batch) -> Batch:
        """`batch` with this in its extras, NaN where nothing was sampled, and the sampler's log-probs in place."""
        empty_T = batch.provenance_T != Provenance.SAMPLED
        found = {f"truth/{f.name}": getattr(self, f.name).masked_fill(empty_T, math.nan) for f in fields(self)}
        sampler_T = found["truth/sampler_T"]
        return batch.replace(extras_T={**batch.extras_T, **found}, sampling_logprob_T=sampler_T)


def _normal(uniform_T: Tensor) -> Tensor:
    return torch.special.ndtri(uniform_T.clamp(1e-6, 1 - 1e-6))


def _group(index: int, answers: Sequence[Answer], baseline: bool) -> Group:
    prompt = Prompt(f"case:{index}", index, (), (1,))
    samples = []
    for i, answer in enumerate(answers):
        kind = Kind.BASELINE if baseline and i == 0 else Kind.TRAIN
        rows = tuple(_trajectory(prompt, layout, answer) for layout in answer.layouts)
        samples.append(Sample(f"{index}.{i}", kind, rows))
    return Group(index, prompt, tuple(samples))


def _trajectory(prompt: Prompt, layout: str, answer: Answer) -> Trajectory:
    provenance_T = np.array([LETTER[c] for c in layout], np.uint8)
    sampled_T = provenance_T == Provenance.SAMPLED
    turns = [list(run) for kind, run in groupby(range(len(layout)), key=lambda i: layout[i]) if kind == "s"]
    return Trajectory(
        prompt=prompt,
        token_T=np.arange(len(layout)),
        provenance_T=provenance_T,
        logprob_T=np.where(sampled_T, -1.0, np.nan).astype(np.float32),
        version_T=np.where(sampled_T, len(layout) % VERSION, -1).astype(np.int32),
        turn_ends=tuple(run[-1] for run in turns),
        ended=Ended.TRUNCATED if answer.truncated else Ended.TERMINATED,
        # In several turns, several rewards; and two parts, which are not the same.
        reward=Reward(
            answer.reward,
            {"first": answer.reward, "second": float("".join(answer.layouts).count("s") % 2)},
            tuple([answer.reward / len(turns)] * len(turns)) if len(turns) > 1 else (),
        ),
    )


# ---------------------------------------------------------------------- drawing

REWARDS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 2.0])
ANY_REWARD = REWARDS | st.floats(-1e6, 1e6)
LAYOUTS = st.sampled_from(["ps", "pss", "p", "psss", "pses", "pssessss"])


@st.composite
def cases(
    draw: st.DrawFn, baseline: bool = False, rewards: st.SearchStrategy[float] = REWARDS, far: float = 0.3
) -> Case:
    """Cases of one to three groups, whose sizes differ; `baseline`: each begins with a baseline sample."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        answers = draw(st.lists(st.builds(Answer, st.tuples(LAYOUTS), rewards, st.booleans()), min_size=1, max_size=4))
        if draw(st.integers(0, 3)) == 3:  # a context that was compacted: two trajectories of one sample
            answers[-1] = replace(answers[-1], layouts=(draw(LAYOUTS), *answers[-1].layouts))
        groups.append(tuple([Answer(("ps",), draw(rewards)), *answers] if baseline else answers))
    return Case(tuple(groups), draw(st.sampled_from([0.0, far])), draw(st.integers(0, 99)), baseline)
