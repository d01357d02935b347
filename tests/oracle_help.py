"""A world small enough to count: a tabular policy whose every answer can be listed, and what a step does in it.

An answer is a tuple of tokens that ends with `END` or at the world's length. The policy has one float64 logit for each
(prefix, token). `expected` lists all groups of answers, makes real batches of them and averages the gradients that an
algorithm gives; `by_hand` does the same from coefficients in plain Python, with the softmax's score written out.

Suffixes: P prefixes · V vocabulary · N trajectories · T tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.algorithms.aggregate import aggregate
from treadle.algorithms.base import Algorithm
from treadle.algorithms.policy_gradient import PolicyGradient
from treadle.batch import Batch
from treadle.config.plugins import plugin_class
from treadle.handles import Loss, Outputs
from treadle.types import Ended, Group, Kind, Prompt, Provenance, Reward, Sample, Trajectory

END = 0
PROMPT = Prompt("test:1", 0, (), (1,))
Answer = tuple[int, ...]
Coefficients = Callable[[Sequence[Answer]], Sequence[Sequence[float]]]


def made(name: str, **keys: Any) -> PolicyGradient:
    """The algorithm of this name, or of these two joined by +, with these keys."""
    cls = plugin_class(name, "treadle.algorithms")
    return cls(cls.Config(name=name, **keys))


def total(loss: Loss, batch: Batch) -> Tensor:
    """The number that an engine minimises."""
    return torch.stack([aggregate(term, batch, batch.count()) for term in loss.terms]).sum()


@dataclass(frozen=True)
class World:
    vocabulary: int
    length: int
    prefixes: tuple[Answer, ...] = field(init=False)
    answers: tuple[Answer, ...] = field(init=False)

    def __post_init__(self) -> None:
        prefixes = [p for n in range(self.length) for p in product(range(self.vocabulary), repeat=n) if END not in p]
        longer = [(*p, v) for p in prefixes for v in range(self.vocabulary)]
        object.__setattr__(self, "prefixes", tuple(prefixes))
        object.__setattr__(self, "answers", tuple(a for a in longer if a[-1] == END or len(a) == self.length))

    def policy(self, seed: int) -> Tensor:
        """Logits, [P, V]."""
        noise = torch.Generator().manual_seed(seed)
        return 0.6 * torch.randn(len(self.prefixes), self.vocabulary, generator=noise, dtype=torch.float64)

    def steps(self, answer: Answer) -> list[tuple[int, int]]:
        """(index of the prefix, token) at each of its tokens."""
        return [(self.prefixes.index(answer[:t]), answer[t]) for t in range(len(answer))]

    def logprobs(self, logits_PV: Tensor, answer: Answer) -> list[float]:
        logp = logits_PV.detach().log_softmax(1).tolist()
        return [logp[p][v] for p, v in self.steps(answer)]

    def probability(self, logits_PV: Tensor, answer: Answer) -> Tensor:
        logp_PV = logits_PV.log_softmax(1)
        return torch.stack([logp_PV[p, v] for p, v in self.steps(answer)]).sum().exp()

    def groups(self, size: int, sampler_PV: Tensor) -> Iterator[tuple[float, tuple[Answer, ...]]]:
        """Every group of answers, order aside, with its probability."""
        chance = {a: float(self.probability(sampler_PV, a)) for a in self.answers}
        for group in combinations_with_replacement(self.answers, size):
            orders = math.factorial(size) // math.prod(math.factorial(n) for n in Counter(group).values())
            yield orders * math.prod(chance[a] for a in group), group

    def outcomes(self, groups: int, size: int, sampler_PV: Tensor) -> Iterator[tuple[float, tuple[Answer, ...]]]:
        """Every batch of so many groups, laid end to end."""
        for parts in product(list(self.groups(size, sampler_PV)), repeat=groups):
            yield math.prod(chance for chance, _ in parts), tuple(a for _, answers in parts for a in answers)


WIDE, LONG = World(3, 2), World(2, 3)
"""Seven answers of one or two tokens; four answers of one to three."""


def earned(answer: Answer) -> float:
    """Rewards without a pattern, some of them alike, exact in float32."""
    return (sum((i + 2) * v * v + 3 * i for i, v in enumerate(answer, 1)) % 7) / 2 - 1.0


def solved(answer: Answer) -> float:
    return float(sum(answer) % 2)


@dataclass(frozen=True)
class Setting:
    """What stands around the answers of a step."""

    world: World
    logits_PV: Tensor  # the current policy
    size: int
    groups: int = 1
    reward: Callable[[Answer], float] = earned
    sampler_PV: Tensor | None = None  # whose answers they are; None: the current policy's
    old_PV: Tensor | None = None  # the policy at the start of the step; None: no pass was made
    reference_PV: Tensor | None = None
    value_P: Sequence[float] | None = None
    greedy: Answer | None = None  # ReMax's
    parts: Mapping[str, Callable[[Answer], float]] = field(default_factory=dict)

    @property
    def sampled_PV(self) -> Tensor:
        return self.logits_PV.detach() if self.sampler_PV is None else self.sampler_PV

    def outcomes(self) -> Iterator[tuple[float, tuple[Answer, ...]]]:
        return self.world.outcomes(self.groups, self.size, self.sampled_PV)

    def sample(self, name: str, answer: Answer, kind: Kind = Kind.TRAIN) -> Sample:
        logp = self.world.logprobs(self.sampled_PV, answer)
        value = self.reward(answer)
        sampled = len(answer)
        trajectory = Trajectory(
            prompt=PROMPT,
            token_T=np.array([END, *answer]),
            provenance_T=np.array([Provenance.PROMPT] + [Provenance.SAMPLED] * sampled, np.uint8),
            logprob_T=np.array([math.nan, *logp], np.float32),
            version_T=np.array([-1] + [3] * sampled, np.int32),
            turn_ends=(sampled,),
            ended=Ended.TERMINATED if answer[-1] == END else Ended.TRUNCATED,
            reward=Reward(value, parts={name: part(answer) for name, part in self.parts.items()}),
            extras_T={"state": np.array([0, *(p for p, _ in self.world.steps(answer))])},
        )
        return Sample(name, kind, (trajectory,))

    def group(self, index: int, answers: Sequence[Answer]) -> Group:
        greedy = [] if self.greedy is None else [self.sample(f"{index}.greedy", self.greedy, Kind.BASELINE)]
        return Group(index, PROMPT, tuple([self.sample(f"{index}.{i}", a) for i, a in enumerate(answers)] + greedy))

    def batch(self, answers: Sequence[Answer]) -> Batch:
        """The batch of these answers, as passes of all models would have filled it, in float64."""
        size = self.size
        batch = Batch.pack([self.group(g, answers[g * size : (g + 1) * size]) for g in range(self.groups)])
        of_T = (batch.extras_T["state"], batch.token_T)

        def seen(logits_PV: Tensor | None) -> Tensor | None:
            return (
                None
                if logits_PV is None
                else logits_PV.detach().log_softmax(1)[of_T].masked_fill(~batch.mask_T, math.nan)
            )

        value_T = None if self.value_P is None else torch.tensor(self.value_P, dtype=torch.float64)[of_T[0]]
        policy_PV = self.logits_PV.detach() if self.old_PV is None else self.old_PV
        return batch.replace(
            sampling_logprob_T=seen(self.sampled_PV),
            old_logprob_T=seen(self.old_PV),
            reference_logprob_T=seen(self.reference_PV),
            value_T=value_T,
            bootstrap_N=torch.zeros(len(batch), dtype=torch.float64),
            extras_T={**batch.extras_T, "old_sum_p2_T": policy_PV.softmax(1).square().sum(1)[of_T[0]]},
        )

    def outputs(self, compact: Batch, logits_PV: Tensor) -> Outputs:
        logp_PV = logits_PV.log_softmax(1)
        state_T = compact.extras_T["state"]
        entropy_P = -(logp_PV.exp() * logp_PV).sum(1)
        return Outputs(logprob_T=logp_PV[state_T, compact.token_T], entropy_T=entropy_P[state_T])


def loss_of(algorithm: Algorithm, setting: Setting, answers: Sequence[Answer], version: int = 3) -> Tensor:
    """The loss of one optimizer step on these answers, as loop and engine put it together."""
    whole = algorithm.estimate(setting.batch(answers), version)
    if algorithm.two_pass:
        seen = setting.outputs(whole.compact(), setting.logits_PV.detach())
        whole = whole.expanded(algorithm.select(whole.compact(), seen))
    compact = whole.compact()
    return total(algorithm.loss(compact, setting.outputs(compact, setting.logits_PV)), compact)


def expected(algorithm: Algorithm, setting: Setting, version: int = 3) -> Tensor:
    """The gradient of the loss in the logits, averaged over all batches that the sampler could have made; [P, V]."""
    losses = [chance * loss_of(algorithm, setting, answers, version) for chance, answers in setting.outcomes()]
    return gradient(torch.stack(losses).sum(), setting.logits_PV)


def gradient(value: Tensor, logits_PV: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits_PV, retain_graph=True)[0]


def true_gradient(setting: Setting, reward: Callable[[Answer], float] | None = None) -> Tensor:
    """Of the expected reward under the current policy."""
    world, paid = setting.world, reward or setting.reward
    goal = torch.stack([world.probability(setting.logits_PV, a) * paid(a) for a in world.answers]).sum()
    return gradient(goal, setting.logits_PV)


def by_hand(setting: Setting, coefficients: Coefficients) -> Tensor:
    """−Σ over all batches of chance · Σ over their tokens of coefficient · ∇ log π(token), in plain Python; [P, V]."""
    world, probability = setting.world, setting.logits_PV.detach().softmax(1).tolist()
    found = [[0.0] * world.vocabulary for _ in world.prefixes]
    for chance, answers in setting.outcomes():
        for answer, weights in zip(answers, coefficients(answers), strict=True):
            for (prefix, token), weight in zip(world.steps(answer), weights, strict=True):
                for v in range(world.vocabulary):
                    found[prefix][v] -= chance * weight * ((v == token) - probability[prefix][v])
    return torch.tensor(found, dtype=torch.float64)


# ---------------------------------------------------------------------- advantages and means in plain Python


def others(rewards: Sequence[float]) -> list[float]:
    """Less the mean of the others; nothing where there is none."""
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards] if len(rewards) > 1 else [0.0] * len(rewards)


def spread(answers: Sequence[Answer], advantages: Sequence[float]) -> list[list[float]]:
    return [[x] * len(a) for a, x in zip(answers, advantages, strict=True)]


def token_sum(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[x / len(rows) for x in row] for row in rows]


def same(found: Tensor, right: Tensor) -> None:
    """Equal up to the float32 in which advantages are kept, and not both zero."""
    assert float(right.abs().max()) > 1e-4
    torch.testing.assert_close(found, right, rtol=2e-5, atol=1e-7)


SUM = {"aggregate": "sequence-mean-token-sum"}
WORLDS = pytest.mark.parametrize(("world", "size"), [(WIDE, 2), (LONG, 3)], ids=["wide", "long"])


def around(world: World, size: int, **more: Any) -> Setting:
    return Setting(world, world.policy(0).requires_grad_(), size, **more)
