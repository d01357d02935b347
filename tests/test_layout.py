"""What a group's trajectories begin with is computed once: the layout, attention over it, and what training gains."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.engine_help import logprobs, make_batch, ppo, value_regression
from treadle.batch import Batch
from treadle.engines.torch.attention import TreeAttention
from treadle.engines.torch.config import Config
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.gradient import accumulate
from treadle.engines.torch.layout import Segment, lay_out
from treadle.engines.torch.model import load_model
from treadle.types import Mean

tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7)


def test_the_example_of_the_docstring_holds() -> None:
    layout = lay_out([torch.tensor(row) for row in ([1, 2, 3, 4], [1, 2, 5], [7])], [0, 0, 1])
    assert layout.token_S.tolist() == [1, 2, 3, 4, 5, 7]
    assert layout.position_S.tolist() == [0, 1, 2, 3, 2, 0]
    assert layout.place_T.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]
    assert layout.trees[0].trunk == Segment(0, 2)
    assert layout.trees[0].branches == (Segment(2, 4), Segment(4, 5))


@given(tokens, st.integers(1, 3))
def test_every_trajectory_can_be_read_back(rows: list[list[int]], families: int) -> None:
    layout = lay_out([torch.tensor(row) for row in rows], [i % families for i in range(len(rows))])
    assert layout.token_S[layout.place_T].tolist() == [token for row in rows for token in row]
    assert layout.position_S[layout.place_T].tolist() == [i for row in rows for i in range(len(row))]
    assert sorted(set(layout.place_T.tolist())) == list(range(len(layout)))  # nothing is laid out that no one needs


@example([[0, 1, 2, 1], [1, 1, 2], [2] * 9], 3, (2, 2))  # what fills up the second lies where the third begins
@given(tokens, st.integers(1, 3), st.sampled_from([(4, 2), (2, 2), (3, 1)]))
def test_attention_over_a_tree_is_that_over_each_trajectory(
    rows: list[list[int]], families: int, heads: tuple[int, int]
) -> None:
    layout = lay_out([torch.tensor(row) for row in rows], [i % families for i in range(len(rows))])
    make = torch.Generator().manual_seed(0)
    shapes = [(1, h, len(layout), 8) for h in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, weight = (torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes)
    plan = TreeAttention(layout, torch.device("cpu"))
    found: list[list[Tensor]] = []
    for attend in (plan.unshared, partial(plan, 0)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(inputs[0], inputs[1], inputs[2], 0.3)
        found.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for plain, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, plain)


@pytest.fixture(scope="module")
def grouped() -> Batch:
    """Two groups of three whose prompts are the same within a group."""
    batch = make_batch([(7, 3), (7, 5), (7, 1), (9, 4), (9, 2), (9, 6)])
    rows = list(batch.token_T.split(batch.length_N.tolist()))
    for first in (0, 3):
        for row in rows[first + 1 : first + 3]:
            row[: 7 if first == 0 else 9] = rows[first][: 7 if first == 0 else 9]
    return batch.replace(token_T=torch.cat(rows), group_N=torch.tensor([0, 0, 0, 1, 1, 1]))


def trained(engine: TorchEngine, batch: Batch, head: str, budget: int) -> tuple[dict[str, Tensor], dict]:
    assert engine.optimizer is not None
    engine.optimizer.adamw.zero_grad()
    found = accumulate(engine.network, batch, ppo() if head == "lm" else value_regression(), budget)
    return {n: p.grad.clone() for n, p in engine.optimizer.masters.items() if p.grad is not None}, found


@pytest.mark.parametrize("head", ["lm", "value"])
def test_sharing_changes_no_gradient_and_no_number(tiny_model: Path, grouped: Batch, head) -> None:
    engine = TorchEngine(load_model(str(tiny_model), "float32").double(), Config(), total_steps=1, head=head)
    apart = grouped.replace(group_N=torch.arange(6))
    (shared, seen), (plain, expected) = (trained(engine, batch, head, 4096) for batch in (grouped, apart))
    assert seen.pop("useful_tokens").value == expected.pop("useful_tokens").value == 1
    for name, value in expected.items():
        assert seen[name].value == pytest.approx(value.value)
    for name, gradient in plain.items():
        torch.testing.assert_close(shared[name], gradient)
    if head == "lm":
        torch.testing.assert_close(logprobs(engine, grouped), logprobs(engine, apart), equal_nan=True)
    else:
        for found, plain_values in zip(engine.values(grouped), engine.values(apart), strict=True):
            torch.testing.assert_close(found, plain_values, equal_nan=True)


def test_useful_tokens_tell_what_was_computed_twice(tiny_model: Path, grouped: Batch) -> None:
    engine = TorchEngine(load_model(str(tiny_model), "float32"), Config(), total_steps=1)
    _, whole = trained(engine, grouped, "lm", 4096)
    # The prompts once (7 + 9); of each answer all but the last token, behind which nothing is looked at.
    assert whole["useful_tokens"] == Mean(16 + (2 + 4 + 0) + (3 + 1 + 5), 16 + 15)
    _, cut = trained(engine, grouped, "lm", 13)  # no group fits
    assert cut["useful_tokens"].value < 0.9


@pytest.mark.parametrize("head", ["lm"])
def test_half_precision_keeps_the_gradient_near(tiny_model: Path, grouped: Batch, head) -> None:
    """bfloat16 weights with a float32 residual stream; the weights themselves are the same on both sides."""
    half = TorchEngine(load_model(str(tiny_model), "bfloat16"), Config(), total_steps=1)
    full = TorchEngine(load_model(str(tiny_model), "bfloat16").float(), Config(), total_steps=1)
    ours, exact = (trained(engine, grouped, head, 4096)[0] for engine in (half, full))
    error = sum(float((ours[n] - g).square().sum()) for n, g in exact.items())
    assert (error / sum(float(g.square().sum()) for g in exact.values())) ** 0.5 < 0.08
