"""The laws of what every policy-gradient algorithm has: rejection, KL, entropy bonus, weights, dynamic sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from treadle.algorithms.base import Algorithm, Role
from treadle.algorithms.policy_gradient import PolicyGradient
from treadle.contract.cases import Answer
from treadle.contract.laws import drawn, law
from treadle.contract.running import Broken, advantage_of, changed, estimated, plain, same, same_update, short, update

OURS: dict[str, Any] = {
    "applies": lambda a: isinstance(a, PolicyGradient),
    "unless": "it has no such key: subclasses of Estimator, Objective or a whole algorithm of ours have",
}


@law("a rejected sample is in no baseline and in no denominator", **OURS)
def rejected(algorithm: Algorithm, data: st.DataObject) -> None:
    rejecting = changed(algorithm, truncated="reject")
    case = drawn(algorithm, data)
    first = (Answer(("pss",), data.draw(st.sampled_from([0.0, 5.0])), truncated=True),)
    at = 1 if case.baseline else 0
    groups = [tuple(replace(a, truncated=False) for a in group) for group in case.groups]
    more = replace(case, groups=((*groups[0][:at], *first, *groups[0][at:]), *groups[1:]))
    batch = plain(more.batch())
    kept = [i for i in range(len(batch)) if i != at]
    found = estimated(rejecting, batch)
    wanted = estimated(rejecting, batch.select(kept).replace(counts=None))
    same("advantages", advantage_of(found.select(kept)), advantage_of(wanted), more, "beside a rejected sample")
    ours, theirs = (update(rejecting, b, case).gradient_T["logprob"][b.mask_T] for b in (found, wanted))
    same("the gradient", ours, theirs, more, "beside a rejected sample")


@law("an importance weight multiplies what the objective says of a token, and nothing else", **OURS)
def weighted(algorithm: Algorithm, data: st.DataObject) -> None:
    assert isinstance(algorithm, PolicyGradient)
    if algorithm.config.correction.proximal == "interpolated":
        return  # it makes its weights itself
    bare, held = _with_kl(algorithm, 0.0), _with_kl(algorithm, 0.1)
    case = drawn(algorithm, data)
    batch = estimated(held, case.batch())
    doubled = batch.replace(weight_T=torch.full(batch.token_T.shape, 2.0))
    single = batch.replace(weight_T=torch.full(batch.token_T.shape, 1.0))
    one, two = (update(held, b, case).gradient_T["logprob"] for b in (single, doubled))
    why = "once every weight was 2 instead of 1"
    same("the gradient's growth", two - one, update(bare, single, case).gradient_T["logprob"], case, why)


@law("without a correction the sampler's log-probs reach nothing", **OURS)
def sampler_unseen(algorithm: Algorithm, data: st.DataObject) -> None:
    assert isinstance(algorithm, PolicyGradient)
    correction = algorithm.config.correction
    if correction.proximal != "step" or correction.needs_pass:
        return
    case = drawn(algorithm, data)
    batch = case.batch()
    other = batch.replace(sampling_logprob_T=batch.sampling_logprob_T - 0.7)
    found, wanted = estimated(algorithm, other), estimated(algorithm, batch)
    same("advantages", advantage_of(found), advantage_of(wanted), case, "under other log-probs of the sampler")
    ours, theirs = (update(algorithm, b, case) for b in (found, wanted))
    same_update(ours, theirs, case, "under other log-probs of the sampler")


def _with_kl(algorithm: PolicyGradient, coefficient: float) -> PolicyGradient:
    """With this KL in the loss, and no entropy bonus."""
    keys = {"kl_coefficient": coefficient, "kl_in": "loss", "kl_estimator": "k3+", "entropy_coefficient": 0.0}
    other = changed(algorithm, **keys)
    assert isinstance(other, PolicyGradient)
    other.kl_coefficient = coefficient
    other.before_loss = other.before_loss | frozenset[Role]({"reference"})
    return other


@law("a KL in the loss pulls every log-prob towards the reference", **OURS)
def kl_pulls(algorithm: Algorithm, data: st.DataObject) -> None:
    assert isinstance(algorithm, PolicyGradient)
    other = _with_kl(algorithm, 0.1)
    case = drawn(algorithm, data)
    batch = estimated(other, case.batch(), steps=1)
    assert batch.advantage_T is not None
    found = update(other, batch.replace(advantage_T=batch.advantage_T * 0), case, moved=False)
    apart_M = (batch.extras_T["truth/reference_T"] - batch.extras_T["truth/old_T"])[batch.mask_T]
    pull_M = -found.gradient_T["logprob"][batch.mask_T]
    if bool((pull_M * apart_M <= 0)[apart_M.abs() > 1e-3].any()):
        raise Broken(f"log-probs are pulled by {short(pull_M)}, and the reference lies {short(apart_M)} off", case)


@law("an entropy bonus rewards entropy", **OURS)
def entropy_bonus(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    other = changed(algorithm, entropy_coefficient=0.1)
    batch = estimated(other, case.batch())
    push_M = -update(other, batch, case).gradient_T["entropy"][batch.mask_T]
    before_M = -update(changed(algorithm, entropy_coefficient=0.0), batch, case).gradient_T["entropy"][batch.mask_T]
    if not bool((push_M - before_M > 0).all()):
        raise Broken(f"entropies are pushed by {short(push_M - before_M)}", case)


@law("dynamic sampling keeps a group exactly where its rewards differ", **OURS)
def keeps(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    sampling = changed(algorithm, dynamic_sampling=True)
    for index, group in enumerate(case.records()):
        differ = len({s.reward.value for s in group.usable if s.reward is not None}) > 1
        if (sampling.keep(group) is None) != differ:
            raise Broken(f"keep says {sampling.keep(group)!r} of group {index}", case)


LAWS = (rejected, weighted, sampler_unseen, kl_pulls, entropy_bonus, keeps)
