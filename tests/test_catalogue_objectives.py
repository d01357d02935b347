"""Objectives and corrections of the catalogue: values by hand, as plain loops on random tokens, and gradients.

Smooth objectives are differentiated by finite differences, away from their kinks; where a weight is detached, the
gradient is compared with the one that the paper names.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.batches import group, quick, trajectory
from tests.oracle_help import made, total
from treadle.algorithms.correction import CorrectionConfig
from treadle.algorithms.covariance import drawn
from treadle.algorithms.policy_gradient import PolicyGradient
from treadle.batch import Batch, Counts
from treadle.handles import Outputs


@dataclass(frozen=True)
class Case:
    """Answers in a step: advantage and, token by token, log-probs now and at the start."""

    answers: list[tuple[float, list[float], list[float]]]

    @property
    def tokens(self) -> list[tuple[float, float, float]]:
        """(advantage, now, old) of each token."""
        return [(a, n, o) for a, now, old in self.answers for n, o in zip(now, old, strict=True)]

    @property
    def batch(self) -> Batch:
        """Compact, in float64."""
        packed = Batch.pack([group(0, [trajectory("p" + "s" * len(now), 0.0) for _, now, _ in self.answers])])
        advantage, _, old = zip(*self.tokens, strict=True)
        return packed.compact().replace(advantage_T=wide(advantage), old_logprob_T=wide(old), sampling_logprob_T=None)

    @property
    def now_T(self) -> Tensor:
        return wide([n for _, n, _ in self.tokens])


def wide(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def outputs(now_T: Tensor) -> Outputs:
    return Outputs(logprob_T=now_T, entropy_T=torch.zeros_like(now_T))


def terms(algorithm: PolicyGradient, case: Case, now_T: Tensor | None = None, chosen: Batch | None = None) -> Tensor:
    """What each token adds to the loss, before any mean."""
    now_T = case.now_T if now_T is None else now_T
    batch = case.batch if chosen is None else chosen
    if algorithm.two_pass and chosen is None:
        batch = algorithm.select(batch, outputs(now_T.detach()))
    return algorithm.loss(batch, outputs(now_T)).terms[0].term_T


def slopes(algorithm: PolicyGradient, case: Case) -> list[float]:
    """The gradient of the sum of all terms in the log-probs."""
    now_T = case.now_T.requires_grad_()
    [found_T] = torch.autograd.grad(terms(algorithm, case, now_T).sum(), now_T)
    return found_T.tolist()


def near(right: Sequence[float]) -> Any:
    return pytest.approx(list(right), rel=1e-6, abs=1e-9)


logprob = st.floats(-4, -0.05)
answer = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.5]),
        st.lists(logprob, min_size=n, max_size=n),
        st.lists(logprob, min_size=n, max_size=n),
    )
)
cases = st.lists(answer, min_size=1, max_size=4).map(Case)

# ---------------------------------------------------------------------- formulas as loops


def ppo(a: float, r: float, low: float, high: float) -> float:
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)


def dual(a: float, r: float, most: float) -> float:
    return min(ppo(a, r, 0.2, 0.2), -most * a) if a < 0 else ppo(a, r, 0.2, 0.2)


def by_token(term: Callable[[float, float, float], float]) -> Callable[[Case], list[float]]:
    """From (advantage, log-prob, ratio)."""
    return lambda case: [term(a, n, math.exp(n - o)) for a, n, o in case.tokens]


def by_answer(term: Callable[[float, list[float], list[float]], list[float]]) -> Callable[[Case], list[float]]:
    """From (advantage, log-probs, log-ratios)."""
    return lambda case: [
        x for a, now, old in case.answers for x in term(a, now, [n - o for n, o in zip(now, old, strict=True)])
    ]


def gmpo(a: float, now: list[float], moved: list[float]) -> list[float]:
    sign = math.copysign(1, a) if a else 0.0
    clipped = [sign * min(sign * x, sign * min(max(x, -0.4), 0.4)) for x in moved]
    return [-a * math.exp(statistics.fmean(clipped))] * len(now)


def sapo(a: float, _: float, r: float) -> float:
    steep = 1.0 if a > 0 else 1.05
    return -a * 4 / steep / (1 + math.exp(-steep * (r - 1)))


def dppo(divergence: Callable[[float, float], float], limit: float) -> Callable[[Case], list[float]]:
    def term(a: float, n: float, r: float) -> float:
        far = divergence(math.exp(n), math.exp(n) / r) > limit
        away = (a > 0 and r > 1) or (a < 0 and r < 1)
        return 0.0 if far and away else -min(r, 20.0) * a * n

    return by_token(term)


def binary_kl(now: float, old: float) -> float:
    return old * math.log(old / now) + (1 - old) * math.log((1 - old) / (1 - now))


def m2po(case: Case) -> list[float]:
    """Token by token, the largest first."""
    left = {i: (n - o) ** 2 for i, (a, n, o) in enumerate(case.tokens) if a * (n - o) > 0}
    out: set[int] = set()
    while left and statistics.fmean(left.values()) > 0.5:
        out.add(max(left, key=left.__getitem__))
        left = {i: x for i, x in left.items() if i not in out}
    return [0.0 if i in out else -math.exp(n - o) * a for i, (a, n, o) in enumerate(case.tokens)]


def covariances(case: Case) -> list[float]:
    a_, n_ = statistics.fmean(a for a, _, _ in case.tokens), statistics.fmean(n for _, n, _ in case.tokens)
    return [(a - a_) * (n - n_) for a, n, _ in case.tokens]


def kl_cov(case: Case) -> list[float]:
    found = covariances(case)
    most = sorted(found)[-max(len(found) // 3, 1)]
    return [
        -math.exp(n - o) * a + (0.7 * abs(n - o) if c >= most - 1e-12 else 0.0)
        for c, (a, n, o) in zip(found, case.tokens, strict=True)
    ]


TERMS: list[tuple[str, dict[str, Any], Callable[[Case], list[float]]]] = [
    ("clip", {"clip_low": 0.2, "clip_high": 0.28}, by_token(lambda a, n, r: ppo(a, r, 0.2, 0.28))),
    ("clip", {"dual_clip": 3.0}, by_token(lambda a, n, r: dual(a, r, 3.0))),
    ("importance", {}, by_token(lambda a, n, r: -r * a)),
    ("importance", {"truncate": 2.0}, by_token(lambda a, n, r: -min(r, 2.0) * a * n)),
    ("cispo", {}, by_token(lambda a, n, r: -min(r, 5.0) * a * n)),
    ("cispo", {"clip_low": 0.3, "clip_high": 0.5}, by_token(lambda a, n, r: -min(max(r, 0.7), 1.5) * a * n)),
    ("sapo", {}, by_token(sapo)),
    *(
        (
            "gspo",
            {"level": level, "clip_low": 0.2, "clip_high": 0.3},
            by_answer(lambda a, now, x: [ppo(a, math.exp(statistics.fmean(x)), 0.2, 0.3)] * len(x)),
        )
        for level in ("sequence", "token")
    ),
    ("gmpo", {}, by_answer(gmpo)),
    ("dppo", {}, dppo(lambda now, old: abs(now - old), 0.15)),
    ("dppo", {"divergence": "kl", "limit": 0.05}, dppo(binary_kl, 0.05)),
    (
        "dro",
        {"level": "token"},
        by_answer(lambda a, now, x: [-a * n + 0.05 * y * y for n, y in zip(now, x, strict=True)]),
    ),
    (
        "dro",
        {"level": "sequence", "beta": 0.3},
        by_answer(lambda a, now, x: [-a * n + 0.15 * sum(x) ** 2 / len(x) for n in now]),
    ),
    ("m2po", {"limit": 0.5}, m2po),
    ("kl_cov", {"share": 1 / 3, "beta": 0.7}, kl_cov),
]


@pytest.mark.parametrize(("name", "keys", "formula"), TERMS, ids=lambda x: "" if callable(x) else str(x))
@quick
@given(cases)
def test_objectives_are_their_formulas_on_any_tokens(
    name: str, keys: dict[str, Any], formula: Callable[[Case], list[float]], case: Case
) -> None:
    found = covariances(case)
    assume(name != "kl_cov" or min([abs(x - y) for x, y in combinations(found, 2)], default=1) > 1e-9)
    assert terms(made(name, **keys), case).tolist() == near(formula(case))


def by_ratio(*rows: tuple[float, float]) -> Case:
    """Answers of one token, by (advantage, ratio)."""
    return Case([(a, [-1.0 + math.log(r)], [-1.0]) for a, r in rows])


def test_clips_by_hand() -> None:
    case = by_ratio((1, 1.5), (1, 0.5), (-1, 1.5), (-1, 0.5), (-1, 5), (2, 1.25))
    clip = made("clip", clip_low=0.2, clip_high=0.3)
    assert terms(clip, case).tolist() == near([-1.3, -0.5, 1.5, 0.8, 5, -2.5])
    assert slopes(clip, case) == near([0, -0.5, 1.5, 0, 5, -2.5])
    both = made("clip", clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert terms(both, case).tolist() == near([-1.3, -0.5, 1.5, 0.8, 3, -2.5])
    assert slopes(both, case) == near([0, -0.5, 1.5, 0, 0, -2.5])
    found = both.loss(case.batch, outputs(case.now_T))
    assert found.metrics["clip_fraction"].tolist() == [1, 0, 0, 1, 1, 0]


def test_gspo_by_hand() -> None:
    """Ratios 4 and 1: the geometric mean is 2. Its gradient is shared by the two tokens."""
    case = Case([(1.0, [-1 + math.log(4), -2.0], [-1.0, -2.0])])
    gspo = made("gspo", clip_high=2.0)
    assert terms(gspo, case).tolist() == near([-2, -2])
    assert slopes(gspo, case) == near([-2, -2])  # two terms, each a half of the ratio's gradient
    assert slopes(made("gspo", clip_high=0.5), case) == near([0, 0])
    token = made("gspo", clip_high=2.0, level="token")
    assert slopes(token, case) == near([-2, -2])
    apart = case.batch.replace(advantage_T=wide([1.0, -1.0]))  # advantages of single tokens
    assert terms(token, case, chosen=apart).tolist() == near([-2, 2])


def test_gmpo_by_hand() -> None:
    case = Case([(1.0, [0.0, -1.0], [-1.0, -1.2]), (-1.0, [-2.0, -1.0], [-1.0, -1.2])])
    # Log-ratios 1 and 0.2; upwards the first is held at 0.4. Then -1 and 0.2: downwards held at -0.4.
    up, down = math.exp(0.3), math.exp(-0.1)
    assert terms(made("gmpo"), case).tolist() == near([-up, -up, down, down])
    assert slopes(made("gmpo"), case) == near([0, -up, 0, down])


def test_dppo_looks_at_probabilities_not_at_ratios() -> None:
    # From 0.01 to 0.05 the ratio is 5 and little has moved; from 0.5 to 0.8 much has.
    case = Case([(1.0, [math.log(0.05)], [math.log(0.01)]), (1.0, [math.log(0.8)], [math.log(0.5)])])
    assert slopes(made("dppo"), case) == near([-5, 0])
    back = Case([(-a, now, old) for a, now, old in case.answers])
    assert slopes(made("dppo"), back) == near([5, 1.6]), "on the way back nothing is held"
    assert slopes(made("dppo", divergence="kl", limit=0.05), case) == near([-5, 0])
    far = Case([(-1.0, [math.log(0.5)], [math.log(0.005)])])
    assert slopes(made("dppo"), far) == near([20])


def test_m2po_by_hand() -> None:
    # Squares 1, 0.25, 0.04 of tokens that go on away: without the first their mean is 0.29 / 2.
    case = Case([(1.0, [-1.0, -1.5, -1.8, -2.0], [-2.0] * 4)])
    assert slopes(made("m2po", limit=0.15), case) == near([0, -math.exp(0.5), -math.exp(0.2), -1])
    assert slopes(made("m2po", limit=0.14), case) == near([0, 0, -math.exp(0.2), -1])
    assert slopes(made("m2po", limit=0.03), case) == near([0, 0, 0, -1])
    # The largest is on its way back: it stays, and is not counted.
    back = Case([(-1.0, [-1.0], [-2.0]), (1.0, [-1.5, -1.8], [-2.0, -2.0])])
    assert slopes(made("m2po", limit=0.15), back) == near([math.e, -math.exp(0.5), -math.exp(0.2)])


# ---------------------------------------------------------------------- tokens chosen by their covariance


@quick
@given(cases)
def test_clip_cov_holds_a_share_of_the_tokens_within_its_bounds(case: Case) -> None:
    algorithm = made("clip_cov", cov_low=0.1, cov_high=1.0, share=0.4)
    found = covariances(case)
    assume(all(abs(c - bound) > 1e-9 for c in found for bound in (0.1, 1.0)))
    cut = [a * (n - o) > 0 and not 0.8 <= math.exp(n - o) <= 1.2 for a, n, o in case.tokens]
    able = [0.1 < c < 1.0 and not k for c, k in zip(found, cut, strict=True)]
    held = algorithm.select(case.batch, outputs(case.now_T)).extras_T["held_T"].tolist()
    assert all(x for x, h in zip(able, held, strict=True) if h)
    values = [c for c, h in zip(found, held, strict=True) if h]
    count = min(max(int(0.4 * len(found)), 1), sum(able))
    assert len(values) >= count
    assert len(set(values)) == len(values) == count or len({round(c, 9) for c in found}) < len(found)
    plain = slopes(made("clip"), case)
    assert slopes(algorithm, case) == near([0.0 if h else x for x, h in zip(plain, held, strict=True)])
    assert terms(algorithm, case).tolist() == near(terms(made("clip"), case).tolist()), "they count in the mean"


def test_the_draw_is_even_and_does_not_depend_on_the_order() -> None:
    value_T = torch.linspace(0, 1, 20000, dtype=torch.float64).exp()
    able_T = value_T < 2.5
    held_T = drawn(value_T, able_T, 0.1)
    assert int(held_T.sum()) == 2000
    assert not bool((held_T & ~able_T).any())
    order_T = torch.randperm(20000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn(value_T[order_T], able_T[order_T], 0.1), held_T[order_T])
    quarters = [int(part_T.sum()) for part_T in held_T[able_T].chunk(4)]
    assert all(abs(n - 500) < 100 for n in quarters), quarters


def test_kl_cov_pulls_the_tokens_of_the_largest_covariance_back() -> None:
    # Log-probs -1, -2, -3, -2 about their mean -2; advantages 1, 1, -1, -1: covariances 1, 0, 1, 0.
    case = Case([(1.0, [-1.0, -2.0], [-1.5, -2.0]), (-1.0, [-3.0, -2.0], [-2.5, -2.5])])
    algorithm = made("kl_cov", share=0.25, beta=2.0)
    r = math.exp(0.5)
    assert terms(algorithm, case).tolist() == near([-r + 1, -1, 1 / r + 1, r]), "equal ones stand together"
    assert slopes(algorithm, case) == near([-r + 2, -1, 1 / r - 2, r])


# ---------------------------------------------------------------------- gradients

SMOOTH: list[tuple[str, dict[str, Any]]] = [
    ("clip", {}),
    ("clip", {"dual_clip": 1.5}),
    ("importance", {}),
    ("sapo", {}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("gmpo", {}),
    ("dro", {"level": "token"}),
    ("dro", {"level": "sequence"}),
    ("m2po", {"limit": 0.1}),
    ("kl_cov", {"share": 0.3}),
]


def random_case(seed: int) -> Case:
    noise = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[float]:
        return torch.randn(count, generator=noise, dtype=torch.float64).tolist()

    found = []
    for length in (1, 2, 5, 3):
        old = [-abs(x) - 0.2 for x in some(length)]
        found.append((some(1)[0], [o + 0.4 * x for o, x in zip(old, some(length), strict=True)], old))
    return Case(found)


@pytest.mark.parametrize(("name", "keys"), SMOOTH, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_are_those_of_finite_differences(name: str, keys: dict[str, Any], seed: int) -> None:
    """The tokens chosen by a first pass stay chosen. Random points lie far enough from every kink."""
    algorithm, case = made(name, **keys), random_case(seed)
    ratios = [math.exp(n - o) for _, n, o in case.tokens]
    assert all(abs(r - kink) > 1e-4 for r in ratios for kink in (0.8, 1.2, 1.5, math.exp(0.4), math.exp(-0.4), 1.0))
    batch = algorithm.select(case.batch, outputs(case.now_T))

    def loss(now_T: Tensor) -> Tensor:
        return total(algorithm.loss(batch, outputs(now_T)), batch)

    assert torch.autograd.gradcheck(loss, (case.now_T.requires_grad_(),), eps=1e-7, atol=1e-5)


DETACHED: list[tuple[str, dict[str, Any], Callable[[float, float, float], float]]] = [
    ("cispo", {"clip_low": 0.3, "clip_high": 0.5}, lambda a, n, r: -min(max(r, 0.7), 1.5) * a),
    ("importance", {"truncate": 2.0}, lambda a, n, r: -min(r, 2.0) * a),
    ("dppo", {"limit": 10.0}, lambda a, n, r: -min(r, 20.0) * a),
    ("sapo", {}, lambda a, n, r: -a * r / math.cosh((1.0 if a > 0 else 1.05) * (r - 1) / 2) ** 2),
]


@pytest.mark.parametrize(("name", "keys", "slope"), DETACHED, ids=lambda x: "" if callable(x) else str(x))
@quick
@given(cases)
def test_detached_weights_leave_the_documented_gradient(
    name: str, keys: dict[str, Any], slope: Callable[[float, float, float], float], case: Case
) -> None:
    assert slopes(made(name, **keys), case) == near(by_token(slope)(case))


@quick
@given(cases)
def test_the_gradient_of_gspo_by_token_has_the_ratio_of_the_whole_answer(case: Case) -> None:
    def weights(a: float, now: list[float], moved: list[float]) -> list[float]:
        s = math.exp(statistics.fmean(moved))
        return [0.0 if (a > 0 and s > 1.3) or (a < 0 and s < 0.8) else -s * a] * len(now)

    keys = {"clip_low": 0.2, "clip_high": 0.3}
    assert slopes(made("gspo", level="token", **keys), case) == near(by_answer(weights)(case))
    assert slopes(made("gspo", **keys), case) == near(by_answer(weights)(case)), "with equal advantages, the same"


# ---------------------------------------------------------------------- correction

SAMPLER, PROXIMAL = [0.5, 0.4, 0.25, 0.1], [0.5, 0.8, 0.05, 0.15]
"""Probabilities of the tokens of two answers of two; ratios 1, 2 and 0.2, 1.5; by answer 2 and 0.3."""


def drifted() -> Batch:
    batch = Batch.pack([group(0, [trajectory("pss", 1.0), trajectory("pss", 0.0)])])
    return batch.replace(
        sampling_logprob_T=batch.expand(wide(SAMPLER).log()), old_logprob_T=batch.expand(wide(PROXIMAL).log())
    )


@pytest.mark.parametrize(
    ("keys", "right"),
    [
        ({"weight": "token"}, [1, 2, 0.2, 1.5]),
        ({"weight": "token", "weight_high": 1.25}, [1, 1.25, 0.2, 1.25]),
        ({"weight": "token", "weight_low": 0.5, "weight_high": 1.25}, [1, 1.25, 0.5, 1.25]),
        ({"weight": "token", "weight_low": 0.5, "weight_high": 1.25, "outside": "zero"}, [1, 0, 0, 0]),
        ({"weight": "token", "weight_low": 0.5, "weight_high": 1.75, "outside": "zero"}, [1, 0, 0, 1.5]),
        ({"weight": "sequence", "weight_high": 3.0}, [2, 2, 0.3, 0.3]),
        ({"weight": "sequence", "weight_high": 1.5}, [1.5, 1.5, 0.3, 0.3]),
        ({"weight": "sequence", "weight_low": 0.5, "weight_high": 1.5, "outside": "zero"}, [0, 0, 0, 0]),
        ({"weight": "token", "normalize": True}, [x / 1.175 for x in (1, 2, 0.2, 1.5)]),
        ({"weight": "sequence", "normalize": True}, [x / 1.15 for x in (2, 2, 0.3, 0.3)]),
        ({"weight": "token", "weight_high": 1.25, "normalize": True}, [x / 0.925 for x in (1, 1.25, 0.2, 1.25)]),
        (
            {"weight": "token", "weight_high": 1.75, "outside": "zero", "normalize": True},
            [x / 0.675 for x in (1, 0, 0.2, 1.5)],
        ),
    ],
    ids=str,
)
def test_weights_by_hand(keys: dict[str, Any], right: list[float]) -> None:
    algorithm = made("importance+dr_grpo", aggregate="token-mean", correction=keys)
    batch = algorithm.estimate(drifted()).compact()
    assert batch.weight_T is not None
    assert batch.weight_T.tolist() == pytest.approx(right)
    assert batch.count() == Counts(4, 2), "weights of 0 count in the denominator"
    now_T = wide(PROXIMAL).log().requires_grad_()
    found = algorithm.loss(batch, outputs(now_T))
    [slope_T] = torch.autograd.grad(total(found, batch), now_T)
    halves = (-0.5, -0.5, 0.5, 0.5)
    assert slope_T.tolist() == pytest.approx([w * x / 4 for w, x in zip(right, halves, strict=True)])
    assert found.metrics["weight"].tolist() == pytest.approx(right)
    assert float(found.peaks["weight_max"].max()) == pytest.approx(max(right))


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"reject": "token", "reject_low": 0.5, "reject_high": 1.75}, [True, False, False, True]),
        ({"reject": "token", "reject_low": 0.5, "reject_high": 3.0}, [True, True, False, True]),
        ({"reject": "sequence-sum", "reject_low": 0.25, "reject_high": 1.75}, [False, False, True, True]),
        ({"reject": "sequence-sum", "reject_low": 0.5, "reject_high": 3.0}, [True, True, False, False]),
        ({"reject": "sequence-mean", "reject_low": 0.5, "reject_high": 1.5}, [True, True, True, True]),  # √2, √0.3
        ({"reject": "sequence-mean", "reject_low": 0.6, "reject_high": 1.5}, [True, True, False, False]),
        ({"reject": "sequence-max", "reject_low": 0.15, "reject_high": 1.75}, [False, False, True, True]),
        ({"reject": "sequence-max", "reject_low": 0.5, "reject_high": 3.0}, [True, True, False, False]),
    ],
    ids=str,
)
def test_rejection_by_hand(keys: dict[str, Any], kept: list[bool]) -> None:
    algorithm = made("importance+dr_grpo", aggregate="token-mean", correction=keys)
    batch = algorithm.estimate(drifted())
    assert batch.mask_T[drifted().mask_T].tolist() == kept
    answers = [any(kept[:2]), any(kept[2:])]
    assert batch.count() == Counts(sum(kept), sum(answers))
    done = batch.compact()
    assert done.advantage_T is not None
    halves = [0.5, 0.5, -0.5, -0.5] if all(answers) else [0.0] * 4  # alone, an answer is its own baseline
    assert done.advantage_T.tolist() == [x for x, k in zip(halves, kept, strict=True) if k]
    assert done.weight_T is None


def test_what_is_rejected_is_in_no_mean_of_weights() -> None:
    keys = {"weight": "token", "normalize": True, "reject": "token", "reject_low": 0.5, "reject_high": 3.0}
    done = made("importance+dr_grpo", correction=keys).estimate(drifted()).compact()
    assert done.weight_T is not None
    assert done.weight_T.tolist() == pytest.approx([1 / 1.5, 2 / 1.5, 1.5 / 1.5])


def test_the_interpolated_policy_by_hand() -> None:
    """Tokens of age 0, 1, 1 and 3: π_p is the sampler, the geometric middle, and three quarters of the way."""
    algorithm = made("importance+dr_grpo", correction={"proximal": "interpolated", "weight": "token"})
    version_T = torch.tensor([-1, 7, 6, -1, 6, 4], dtype=torch.int32)
    batch = algorithm.estimate(drifted().replace(version_T=version_T, old_logprob_T=None), version=7).compact()
    ratios = [now / sampled for now, sampled in zip(PROXIMAL, SAMPLER, strict=True)]
    found = algorithm.loss(batch, outputs(wide(PROXIMAL).log()))
    exponents = [0, 1 / 2, 1 / 2, 3 / 4]
    weights = [r**e for r, e in zip(ratios, exponents, strict=True)]
    assert found.metrics["weight"].tolist() == pytest.approx(weights)
    assert found.metrics["ratio"].tolist() == pytest.approx([r / w for r, w in zip(ratios, weights, strict=True)])
    halves = (-0.5, -0.5, 0.5, 0.5)
    assert found.terms[0].term_T.tolist() == pytest.approx([x * r for x, r in zip(halves, ratios, strict=True)])


def test_the_sampler_as_proximal_policy_takes_no_pass() -> None:
    algorithm = made("importance+dr_grpo", minibatches=4, correction={"proximal": "sampler"})
    assert not algorithm.passes_before_loss
    assert not algorithm.before_advantages
    batch = algorithm.estimate(drifted()).compact()
    assert algorithm.loss(batch, outputs(wide(PROXIMAL).log())).metrics["ratio"].tolist() == pytest.approx(
        [1, 2, 0.2, 1.5]
    )
    step = made("importance+dr_grpo", minibatches=4)
    assert step.passes_before_loss == {"policy"}
    corrected = made("importance+dr_grpo", minibatches=4, correction={"weight": "token"})
    assert corrected.before_advantages == {"policy"}
    assert not corrected.passes_before_loss, "the log-probs are there already"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"proximal": "sampler", "weight": "token"}, "with proximal=sampler they are one: set weight=none"),
        ({"proximal": "sampler", "reject": "token"}, "set proximal=step instead of sampler"),
        ({"proximal": "interpolated", "reject": "token"}, "set proximal=step instead of interpolated"),
        ({"proximal": "interpolated", "weight": "token", "normalize": True}, "set proximal=step"),
        ({"normalize": True}, "weight=none has none; set weight=token or sequence"),
        ({"weight_low": 1.5}, "less than or equal to 1"),
        ({"weight_high": 0.5}, "greater than or equal to 1"),
        ({"weight": "group"}, "'none', 'token' or 'sequence'"),
    ],
    ids=str,
)
def test_corrections_that_make_no_sense_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CorrectionConfig(**keys)
