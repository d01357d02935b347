"""Expected gradients off-policy, exact: old weights, or another engine's, sampled the answers (`oracle_help.py`).

Each objective's weights are written out in plain Python from the paper's formula, and so is each correction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.oracle_help import (
    SUM,
    WORLDS,
    Answer,
    Setting,
    World,
    around,
    by_hand,
    earned,
    expected,
    made,
    others,
    same,
    token_sum,
    true_gradient,
)


def stale(world: World, size: int, **more: Any) -> Setting:
    """Answers of the policy at the start of the step, which the current one has left."""
    return around(world, size, sampler_PV=world.policy(7), old_PV=world.policy(7), **more)


# ---------------------------------------------------------------------- off-policy: old weights sampled


@dataclass(frozen=True)
class Row:
    """One answer in a step whose policy has moved."""

    advantage: float
    now: list[float]  # log-probs
    old: list[float]

    @property
    def moved(self) -> list[float]:
        return [n - o for n, o in zip(self.now, self.old, strict=True)]

    @property
    def ratios(self) -> list[float]:
        return [math.exp(x) for x in self.moved]

    def away(self, ratio: float) -> bool:
        return (self.advantage > 0 and ratio > 1) or (self.advantage < 0 and ratio < 1)


def rows_of(setting: Setting, answers: Sequence[Answer]) -> list[Row]:
    assert setting.old_PV is not None
    world, advantages = setting.world, others([setting.reward(a) for a in answers])
    return [
        Row(x, world.logprobs(setting.logits_PV, a), world.logprobs(setting.old_PV, a))
        for a, x in zip(answers, advantages, strict=True)
    ]


def by_token(weight: Callable[[Row, float], float]) -> Callable[[Sequence[Row]], list[list[float]]]:
    """What multiplies A·∇ log π, from the ratio of the token alone."""
    return lambda rows: [[weight(row, r) * row.advantage for r in row.ratios] for row in rows]


def held(row: Row, r: float, low: float, high: float, most: float = math.inf) -> float:
    """PPO's weight: the ratio, or nothing where the minimum is the clipped one."""
    a = row.advantage
    return r if r * a <= min(max(r, 1 - low), 1 + high) * a and not (a < 0 and r > most) else 0.0


def sapo(row: Row, r: float) -> float:
    steep = 1.0 if row.advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-steep * (r - 1)))
    return 4 * gate * (1 - gate) * r


def dppo(divergence: Callable[[float, float], float], limit: float) -> Callable[[Sequence[Row]], list[list[float]]]:
    def weights(rows: Sequence[Row]) -> list[list[float]]:
        found = []
        for row in rows:
            far = [divergence(math.exp(n), math.exp(o)) > limit for n, o in zip(row.now, row.old, strict=True)]
            pairs = zip(row.ratios, far, strict=True)
            found.append([0.0 if f and row.away(r) else min(r, 20.0) * row.advantage for r, f in pairs])
        return found

    return weights


def binary_kl(now: float, old: float) -> float:
    return old * math.log(old / now) + (1 - old) * math.log((1 - old) / (1 - now))


def gspo(rows: Sequence[Row]) -> list[list[float]]:
    found = []
    for row in rows:
        s = math.prod(row.ratios) ** (1 / len(row.now))
        found.append([held(row, s, 0.1, 0.2) * row.advantage] * len(row.now))
    return found


def gmpo(rows: Sequence[Row]) -> list[list[float]]:
    found = []
    for row in rows:
        a = row.advantage
        clipped = [min(x, 0.3) if a > 0 else max(x, -0.2) if a < 0 else x for x in row.moved]
        mean = math.exp(statistics.fmean(clipped))
        found.append([mean * a * (c == x) for c, x in zip(clipped, row.moved, strict=True)])
    return found


def kl_cov(rows: Sequence[Row]) -> list[list[float]]:
    """The half of all tokens with the largest covariance are pulled back."""
    tokens = [(n, row.advantage) for row in rows for n in row.now]
    x, a = (statistics.fmean(column) for column in zip(*tokens, strict=True))
    covariances = sorted(((n - x) * (b - a) for n, b in tokens), reverse=True)
    least = covariances[max(len(tokens) // 2, 1) - 1]

    def weight(row: Row, now: float, old: float) -> float:
        back = math.copysign(0.7, now - old) if (now - x) * (row.advantage - a) >= least - 1e-9 else 0.0
        return math.exp(now - old) * row.advantage - back

    return [[weight(row, n, o) for n, o in zip(row.now, row.old, strict=True)] for row in rows]


def m2po(rows: Sequence[Row]) -> list[list[float]]:
    """Of those that go on away one after the other is left out, while the mean of their squares is too large."""
    moved = {(i, t): x for i, row in enumerate(rows) for t, x in enumerate(row.moved)}
    left = {at: x * x for at, x in moved.items() if rows[at[0]].away(math.exp(x))}
    out = set()
    while sum(left.values()) > 0.3 * len(left) + 1e-12:
        out.add(max(left, key=left.__getitem__))
        left = {at: x for at, x in left.items() if at not in out}
    return [[r * row.advantage * ((i, t) not in out) for t, r in enumerate(row.ratios)] for i, row in enumerate(rows)]


MOVED: list[tuple[str, dict[str, Any], Callable[[Sequence[Row]], list[list[float]]]]] = [
    ("importance", {}, by_token(lambda row, r: r)),
    ("importance", {"truncate": 1.25}, by_token(lambda row, r: min(r, 1.25))),
    ("clip", {"clip_high": 0.3}, by_token(lambda row, r: held(row, r, 0.2, 0.3))),
    ("clip", {"dual_clip": 1.5}, by_token(lambda row, r: held(row, r, 0.2, 0.2, 1.5))),
    ("cispo", {"clip_low": 0.3, "clip_high": 0.25}, by_token(lambda row, r: min(max(r, 0.7), 1.25))),
    ("cispo", {}, by_token(lambda row, r: min(r, 5.0))),
    ("sapo", {}, by_token(sapo)),
    ("gspo", {"level": "sequence", "clip_low": 0.1, "clip_high": 0.2}, gspo),
    ("gspo", {"level": "token", "clip_low": 0.1, "clip_high": 0.2}, gspo),
    ("gmpo", {"clip_low": 0.2, "clip_high": 0.3}, gmpo),
    ("dppo", {}, dppo(lambda now, old: abs(now - old), 0.15)),
    ("dppo", {"divergence": "kl", "limit": 0.05}, dppo(binary_kl, 0.05)),
    ("dro", {"level": "token"}, lambda rows: [[row.advantage - 0.1 * x for x in row.moved] for row in rows]),
    (
        "dro",
        {"level": "sequence", "beta": 0.3},
        lambda rows: [[row.advantage - 0.3 * sum(row.moved)] * len(row.now) for row in rows],
    ),
    ("kl_cov", {"share": 0.5, "beta": 0.7}, kl_cov),
    ("m2po", {"limit": 0.3}, m2po),
]


@WORLDS
@pytest.mark.parametrize(("objective", "keys", "formula"), MOVED, ids=lambda x: str(x) if not callable(x) else "")
def test_a_policy_that_moved_follows_each_objectives_own_weights(
    world: World, size: int, objective: str, keys: dict[str, Any], formula: Callable[[Sequence[Row]], list[list[float]]]
) -> None:
    """The same with old log-probs of a pass, and with the sampler's as the proximal policy's."""
    setting = stale(world, size)
    right = by_hand(setting, lambda answers: token_sum(formula(rows_of(setting, answers))))
    same(expected(made(f"{objective}+rloo", **SUM, **keys), setting), right)
    two = made(f"{objective}+rloo", **SUM, **keys, correction={"proximal": "sampler"})
    same(expected(two, around(world, size, sampler_PV=world.policy(7), old_PV=world.policy(1))), right)
    on_policy = by_hand(setting, lambda answers: token_sum(by_token(lambda row, r: 1.0)(rows_of(setting, answers))))
    assert float((right - on_policy).abs().max()) > 1e-3, "something has moved"


@WORLDS
def test_weights_of_single_tokens_are_not_enough_off_policy(world: World, size: int) -> None:
    setting = stale(world, size)
    found = expected(made("importance+rloo", **SUM), setting)
    assert float((found + true_gradient(setting)).abs().max()) > 1e-3


# ---------------------------------------------------------------------- correction of the sampler

OPEN = {"weight_low": 0.0, "weight_high": 1e6}


@WORLDS
@pytest.mark.parametrize("name", ["importance+rloo", "clip+rloo", "cispo+rloo", "importance+remax"])
def test_weights_of_whole_answers_turn_the_samplers_expectation_into_the_trainers(
    world: World, size: int, name: str
) -> None:
    """At the first optimizer step, where the proximal policy is the current one."""
    correction = {"weight": "sequence", **OPEN}
    greedy = world.answers[2] if name.endswith("remax") else None
    setting = around(world, size, sampler_PV=world.policy(7), old_PV=world.policy(0), greedy=greedy)
    same(expected(made(name, **SUM, correction=correction), setting), -true_gradient(setting))
    uncorrected = expected(made(name, **SUM), setting)
    assert float((uncorrected + true_gradient(setting)).abs().max()) > 1e-3


@WORLDS
@pytest.mark.parametrize(("name", "keys"), [("clip", {}), ("gspo", {"clip_high": 0.3}), ("sapo", {}), ("dro", {})])
def test_with_whole_weights_later_steps_are_those_of_answers_of_the_proximal_policy(
    world: World, size: int, name: str, keys: dict[str, Any]
) -> None:
    """Decoupled: three different policies. ReMax's baseline does not depend on who sampled."""
    proximal_PV, greedy = world.policy(1), world.answers[2]
    apart = around(world, size, sampler_PV=world.policy(7), old_PV=proximal_PV, greedy=greedy)
    near = around(world, size, sampler_PV=proximal_PV, old_PV=proximal_PV, greedy=greedy)
    keys = keys | SUM
    weighted = made(f"{name}+remax", **keys, correction={"weight": "sequence", **OPEN})
    same(expected(weighted, apart), expected(made(f"{name}+remax", **keys), near))


def proximal(setting: Setting, answer: Answer) -> list[float]:
    """π_p / π_s of each token."""
    assert setting.old_PV is not None
    world = setting.world
    pairs = zip(world.logprobs(setting.old_PV, answer), world.logprobs(setting.sampled_PV, answer), strict=True)
    return [math.exp(p - s) for p, s in pairs]


def bounded(weight: float, outside: str) -> float:
    near = min(max(weight, 0.6), 1.6)
    return near if outside == "truncate" or near == weight else 0.0


@WORLDS
@pytest.mark.parametrize("outside", ["truncate", "zero"])
@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_bounded_weights_have_the_bias_of_their_bounds(world: World, size: int, weight: str, outside: str) -> None:
    setting = around(world, size, sampler_PV=world.policy(5), old_PV=world.policy(0))

    def right(answers: Sequence[Answer]) -> list[list[float]]:
        found = []
        for a, x in zip(answers, others([earned(a) for a in answers]), strict=True):
            ratios = proximal(setting, a)
            if weight == "sequence":
                ratios = [math.prod(ratios)] * len(a)
            found.append([bounded(r, outside) * x for r in ratios])
        return token_sum(found)

    correction = {"weight": weight, "outside": outside, "weight_low": 0.6, "weight_high": 1.6}
    same(expected(made("importance+rloo", **SUM, correction=correction), setting), by_hand(setting, right))


@WORLDS
def test_answers_rejected_for_their_ratio_leave_a_smaller_group(world: World, size: int) -> None:
    setting = around(world, size, sampler_PV=world.policy(5), old_PV=world.policy(0))

    def right(answers: Sequence[Answer]) -> list[list[float]]:
        whole = [a for a in answers if 0.3 <= math.prod(proximal(setting, a)) <= 1.7]
        found = dict(zip(whole, others([earned(a) for a in whole]), strict=True))
        return [[found.get(a, 0.0) / max(len(whole), 1)] * len(a) for a in answers]

    correction = {"reject": "sequence-sum", "reject_low": 0.3, "reject_high": 1.7}
    same(expected(made("importance+rloo", **SUM, correction=correction), setting), by_hand(setting, right))


@WORLDS
@pytest.mark.parametrize("age", [0, 1, 3])
def test_an_interpolated_proximal_policy_lies_between_by_age(world: World, size: int, age: int) -> None:
    """Two weights a token: the ratio to the policy in between, clipped, and the weight from there to the sampler."""
    setting = around(world, size, sampler_PV=world.policy(7))

    def right(answers: Sequence[Answer]) -> list[list[float]]:
        found = []
        for a, x in zip(answers, others([earned(a) for a in answers]), strict=True):
            now, drawn = world.logprobs(setting.logits_PV, a), world.logprobs(setting.sampled_PV, a)
            between = [(s + age * n) / (age + 1) for n, s in zip(now, drawn, strict=True)]
            row = Row(x, now, between)
            weights = [math.exp(b - s) for b, s in zip(between, drawn, strict=True)]
            found.append([w * held(row, r, 0.2, 0.2) * x for w, r in zip(weights, row.ratios, strict=True)])
        return token_sum(found)

    correction = {"proximal": "interpolated", "weight": "token", **OPEN}
    found = expected(made("clip+rloo", **SUM, correction=correction), setting, version=3 + age)
    same(found, by_hand(setting, right))
