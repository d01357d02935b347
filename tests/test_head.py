"""Log-prob, entropy and Σp² from hidden states in chunks: values against plain softmax, gradients against finite
differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.engines.torch import head
from treadle.engines.torch.head import LogitRule, logits, quantities
from treadle.handles import Quantity

EVERYTHING: set[Quantity] = {"logprob", "entropy", "sum_p2"}
GIVEN_MK = torch.tensor([[0, 3], [4, 4], [10, 1], [2, 0], [9, 8], [1, 5], [7, 7]])  # an id may come twice
RULES = [LogitRule(), LogitRule(scale=0.3), LogitRule(cap=2.0), LogitRule(scale=1.7, cap=1.5)]


def inputs(dtype: torch.dtype = torch.float64, rows: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    hidden_ME = torch.randn(rows, 5, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VE = torch.randn(11, 5, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    bias_V = torch.randn(11, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    label_M = torch.randint(11, (rows,), generator=make)
    temperature_M = torch.linspace(0.6, 1.3, rows, dtype=torch.float64)
    return hidden_ME, weight_VE, bias_V, label_M, temperature_M


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_values_are_those_of_a_plain_softmax(rule: LogitRule, chunk: int) -> None:
    hidden_ME, weight_VE, bias_V, label_M, temperature_M = inputs()
    found = quantities(hidden_ME, weight_VE, bias_V, label_M, GIVEN_MK, temperature_M, EVERYTHING, rule, chunk)
    raw_MV = rule.scale * (hidden_ME @ weight_VE.T + bias_V)
    plain_MV = raw_MV if rule.cap is None else rule.cap * torch.tanh(raw_MV / rule.cap)
    logp_MV = (plain_MV / temperature_M[:, None]).log_softmax(-1)
    p_MV = logp_MV.exp()
    torch.testing.assert_close(found.logprob_T, logp_MV.gather(1, label_M[:, None])[:, 0])
    torch.testing.assert_close(found.entropy_T, -(p_MV * logp_MV).sum(-1))
    torch.testing.assert_close(found.sum_p2_T, p_MV.square().sum(-1))
    torch.testing.assert_close(found.given_T, logp_MV.gather(1, GIVEN_MK))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("biased", [True, False])
def test_gradients_are_those_of_finite_differences(rule: LogitRule, biased: bool) -> None:
    hidden_ME, weight_VE, bias_V, label_M, temperature_M = inputs()

    def run(hidden_ME: Tensor, weight_VE: Tensor, bias_V: Tensor | None = None) -> tuple[Any, ...]:
        found = quantities(hidden_ME, weight_VE, bias_V, label_M, GIVEN_MK, temperature_M, EVERYTHING, rule, 3)
        return found.logprob_T, found.entropy_T, found.sum_p2_T, found.given_T

    # A second backward pass makes all logits again, so it may differ in the last bits from the first.
    arguments = (hidden_ME, weight_VE, bias_V) if biased else (hidden_ME, weight_VE)
    assert torch.autograd.gradcheck(run, arguments, nondet_tol=1e-12)


@pytest.mark.parametrize("wanted", ["logprob", "entropy", "sum_p2"])
def test_one_quantity_alone_has_the_same_gradient(wanted: Quantity) -> None:
    hidden_ME, weight_VE, _, label_M, temperature_M = inputs()
    gradients = []
    alone: set[Quantity] = {"logprob", wanted}
    for needs in (alone, EVERYTHING):
        found = quantities(hidden_ME, weight_VE, None, label_M, None, temperature_M, needs, LogitRule(), 4)
        chosen_T = {"logprob": found.logprob_T, "entropy": found.entropy_T, "sum_p2": found.sum_p2_T}[wanted]
        assert chosen_T is not None
        gradients.append(torch.autograd.grad(chosen_T.sum(), hidden_ME)[0])
    assert torch.equal(*gradients)


def test_unwanted_quantities_are_absent() -> None:
    hidden_ME, weight_VE, _, label_M, temperature_M = inputs()
    found = quantities(hidden_ME, weight_VE, None, label_M, None, temperature_M, {"logprob"}, LogitRule(), 4)
    assert found.entropy_T is None
    assert found.sum_p2_T is None


def test_half_precision_weights_give_float32_numbers_and_half_precision_gradients() -> None:
    hidden_ME, weight_VE, bias_V, label_M, temperature_M = inputs(torch.bfloat16)
    found = quantities(hidden_ME, weight_VE, bias_V, label_M, None, temperature_M.float(), EVERYTHING, LogitRule(), 3)
    assert found.logprob_T is not None
    assert found.logprob_T.dtype == torch.float32
    found.logprob_T.sum().backward()
    assert weight_VE.grad is not None
    assert weight_VE.grad.dtype == torch.bfloat16


def test_no_trained_token_is_no_trouble() -> None:
    hidden_ME, weight_VE, bias_V, label_M, temperature_M = inputs(rows=0)
    found = quantities(hidden_ME, weight_VE, bias_V, label_M, None, temperature_M, EVERYTHING, LogitRule(), 3)
    assert found.logprob_T is not None
    found.logprob_T.sum().backward()
    assert weight_VE.grad is not None
    assert not weight_VE.grad.any()


def test_rule_is_read_from_the_configuration() -> None:
    assert LogitRule.of({"logit_scale": 0.25}) == LogitRule(scale=0.25)
    assert LogitRule.of({"logits_scaling": 4.0}) == LogitRule(scale=0.25)
    assert LogitRule.of({"final_logit_softcapping": 30.0}) == LogitRule(cap=30.0)
    assert LogitRule.of({"final_logit_softcapping": None}) == LogitRule()


def test_logits_are_finished_in_float32() -> None:
    hidden_ME, weight_VE, bias_V, *_ = inputs(torch.bfloat16)
    assert logits(hidden_ME, weight_VE, bias_V, LogitRule(cap=2.0)).dtype == torch.float32


def test_kept_probabilities_and_those_made_again_give_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kept_bytes in (0, 2 * 11 * 8, 1 << 20):  # none, the first chunk's, all
        monkeypatch.setattr(head, "_KEPT_BYTES", kept_bytes)
        hidden_ME, weight_VE, _, label_M, temperature_M = inputs()
        outputs = quantities(hidden_ME, weight_VE, None, label_M, None, temperature_M, {"logprob"}, LogitRule(), 2)
        assert outputs.logprob_T is not None
        found.append(torch.autograd.grad(outputs.logprob_T.square().sum(), (hidden_ME, weight_VE)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
