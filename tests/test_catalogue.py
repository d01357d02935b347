"""Estimators of the catalogue: values by hand, and each paper's formula as plain loops on random batches.

The loops share no code with what they test. Objectives and corrections are in `test_catalogue_objectives.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.batches import annotated, batches, group, quick, rewarded, trajectory
from tests.oracle_help import PROMPT, made
from treadle.algorithms.base import Algorithm
from treadle.batch import Batch, Counts
from treadle.config.plugins import plugin_class
from treadle.errors import ConfigError, TrainingError
from treadle.types import Ended, Kind, Reward, Sample, Trajectory

FOLDER = "treadle.algorithms"


def advantages(algorithm: Algorithm, batch: Batch) -> list[float]:
    """Of each trained token, in order."""
    done = algorithm.estimate(batch).compact()
    assert done.advantage_T is not None
    return done.advantage_T.tolist()


@dataclass
class Told:
    """A sample, plainly."""

    group: int
    reward: float
    tokens: int = 0  # trained, of all its trajectories
    greedy: bool = False


def told(batch: Batch) -> dict[int, Told]:
    found: dict[int, Told] = {}
    columns = (batch.sample_N, batch.group_N, batch.reward_N, batch.trained_N, batch.baseline_N)
    for sample, of_group, reward, tokens, greedy in zip(*(c.tolist() for c in columns), strict=True):
        found.setdefault(sample, Told(of_group, reward, 0, greedy)).tokens += tokens
    return found


def on_tokens(batch: Batch, value: Callable[[Told, list[Told]], float]) -> list[float]:
    """A value of each sample, from itself and its group, laid on the batch's trained tokens; 0 in groups of equals."""
    samples = told(batch)
    result: list[float] = []
    for sample, tokens in zip(batch.sample_N.tolist(), batch.trained_N.tolist(), strict=True):
        own = samples[sample]
        members = [s for s in samples.values() if s.group == own.group]
        equal = len({s.reward for s in members}) == 1
        result += [0.0 if equal else value(own, members)] * tokens
    return result


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def whitened(values: Sequence[float]) -> list[float]:
    if len(values) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    middle, deviation = statistics.fmean(values), statistics.stdev(values)
    return [(x - middle) / (deviation + 1e-6) for x in values]


def near(right: Sequence[float]) -> Any:
    return pytest.approx(list(right), rel=2e-5, abs=2e-5)


# ---------------------------------------------------------------------- formulas as loops


def length_weighted(own: Told, members: list[Told]) -> float:
    weights = [s.tokens for s in members] if any(s.tokens for s in members) else [1] * len(members)
    return own.reward - sum(w * s.reward for w, s in zip(weights, members, strict=True)) / sum(weights)


def best_of(k: int, own: Told, members: list[Told]) -> float:
    """GRPO's advantage of a set of k, averaged over all the sets that the sample is in, one by one."""
    at = next(i for i, s in enumerate(members) if s is own)
    sets = {some: max(members[i].reward >= 0.5 for i in some) for some in combinations(range(len(members)), k)}
    if not sets:
        return 0.0
    middle = mean(sets.values())
    deviation = math.sqrt(middle * (1 - middle))
    return (mean(r for some, r in sets.items() if at in some) - middle) / deviation if deviation else 0.0


def alpha(batch: Batch) -> float:
    """Of GPG: groups, by groups whose rewards differ."""
    of_group: dict[int, set[float]] = {}
    for s in told(batch).values():
        of_group.setdefault(s.group, set()).add(s.reward)
    return len(of_group) / max(sum(len(r) > 1 for r in of_group.values()), 1)


FORMULAS: dict[str, Callable[[Batch], list[float]]] = {
    "dr_grpo": lambda b: on_tokens(b, lambda own, all_: own.reward - mean(s.reward for s in all_)),
    "rloo": lambda b: on_tokens(
        b, lambda own, all_: len(all_) / (len(all_) - 1) * (own.reward - mean(s.reward for s in all_))
    ),
    "group_relative": lambda b: on_tokens(
        b,
        lambda own, all_: (
            (own.reward - mean(s.reward for s in all_)) / (statistics.stdev(s.reward for s in all_) + 1e-6)
        ),
    ),
    "opo": lambda b: on_tokens(b, length_weighted),
    "gpg": lambda b: on_tokens(b, lambda own, all_: alpha(b) * (own.reward - mean(s.reward for s in all_))),
    "reinforce_plus_plus_baseline": lambda b: whitened(
        on_tokens(b, lambda own, all_: own.reward - mean(s.reward for s in all_))
    ),
    "pass_at_k": lambda b: on_tokens(b, lambda own, all_: best_of(2, own, all_)),
}
KEYS: dict[str, dict[str, Any]] = {"pass_at_k": {"k": 2, "passed": 0.5}}


@pytest.mark.parametrize("name", list(FORMULAS))
@quick
@given(batches())
def test_group_estimators_are_their_formulas_on_any_batch(name: str, batch: Batch) -> None:
    """Samples of several trajectories, greedy ones, ones without a trained token, groups in any order."""
    rewards = [r for r in batch.reward_N.tolist() if r]
    assume(all(abs(a - b) > 1e-3 or a == b for a in rewards for b in rewards))  # else ε and rounding decide
    assert advantages(made(name, **KEYS.get(name, {})), batch) == near(FORMULAS[name](batch))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
@quick
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=2))
def test_pass_at_k_is_the_mean_over_all_sets_of_k(k: int, passed: list[list[bool]]) -> None:
    batch = rewarded(*passed, layout="ps")
    found = advantages(made("pass_at_k", k=k), batch)
    assert found == near(on_tokens(batch, lambda own, all_: best_of(k, own, all_)))


def test_pass_at_k_by_hand() -> None:
    # Three answers, one passed, k = 2: of three pairs two pass, R̄ = 2/3, σ = √2/3.
    found = advantages(made("pass_at_k", k=2, group_size=3), rewarded([1, 0, 0], layout="ps"))
    up, down = (1 / 3) / (math.sqrt(2) / 3), (1 / 2 - 2 / 3) / (math.sqrt(2) / 3)
    assert found == near([up, down, down])
    # With k = 1 it is GRPO with the deviation of the population.
    assert advantages(made("pass_at_k", k=1), rewarded([1, 0, 0, 0], layout="ps")) == near(
        [0.75 / math.sqrt(3 / 16)] + [-0.25 / math.sqrt(3 / 16)] * 3
    )
    with pytest.raises(ValueError, match="k=5 is more than group_size=4; lower k or raise group_size"):
        made("pass_at_k", k=5, group_size=4)


def test_group_baselines_by_hand() -> None:
    batch = Batch.pack([group(0, [trajectory("ps", 3.0), trajectory("psss", 0.0), trajectory("pss", 0.0)])])
    assert advantages(made("dr_grpo"), batch) == near([2, -1, -1, -1, -1, -1])
    assert advantages(made("rloo"), batch) == near([3, -1.5, -1.5, -1.5, -1.5, -1.5])
    assert advantages(made("opo"), batch) == near([2.5, -0.5, -0.5, -0.5, -0.5, -0.5])  # 3·1 / 6
    two = Batch.pack([group(0, [trajectory("ps", 3.0), trajectory("ps", 0.0)]), group(1, [trajectory("ps", 1.0)] * 2)])
    assert advantages(made("gpg"), two) == near([3, -3, 0, 0])  # ± 1.5, and one group of two says nothing


def test_whitening_estimators_by_hand() -> None:
    batch = Batch.pack([group(0, [trajectory("ps", 3.0), trajectory("pss", 0.0)])])
    # Centred 1.5, -1.5, -1.5 on tokens: mean -0.5, deviation √3.
    root = math.sqrt(3)
    assert advantages(made("reinforce_plus_plus_baseline"), batch) == near([2 / root, -1 / root, -1 / root])
    # Returns 3 and 0, 0: the same thing when whitened. By turn, 1 then 2, they are 3, 2 and 0.
    assert advantages(made("reinforce_plus_plus"), batch) == near([2 / root, -1 / root, -1 / root])
    turns = [trajectory("pses", Reward(3.0, turns=(1.0, 2.0))), trajectory("ps", 0.0)]
    found = advantages(made("reinforce_plus_plus"), Batch.pack([group(0, turns)]))
    assert found == near(whitened([3.0, 2.0, 0.0]))


@quick
@given(batches(), st.sampled_from([1.0, 0.9, 0.5]))
def test_reinforce_plus_plus_whitens_discounted_returns(batch: Batch, gamma: float) -> None:
    compact, returns = batch.compact(), []
    for row in range(len(batch)):
        rewards = compact.reward_T[compact.row_T == row].tolist()
        returns += [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
    assume(len(returns) < 2 or min(returns) == max(returns) or statistics.stdev(returns) > 1e-2)
    found = advantages(made("reinforce_plus_plus", gamma=gamma), batch)
    assert found == pytest.approx(whitened(returns), rel=1e-3, abs=1e-3)


def test_the_kl_in_the_reward_is_charged_token_by_token() -> None:
    batch = Batch.pack([group(0, [trajectory("pss", 2.0), trajectory("ps", 0.0)])])
    batch = batch.replace(
        old_logprob_T=batch.expand(torch.tensor([-1.0, -2.0, -1.0])),
        reference_logprob_T=batch.expand(torch.tensor([-1.5, -1.0, -3.0])),
    )
    # k1: 0.5, -1, 2. Rewards less half of it: -0.25, 2.5 and -1; returns 2.25, 2.5, -1.
    token = made("reinforce_plus_plus", kl_coefficient=0.5)
    assert advantages(token, batch) == near(whitened([2.25, 2.5, -1.0]))
    whole = made("rloo", kl_coefficient=0.5, kl_in="reward", kl_estimator="k1")
    assert advantages(whole, batch) == near([3.25, 3.25, -3.25])  # 2 + 0.25 against -1
    assert whole.estimate(batch).reward_N.tolist() == [2, 0], "recorded rewards stay"


# ---------------------------------------------------------------------- ReMax


def greedy(name: str, reward: float, layout: str = "psss") -> Sample:
    return Sample(name, Kind.BASELINE, (trajectory(layout, reward),))


def test_remax_asks_for_one_greedy_answer_more_and_filters_groups_without_it() -> None:
    algorithm = made("remax", group_size=2)
    asked = [(r.kind, r.greedy) for r in algorithm.requests(PROMPT)]
    assert asked == [(Kind.TRAIN, False), (Kind.TRAIN, False), (Kind.BASELINE, True)]
    broken = Sample("0.1", Kind.BASELINE, (), failure="the tool broke")
    assert algorithm.keep(group(0, [trajectory("ps", 1.0), broken])) == "its greedy answer failed"
    assert algorithm.keep(group(0, [trajectory("ps", 1.0), greedy("0.1", 1.0)])) is None
    picky = made("remax", dynamic_sampling=True)
    assert picky.keep(group(0, [trajectory("ps", 1.0), greedy("0.1", 1.0)])) == "all rewards are equal"


@quick
@given(st.lists(st.tuples(st.integers(-8, 8), st.lists(st.integers(-8, 8), min_size=1, max_size=3)), min_size=1))
def test_remax_subtracts_what_the_greedy_answer_earned(rewards: list[tuple[int, list[int]]]) -> None:
    groups = [
        group(i, [*(trajectory("ps", float(r)) for r in each), greedy(f"{i}.g", float(base))])
        for i, (base, each) in enumerate(rewards)
    ]
    batch = Batch.pack(groups)
    assert advantages(made("remax"), batch) == [float(r - base) for base, each in rewards for r in each]
    assert batch.count() == Counts(*[sum(len(each) for _, each in rewards)] * 2), "greedy answers are not trained"


# ---------------------------------------------------------------------- GDPO


@quick
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3) | st.none()), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1.0, 0.25, -2.0]),
)
def test_gdpo_scales_each_part_in_its_group_and_whitens_the_sum(
    groups: list[list[tuple[int, int | None]]], weight: float
) -> None:
    """A sample that lacks a part is left out of it."""
    assume(any(brief is not None for each in groups for _, brief in each))
    packed, sums = [], []
    for i, each in enumerate(groups):
        rows: list[Trajectory | Sequence[Trajectory] | Sample] = []
        found = scaled([float(r) for r, _ in each])
        briefs = scaled([float(b) for _, b in each if b is not None])
        for k, (right, brief) in enumerate(each):
            parts = {"right": float(right)} | ({} if brief is None else {"brief": float(brief)})
            rows.append(trajectory("pss", Reward(1.0, parts=parts)))
            sums += [found[k] + (0 if brief is None else weight * briefs.pop(0))] * 2
        packed.append(group(i, rows))
    assume(min(sums) == max(sums) or statistics.stdev(sums) > 1e-2)
    algorithm = made("gdpo", part_weights={"brief": weight})
    assert advantages(algorithm, Batch.pack(packed)) == pytest.approx(whitened(sums), rel=1e-4, abs=1e-4)


def scaled(values: Sequence[float]) -> list[float]:
    if len(set(values)) < 2:
        return [0.0] * len(values)
    middle, deviation = mean(values), statistics.stdev(values)
    return [(x - middle) / (deviation + 1e-6) for x in values]


def test_gdpo_names_weights_of_parts_that_do_not_exist_and_takes_a_reward_without_parts_whole() -> None:
    with pytest.raises(TrainingError, match=r"part_weights names \['brief'\], and the reward's parts are \['reward'\]"):
        made("gdpo", part_weights={"brief": 1.0}).estimate(rewarded([1, 0]))
    assert advantages(made("gdpo"), rewarded([1, 0], layout="ps")) == near(whitened([1.0, -1.0]))


# ---------------------------------------------------------------------- optimal token baselines


def observed(batch: Batch, old: Sequence[float], squares: Sequence[float]) -> Batch:
    """With what the pass before the advantages saw of the trained tokens: probabilities of tokens, and Σp²."""
    old_T = torch.tensor(old, dtype=torch.float64).log().float()
    extra_T = batch.expand(torch.tensor(squares, dtype=torch.float32))
    return batch.replace(old_logprob_T=batch.expand(old_T), extras_T={**batch.extras_T, "old_sum_p2_T": extra_T})


def test_optimal_token_baselines_by_hand() -> None:
    batch = Batch.pack([group(0, [trajectory("ps", 1.0), trajectory("psss", 0.0), trajectory("pss", 2.0)])])
    # 1 − 2π + Σp²: 0.5 | 1, 0.5, 2 | 0.5, 1 and so energies 0.5 | 1, 1.5, 3.5 | 0.5, 1.5.
    batch = observed(batch, [0.5, 0.25, 0.5, 0.0001, 0.5, 0.25], [0.5, 0.5, 0.5, 1.0002, 0.5, 0.5])
    first = (0.5 * 1 + 1 * 0 + 0.5 * 2) / 2
    second = (1.5 * 0 + 1.5 * 2) / 3  # the last token of the longest has none to be compared with
    assert advantages(made("optimal_token"), batch) == near(
        [1 - first, -first, -second, -second, 2 - first, 2 - second]
    )


def test_optimal_token_baselines_step_over_what_a_tool_said() -> None:
    turns = [trajectory("pseesees", 1.0), trajectory("psss", 0.0)]
    plain = [trajectory("psss", 1.0), trajectory("psss", 0.0)]
    numbers = ([0.5, 0.25, 0.3, 0.9, 0.2, 0.1], [0.4, 0.3, 0.2, 0.82, 0.3, 0.5])
    found, right = (
        advantages(made("optimal_token"), observed(Batch.pack([group(0, rows)]), *numbers)) for rows in (turns, plain)
    )
    assert found == right
    assert len(set(right[3:])) == 3, "each token has its own"


def test_importance_weights_scale_the_energy_by_their_square() -> None:
    batch = observed(rewarded([1, 0], layout="ps"), [0.5, 0.5], [0.5, 0.5])
    sampled_T = torch.tensor([0.5, 0.25]).log()  # weights 1 and 2
    batch = batch.replace(sampling_logprob_T=batch.expand(sampled_T))
    algorithm = made("optimal_token", correction={"weight": "token", "weight_high": 10.0})
    assert advantages(algorithm, batch) == near([1 - 1 / 5, -1 / 5])


@quick
@given(st.data())
def test_optimal_token_baselines_are_their_formula(data: st.DataObject) -> None:
    groups = data.draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4), min_size=1, max_size=2
        )
    )  # (tokens, reward) of each answer
    probability = st.floats(0.01, 0.99)
    packed, old, squares, right = [], [], [], []
    for i, each in enumerate(groups):
        packed.append(group(i, [trajectory("p" + "s" * n, float(r)) for n, r in each]))
        p = [[data.draw(probability) for _ in range(n)] for n, _ in each]
        q = [[data.draw(st.floats(x * x, x * x + (1 - x) ** 2)) for x in row] for row in p]
        old += [x for row in p for x in row]
        squares += [x for row in q for x in row]
        right += optimal(each, p, q)
    assume(old)
    batch = observed(Batch.pack(packed), old, squares)
    assert advantages(made("optimal_token"), batch) == pytest.approx(right, rel=1e-3, abs=1e-3)


def optimal(each: list[tuple[int, int]], p: list[list[float]], q: list[list[float]]) -> list[float]:
    energy = [
        [sum(1 - 2 * a[k] + b[k] for k in range(t + 1)) for t in range(len(a))] for a, b in zip(p, q, strict=True)
    ]
    baselines: list[float] = []
    for t in range(max(n for n, _ in each)):
        alive = [i for i, (n, _) in enumerate(each) if n > t]
        if len(alive) > 1:
            total = sum(energy[i][t] for i in alive)
            baselines.append(sum(energy[i][t] * each[i][1] for i in alive) / total)
        else:
            baselines.append(baselines[-1] if baselines else mean(r for _, r in each))
    equal = len({r for _, r in each}) == 1
    return [0.0 if equal else r - baselines[t] for n, r in each for t in range(n)]


# ---------------------------------------------------------------------- the critic


@quick
@given(batches(), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.8, 1.0]))
def test_the_critic_s_advantages_are_the_sum_of_discounted_surprises(batch: Batch, gamma: float, lam: float) -> None:
    batch = annotated(batch).replace(bootstrap_N=torch.arange(len(batch)) - 2.5)  # not to be used where it terminated
    compact, right = batch.compact(), []
    assert compact.value_T is not None
    assert batch.bootstrap_N is not None
    for row in range(len(batch)):
        reward, value = (x_T[compact.row_T == row].tolist() for x_T in (compact.reward_T, compact.value_T))
        after = [*value[1:], float(batch.bootstrap_N[row]) if batch.truncated_N[row] else 0.0][: len(value)]
        surprise = [r + gamma * n - v for r, n, v in zip(reward, after, value, strict=True)]
        right += [sum((gamma * lam) ** (k - t) * surprise[k] for k in range(t, len(value))) for t in range(len(value))]
    assume(len(right) < 2 or statistics.stdev(right) > 1e-2)
    done = made("critic", gamma=gamma, lam=lam).estimate(batch).compact()
    assert done.advantage_T is not None
    assert done.return_T is not None
    assert done.value_T is not None
    assert done.advantage_T.tolist() == pytest.approx(whitened(right), rel=1e-3, abs=1e-3)
    assert (done.return_T - done.value_T).tolist() == pytest.approx(right, rel=1e-4, abs=1e-4)


# ---------------------------------------------------------------------- the parts of DAPO


def test_dynamic_sampling_drops_groups_of_equal_rewards() -> None:
    dapo = made("dapo")
    assert dapo.keep(group(0, [trajectory("ps", 1.0), trajectory("ps", 1.0)])) == "all rewards are equal"
    assert dapo.keep(group(0, [trajectory("ps", 1.0), trajectory("ps", 0.0)])) is None
    failed = Sample("0.1", Kind.TRAIN, (), failure="the tool broke")
    assert dapo.keep(group(0, [trajectory("ps", 1.0), failed])) == "all rewards are equal"
    assert made("grpo").keep(group(0, [trajectory("ps", 1.0)])) is None


def test_the_overlong_penalty_by_hand() -> None:
    """Limit 5, the last 2 of it soft: lengths 3, 4, 5 lose 0, half and all of the penalty."""
    algorithm = made("rloo", overlong_share=0.4, overlong_penalty=2.0)
    algorithm.max_tokens = 5
    batch = Batch.pack([group(0, [trajectory("p" + "s" * n, 1.0) for n in (1, 3, 4, 5)])])
    rewards = [1.0, 1.0, 0.0, -1.0]
    right = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert advantages(algorithm, batch) == near([x for x, n in zip(right, (1, 3, 4, 5), strict=True) for _ in range(n)])
    assert algorithm.estimate(batch).reward_N.tolist() == [1, 1, 1, 1]
    token = made("reinforce_plus_plus", overlong_share=0.4, overlong_penalty=2.0, gamma=0.5)
    token.max_tokens = 5
    one = Batch.pack([group(0, [trajectory("pssss", 1.0), trajectory("ps", 1.0)])])
    assert advantages(token, one) == near(whitened([0.0] * 4 + [1.0])), "it falls on the last token"


@pytest.mark.parametrize("name", ["rloo", "grpo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_rejected_truncated_answers_are_as_if_they_had_never_been(name: str) -> None:
    kept = [trajectory("ps", 1.0), trajectory("pss", 0.0), trajectory("psss", 3.0)]
    cut = trajectory("pssss", 9.0, Ended.TRUNCATED)
    algorithm = made(name, truncated="reject")
    batch = algorithm.estimate(Batch.pack([group(0, [kept[0], cut, *kept[1:]])]))
    assert batch.compact().advantage_T is not None
    assert advantages(algorithm, Batch.pack([group(0, [kept[0], cut, *kept[1:]])])) == near(
        advantages(algorithm, Batch.pack([group(0, kept)]))
    )
    assert batch.count() == Counts(tokens=6, sequences=3)
    assert advantages(made(name), Batch.pack([group(0, [cut, *kept])])) != advantages(algorithm, batch)


def test_a_batch_of_which_all_is_rejected_is_empty() -> None:
    names = [*FORMULAS, "remax", "gdpo", "reinforce_plus_plus", "critic"]
    for name in names:
        batch = annotated(rewarded([1, 0])).replace(truncated_N=torch.tensor([True, True]))
        done = made(name, truncated="reject").estimate(batch)
        assert done.count() == Counts(0, 0)
        assert advantages(made(name, truncated="reject"), batch) == []


# ---------------------------------------------------------------------- names joined by +


@pytest.mark.parametrize("name", ["gspo+rloo", "rloo+gspo"])
def test_two_halves_make_a_whole_in_either_order(name: str) -> None:
    algorithm = made(name, clip_high=0.5, group_size=4)
    assert type(algorithm).__qualname__ == "GSPO+RLOO"
    assert type(algorithm) is plugin_class(name, FOLDER), "one class for one name"
    assert advantages(algorithm, rewarded([3, 0, 0], layout="ps")) == near([3, -1.5, -1.5])
    assert algorithm.config.aggregate == "sequence-mean-token-mean", "the objective's default counts"


@pytest.mark.parametrize(
    ("name", "whole", "aggregate"),
    [
        ("rloo", "Clip+RLOO", "sequence-mean-token-sum"),
        ("gspo", "GSPO+GroupRelative", "sequence-mean-token-mean"),
        ("gpg", "Importance+GPG", "token-mean"),
        ("cispo+remax", "CISPO+ReMax", "token-mean"),
        ("dro+optimal_token", "DRO+OptimalToken", "sequence-mean-token-sum"),
        ("kl_cov+critic", "KLCov+Critic", "token-mean"),
        ("grpo", "GRPO", "sequence-mean-token-mean"),
    ],
)
def test_a_half_alone_gets_its_usual_partner(name: str, whole: str, aggregate: str) -> None:
    cls = plugin_class(name, FOLDER)
    assert cls.__qualname__ == whole
    keys = {"level": "token"} if name.startswith("dro") else {}
    algorithm = made(name, **keys)
    assert algorithm.config.aggregate == aggregate


def test_a_whole_declares_what_both_halves_do() -> None:
    algorithm = made("kl_cov+critic")
    assert algorithm.uses == {"critic"}
    assert algorithm.two_pass
    assert not algorithm.skips_no_signal
    assert {"policy/ratio", "critic/value"} <= {metric.name for metric in algorithm.metrics}
    token = made("cispo+optimal_token")
    assert token.observes == {"logprob", "sum_p2"}
    assert token.before_advantages == {"policy"}
    assert made("clip+rloo").skips_no_signal
    assert not made("dro+rloo").skips_no_signal
    assert not made("clip+gdpo").skips_no_signal


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rloo+opo", "RLOO and OPO both say what the advantages are; name one of them"),
        ("gspo+sapo", "GSPO and SAPO both say what an advantage does to the policy; name one of them"),
        ("grpo+rloo", "GRPO and RLOO both say what the advantages are; name one of them"),
        ("rloo+rloo", "RLOO and RLOO both say what the advantages are"),
        ("rloo+kl", "there is no 'kl' in treadle.algorithms"),
        ("rloo+sapoo", "there is no 'sapoo' in treadle.algorithms: did you mean sapo?"),
        ("rloo+treadle.batch:Batch", r"Batch .*is no half of"),
        ("rloo+", "a name missing beside a"),
    ],
)
def test_halves_that_do_not_go_together_say_why(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plugin_class(name, FOLDER)


@pytest.mark.parametrize("estimator", ["critic", "reinforce_plus_plus", "optimal_token"])
@pytest.mark.parametrize(
    ("objective", "what", "mend"),
    [
        ("gspo", "gspo with level=sequence", "set level=token"),
        ("dro", "dro with level=sequence", "set level=token"),
        ("gmpo", "gmpo", "use gspo with level=token"),
    ],
)
def test_objectives_of_whole_answers_refuse_advantages_of_single_tokens(
    estimator: str, objective: str, what: str, mend: str
) -> None:
    with pytest.raises(ValueError, match=f"{what} has one term for a whole answer.*{mend}, or use an estimator"):
        made(f"{objective}+{estimator}")
    if objective != "gmpo":
        made(f"{objective}+{estimator}", level="token")
    made(f"{objective}+rloo")


@pytest.mark.parametrize("name", ["rloo", "gspo", "opo", "gpg", "pass_at_k", "gdpo", "optimal_token", "cispo+dr_grpo"])
def test_estimators_that_compare_refuse_groups_of_one(name: str) -> None:
    keys = {"k": 1} if name == "pass_at_k" else {}
    with pytest.raises(ValueError, match=r"group_size is 1, but .* compares the samples of a prompt"):
        made(name, group_size=1, **keys)
    for other in ("remax", "critic", "reinforce_plus_plus"):
        assert made(other, group_size=1).config.group_size == 1
