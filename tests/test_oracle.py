"""Expected gradients, exact: every answer and every group of a tiny world is listed (`oracle_help.py`).

Where theory says an estimate is unbiased it is compared with the gradient of the expected reward, by autograd; where it
is not, with the biased value worked out in plain Python from the documented formula.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle_help import (
    END,
    LONG,
    SUM,
    WIDE,
    WORLDS,
    Answer,
    Setting,
    World,
    around,
    by_hand,
    earned,
    expected,
    gradient,
    loss_of,
    made,
    others,
    same,
    solved,
    spread,
    token_sum,
    true_gradient,
)
from treadle.algorithms.kl import Estimator as KLEstimator
from treadle.algorithms.kl import kl

# ---------------------------------------------------------------------- advantages in plain Python, one group


def centred(rewards: Sequence[float]) -> list[float]:
    return [r - statistics.fmean(rewards) for r in rewards]


def scaled(rewards: Sequence[float]) -> list[float]:
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    return [x / (statistics.stdev(rewards) + 1e-6) for x in centred(rewards)]


def whitened(values: Sequence[float]) -> list[float]:
    if len(values) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    return [x / (statistics.stdev(values) + 1e-6) for x in centred(values)]


def whitened_tokens(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    flat = iter(whitened([x for row in rows for x in row]))
    return [[next(flat) for _ in row] for row in rows]


def split(answers: Sequence[Answer], size: int) -> list[Sequence[Answer]]:
    return [answers[i : i + size] for i in range(0, len(answers), size)]


def token_mean(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    tokens = sum(len(row) for row in rows)
    return [[x / tokens for x in row] for row in rows]


def mean_of_means(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[x / len(row) / len(rows) for x in row] for row in rows]


# ---------------------------------------------------------------------- where theory says: unbiased


@WORLDS
def test_the_hand_made_expectation_of_reinforce_is_the_true_gradient(world: World, size: int) -> None:
    setting = around(world, size)
    assert sum(chance for chance, _ in setting.outcomes()) == pytest.approx(1, abs=1e-12)
    same(by_hand(setting, lambda answers: token_sum(spread(answers, [earned(a) for a in answers]))), -true(setting))


def true(setting: Setting) -> Tensor:
    return true_gradient(setting)


OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    ("importance", {}),
    ("importance", {"truncate": 1.0}),
    ("clip", {}),
    ("clip", {"dual_clip": 3.0}),
    ("cispo", {}),
    ("sapo", {}),
    ("gspo", {"level": "token"}),
    ("gspo", {"level": "sequence"}),
    ("gmpo", {}),
    ("dppo", {}),
    ("dppo", {"divergence": "kl"}),
    ("dro", {"level": "sequence"}),
    ("dro", {"level": "token"}),
    ("m2po", {}),
    ("kl_cov", {}),
    ("clip_cov", {"cov_low": 1e6}),  # nothing is drawn
]


@WORLDS
@pytest.mark.parametrize(("objective", "keys"), OBJECTIVES, ids=lambda x: str(x))
def test_at_the_first_step_every_objective_follows_the_true_gradient(
    world: World, size: int, objective: str, keys: dict[str, Any]
) -> None:
    """RLOO's baseline, the sum over an answer's tokens. Whether old log-probs were noted makes no difference."""
    algorithm = made(f"{objective}+rloo", **SUM, **keys)
    setting = around(world, size)
    same(expected(algorithm, setting), -true(setting))
    same(expected(algorithm, around(world, size, old_PV=world.policy(0))), -true(setting))


@WORLDS
@pytest.mark.parametrize("objective", ["importance", "clip", "cispo", "dro"])
def test_remax_is_unbiased_whatever_the_greedy_answer_earned(world: World, size: int, objective: str) -> None:
    for greedy in world.answers[:3]:
        for answers in (1, size):
            setting = around(world, answers, greedy=greedy)
            same(expected(made(f"{objective}+remax", **SUM), setting), -true(setting))


@pytest.mark.parametrize("name", ["rloo", "remax"])
def test_two_prompts_are_averaged(name: str) -> None:
    setting = around(LONG, 2, groups=2, greedy=LONG.answers[1] if name == "remax" else None)
    same(expected(made(name), setting), -true(setting))


@WORLDS
@pytest.mark.parametrize(("name", "keys"), [("dr_grpo", {"constant_length": 5}), ("grpo", {"scale": "none", **SUM})])
def test_a_mean_with_the_answer_in_it_shrinks_the_gradient(
    world: World, size: int, name: str, keys: dict[str, Any]
) -> None:
    setting, length = around(world, size), keys.get("constant_length", 1)
    same(expected(made(name, **keys), setting), -true(setting) * (size - 1) / size / length)


@WORLDS
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_with_the_true_values_is_unbiased_for_any_lambda(world: World, size: int, lam: float) -> None:
    setting = around(world, 1, value_P=true_values(world))
    same(gae_gradient(setting, lam), -true(setting))


def test_gae_that_trusts_rewards_only_is_unbiased_with_any_critic() -> None:
    setting = around(LONG, 1, value_P=[3.0, -2.0, 0.5])
    same(gae_gradient(setting, 1.0), -true(setting))
    assert float((gae_gradient(setting, 0.5) + true(setting)).abs().max()) > 0.01, "a wrong critic biases"


def true_values(world: World) -> list[float]:
    """Expected reward from each prefix on."""
    logits_PV = world.policy(0)
    chance = {a: float(world.probability(logits_PV, a)) for a in world.answers}
    of_prefix = [[a for a in world.answers if a[: len(p)] == p] for p in world.prefixes]
    return [sum(chance[a] * earned(a) for a in after) / sum(chance[a] for a in after) for after in of_prefix]


def gae_gradient(setting: Setting, lam: float) -> Tensor:
    """Of the advantages before they are whitened: returns less values."""

    def advantages(answers: Sequence[Answer]) -> list[list[float]]:
        done = made("critic", lam=lam).estimate(setting.batch(answers)).compact()
        assert done.return_T is not None
        assert done.value_T is not None
        return [(done.return_T - done.value_T).tolist()]

    return by_hand(setting, advantages)


@WORLDS
def test_dynamic_sampling_divides_by_the_share_of_groups_that_are_kept(world: World, size: int) -> None:
    algorithm = made("rloo", dynamic_sampling=True)
    setting = around(world, size)
    kept = [
        (chance, answers) for chance, answers in setting.outcomes() if algorithm.keep(setting.group(0, answers)) is None
    ]
    share = sum(chance for chance, _ in kept)
    assert 0.1 < share < 0.9
    losses = [chance / share * loss_of(algorithm, setting, answers) for chance, answers in kept]
    same(gradient(torch.stack(losses).sum(), setting.logits_PV), -true(setting) / share)


# ---------------------------------------------------------------------- documented biases

BIASED: dict[str, Callable[[Sequence[Sequence[Answer]]], list[list[float]]]] = {}
"""Coefficient of each token of each answer, from the answers of each group, by the name of an algorithm."""


def biased(name: str) -> Callable[[Any], Any]:
    return lambda formula: BIASED.setdefault(name, formula)


@biased("grpo")
def _grpo(groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
    return mean_of_means([row for g in groups for row in spread(g, scaled([earned(a) for a in g]))])


@biased("opo")
def _opo(groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
    rows: list[list[float]] = []
    for g in groups:
        baseline = sum(len(a) * earned(a) for a in g) / sum(len(a) for a in g)
        equal = len({earned(a) for a in g}) == 1
        rows += spread(g, [0.0 if equal else earned(a) - baseline for a in g])
    return token_sum(rows)


@biased("gpg")
def _gpg(groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
    differ = sum(len({earned(a) for a in g}) > 1 for g in groups)
    rows = [row for g in groups for row in spread(g, centred([earned(a) for a in g]))]
    return token_mean([[x * len(groups) / max(differ, 1) for x in row] for row in rows])


@biased("reinforce_plus_plus")
def _reinforce(groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
    answers = [a for g in groups for a in g]
    returns = [[0.9 ** (len(a) - 1 - t) * earned(a) for t in range(len(a))] for a in answers]
    return token_mean(whitened_tokens(returns))


@biased("reinforce_plus_plus_baseline")
def _reinforce_baseline(groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
    rows = [row for g in groups for row in spread(g, centred([earned(a) for a in g]))]
    return token_mean(whitened_tokens(rows))


PARTS = {"right": earned, "short": lambda a: float(-len(a))}


@biased("gdpo")
def _gdpo(groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
    rows: list[list[float]] = []
    for g in groups:
        right, short = (scaled([part(a) for a in g]) for part in PARTS.values())
        rows += spread(g, [x + 0.5 * y for x, y in zip(right, short, strict=True)])
    return mean_of_means(whitened_tokens(rows))


@biased("pass_at_k")
def _pass_at_k(groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
    """Over all sets of all answers of a group but one: is one of them solved?"""
    rows: list[list[float]] = []
    for g in groups:
        best = {some: max(solved(g[i]) for i in some) for some in combinations(range(len(g)), len(g) - 1)}
        mean = statistics.fmean(best.values())
        deviation = math.sqrt(mean * (1 - mean))
        worth = [statistics.fmean(r for some, r in best.items() if i in some) for i in range(len(g))]
        rows += spread(g, [(w - mean) / deviation if deviation else 0.0 for w in worth])
    return mean_of_means(rows)


@biased("optimal_token")
def _optimal_token(groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
    probability = LONG.policy(0).softmax(1).tolist()
    rows: list[list[float]] = []
    for g in groups:
        energy = []
        for a in g:
            moved = [
                sum((float(u == v) - x) ** 2 for u, x in enumerate(probability[p])) for p, v in LONG.steps(a)
            ]  # squared norm of the gradient in the logits
            energy.append([sum(moved[: t + 1]) for t in range(len(a))])
        baseline: list[float] = []
        for t in range(LONG.length):
            alive = [i for i, a in enumerate(g) if len(a) > t]
            before = baseline[-1] if baseline else statistics.fmean(earned(a) for a in g)
            weight = sum(energy[i][t] for i in alive)
            earned_by = sum(energy[i][t] * earned(g[i]) for i in alive)
            baseline.append(earned_by / weight if len(alive) > 1 else before)
        equal = len({earned(a) for a in g}) == 1
        rows += [[0.0 if equal else earned(a) - baseline[t] for t in range(len(a))] for a in g]
    return token_sum(rows)


VALUES = [0.25, -0.5, 1.0]


@biased("critic")
def _critic(groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
    rows: list[list[float]] = []
    for a in (a for g in groups for a in g):
        value = [VALUES[p] for p, _ in LONG.steps(a)]
        step = [after - now for now, after in zip(value, [*value[1:], earned(a)], strict=True)]
        rows.append([sum(0.8 ** (k - t) * step[k] for k in range(t, len(a))) for t in range(len(a))])
    return mean_of_means(whitened_tokens(rows))


KEYS: dict[str, dict[str, Any]] = {
    "gpg": {"aggregate": "token-mean"},
    "reinforce_plus_plus": {"gamma": 0.9},
    "gdpo": {"part_weights": {"short": 0.5}},
    "critic": {"lam": 0.8, "aggregate": "sequence-mean-token-mean"},
}


@pytest.mark.parametrize(("size", "groups"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("name", list(BIASED))
def test_biased_estimators_have_the_bias_that_their_formula_says(name: str, size: int, groups: int) -> None:
    setting = around(
        LONG,
        size,
        groups=groups,
        reward=solved if name == "pass_at_k" else earned,
        parts=PARTS if name == "gdpo" else {},
        value_P=VALUES if name == "critic" else None,
        old_PV=LONG.policy(0) if name == "optimal_token" else None,
    )
    right = by_hand(setting, lambda answers: BIASED[name](split(answers, size)))
    keys = {"k": size - 1} if name == "pass_at_k" else KEYS.get(name, {})
    same(expected(made(name, **keys), setting), right)
    ratio = float((right * true(setting)).sum() / true(setting).square().sum())
    assert float((right - ratio * true(setting)).abs().max()) > 1e-3, "it is no multiple of the true gradient"


@WORLDS
def test_a_mean_over_tokens_weighs_answers_by_the_lengths_of_others(world: World, size: int) -> None:
    """E[Σ / T] is not E[Σ] / E[T]."""
    setting = around(world, size)
    found = expected(made("importance+rloo", aggregate="token-mean"), setting)
    same(found, by_hand(setting, lambda answers: token_mean(spread(answers, others([earned(a) for a in answers])))))
    tokens = sum(chance * sum(map(len, answers)) for chance, answers in setting.outcomes())
    assert float((found + true(setting) * size / tokens).abs().max()) > 1e-3


@WORLDS
@pytest.mark.parametrize("name", ["importance", "gspo", "gmpo"])
def test_a_mean_over_the_tokens_of_an_answer_makes_long_answers_cheap(world: World, size: int, name: str) -> None:
    """GSPO's and GMPO's ratio is the length-th root, so its gradient is that of a mean over tokens."""
    setting = around(world, size)
    found = expected(made(f"{name}+rloo", aggregate="sequence-mean-token-mean"), setting)
    same(found, by_hand(setting, lambda answers: mean_of_means(spread(answers, others([earned(a) for a in answers])))))
    assert float((found + true(setting) / 2).abs().max()) > 1e-3


@WORLDS
def test_rejected_answers_are_in_no_baseline_and_no_denominator(world: World, size: int) -> None:
    """Truncated answers rejected: what is left of a group is a smaller group."""
    setting = around(world, size)

    def right(answers: Sequence[Answer]) -> list[list[float]]:
        whole = [a for a in answers if a[-1] == END]
        found = dict(zip(whole, others([earned(a) for a in whole]), strict=True))
        return [[found.get(a, 0.0) / max(len(whole), 1)] * len(a) for a in answers]

    same(expected(made("importance+rloo", truncated="reject", **SUM), setting), by_hand(setting, right))


# ---------------------------------------------------------------------- KL and entropy


def state_kl(setting: Setting, forward: bool) -> Tensor:
    """The gradient of Σ over prefixes of their probability, held fixed, times a KL there; of a sum over tokens."""
    world = setting.world
    logp_PV, reference_PV = setting.logits_PV.log_softmax(1), setting.reference_PV
    assert reference_PV is not None
    other_PV = reference_PV.log_softmax(1)
    p_PV, x_PV = (logp_PV, logp_PV - other_PV) if forward else (other_PV, other_PV - logp_PV)
    chance = {a: float(world.probability(setting.sampled_PV, a)) for a in world.answers}
    reach = [sum(chance[a] for a in world.answers if a[: len(p)] == p) for p in world.prefixes]
    kl_P = (p_PV.exp() * x_PV).sum(1)
    return gradient((torch.tensor(reach, dtype=torch.float64) * kl_P).sum(), setting.logits_PV)


@WORLDS
@pytest.mark.parametrize("estimator", ["k1+", "k2", "k3", "k3+", "abs+"])
def test_the_kl_in_a_loss_has_the_documented_gradient(world: World, size: int, estimator: KLEstimator) -> None:
    setting = around(world, size, reference_PV=world.policy(3))
    plain = expected(made("importance+rloo", **SUM), setting)
    charged = made("importance+rloo", kl_coefficient=0.5, kl_estimator=estimator, **SUM)
    same((expected(charged, setting) - plain) / 0.5, state_kl(setting, forward=estimator != "k3"))


@pytest.mark.parametrize("world", [WIDE, LONG])
def test_k1_in_a_loss_says_nothing(world: World) -> None:
    """The configuration refuses it for that."""
    setting = around(world, 1, reference_PV=world.policy(3))
    terms = []
    for chance, answers in setting.outcomes():
        batch = setting.batch(answers).compact()
        logprob_T = setting.outputs(batch, setting.logits_PV).logprob_T
        assert logprob_T is not None
        assert batch.reference_logprob_T is not None
        terms.append(chance * kl(logprob_T, batch.reference_logprob_T, "k1").sum())
    assert float(gradient(torch.stack(terms).sum(), setting.logits_PV).abs().max()) < 1e-12
    with pytest.raises(ValueError, match="kl_estimator is k1, whose expected gradient in a loss is zero"):
        made("rloo", kl_coefficient=0.1, kl_estimator="k1")


@WORLDS
@pytest.mark.parametrize("estimator", ["k1", "k1+"])
def test_k1_in_the_reward_gives_the_gradient_of_the_penalised_objective(
    world: World, size: int, estimator: KLEstimator
) -> None:
    """E[R] − β·KL(π ‖ π_ref) over whole answers, the later tokens' KL charged to the earlier ones."""
    setting = around(world, size, reference_PV=world.policy(3), old_PV=world.policy(0))
    charged = made("importance+rloo", kl_coefficient=0.5, kl_in="reward", kl_estimator=estimator, **SUM)
    chances = torch.stack([world.probability(setting.logits_PV, a) for a in world.answers])
    assert setting.reference_PV is not None
    others = torch.stack([world.probability(setting.reference_PV, a) for a in world.answers])
    whole_kl = gradient((chances * (chances / others).log()).sum(), setting.logits_PV)
    same(expected(charged, setting), -(true(setting) - 0.5 * whole_kl))
    assert float((whole_kl - state_kl(setting, forward=True)).abs().max()) > 1e-3, "not that of a KL in the loss"


@WORLDS
def test_the_entropy_bonus_raises_the_entropy_where_the_policy_goes(world: World, size: int) -> None:
    setting = around(world, size)
    plain = expected(made("importance+rloo", **SUM), setting)
    found = expected(made("importance+rloo", entropy_coefficient=0.25, **SUM), setting) - plain
    uniform = around(world, size, reference_PV=torch.zeros_like(world.policy(0)))
    same(found / 0.25, state_kl(uniform, forward=True))  # KL to the uniform policy is a constant less the entropy
