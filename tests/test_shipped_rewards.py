"""The reward functions that ship with treadle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.reward_help import score_many, trajectory
from treadle.config import resolve
from treadle.errors import ConfigError
from treadle.rewards.scorer import RewardConfig, make_scorer
from treadle.types import Trajectory


@pytest.mark.parametrize(("name", "package"), [("math", "math_verify"), ("reasoning_gym", "reasoning_gym")])
def test_a_missing_package_names_the_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"treadle.rewards.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'treadle\[tasks\]'"):
        make_scorer(RewardConfig(functions={name: 1.0}))


def shipped(name: str) -> Callable[[Trajectory], float]:
    return resolve(name, "treadle.rewards", r"^def reward\(").reward


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("The answer is 5.", "5", 1),
        ("2 + 3 = 5", 5, 1),
        ("2 + 3 = 5", 5.0, 1),
        ("it is 5.0", "5", 1),
        ("10-5", "5", 1),
        ("x = -5", "-5", 1),
        ("x = −5", -5, 1),
        ("5", "-5", 0),
        ("1,234,567", 1234567, 1),
        ("1,234", "1,234", 1),
        ("1,2,3", 3, 1),
        ("0.1", 0.1, 1),
        ("5 or 6", 5, 0),
        ("five", 5, 0),
        ("", 5, 0),
        ("$12.50", "12.5", 1),
        ("9" * 5000, "9" * 5000, 1),
    ],
)
def test_number(response: str, answer: Any, value: float) -> None:
    assert shipped("number")(trajectory(response, answer)) == value


@pytest.mark.parametrize("answer", [None, "five", "nan", "Infinity", [5], True])
def test_number_with_an_answer_that_is_none(answer: Any) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        shipped("number")(trajectory("5", answer))


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        (r"so $\boxed{\frac{1}{2}}$", "1/2", 1),
        (r"so $\boxed{0.5}$", r"\frac{1}{2}", 1),
        ("The answer is $x^2 + 2x + 1$", "(x+1)^2", 1),
        (r"$\boxed{3}$", r"$\sqrt{9}$", 1),
        (r"$\boxed{4}$", 3, 0),
        ("no idea", 3, 0),
        ("", 3, 0),
    ],
)
def test_math(response: str, answer: Any, value: float) -> None:
    assert shipped("math")(trajectory(response, answer)) == value


def test_math_runs_in_a_worker() -> None:
    assert score_many({}, {"math": 1.0}, trajectory(r"$\boxed{1/2}$", "0.5")).value == 1.0


def test_math_with_an_answer_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        shipped("math")(trajectory("5", ""))


def test_fraction() -> None:
    assert shipped("fraction")(trajectory("aabb")) == 0.5
    assert shipped("fraction")(trajectory("")) == 0.0


def test_reasoning_gym() -> None:
    import reasoning_gym

    options = {"min_terms": 2, "max_terms": 2}
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3, **options)[0]
    problem = {"family": "chain_sum", "options": options, "entry": entry}
    verify = shipped("reasoning_gym")
    assert verify(trajectory(f"<answer>1</answer> no: <answer> {entry['answer']} </answer>", **problem)) == 1.0
    assert verify(trajectory(f" {entry['answer']}\n", **problem)) == 1.0
    assert verify(trajectory("nothing", **problem)) < 0.1
    with pytest.raises(ValueError, match="not one of the source `reasoning_gym`"):
        verify(trajectory("5"))
