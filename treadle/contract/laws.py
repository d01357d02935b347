"""The laws that every algorithm keeps. A law draws its cases, runs the algorithm (`running.py`) and raises `Broken`.

Suffixes: N trajectories · T tokens of all of them · M trained tokens.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st

from treadle.algorithms.base import Algorithm
from treadle.batch import Batch
from treadle.contract.cases import ANY_REWARD, Answer, Case, cases
from treadle.contract.running import (
    Broken,
    advantage_of,
    changed,
    estimated,
    plain,
    same,
    same_update,
    short,
    update,
)
from treadle.metrics import Registry
from treadle.types import Kind, Prompt

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Law:
    name: str
    says: str
    holds: Callable[[Algorithm, st.DataObject], None]
    applies: Callable[[Algorithm], bool]
    unless: str  # why it may not apply


Check = Callable[[Algorithm, st.DataObject], None]


def law(says: str, applies: Callable[[Algorithm], bool] = lambda _: True, unless: str = "") -> Callable[[Check], Law]:
    """Makes a law of the function that raises `Broken` where it does not hold."""
    return lambda holds: Law(holds.__name__, says, holds, applies, unless)


def drawn(algorithm: Algorithm, data: st.DataObject, **how: object) -> Case:
    kinds = {request.kind for request in algorithm.requests(Prompt("case:0", 0, (), (1,)))}
    return data.draw(cases(baseline=Kind.BASELINE in kinds, **how))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- of every algorithm


@law("what is overridden is declared: `select` with two_pass, `value_loss` with a critic in `uses`")
def declared(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    kind = type(algorithm)
    if kind.select is not Algorithm.select and not algorithm.two_pass:
        raise Broken("select is defined and never called; declare two_pass = True", case)
    if kind.value_loss is not Algorithm.value_loss and "critic" not in algorithm.uses:
        raise Broken('value_loss is defined and no critic trained; declare uses = frozenset({"critic"})', case)


@law("advantages, losses, gradients and metrics are finite on any finite input, extreme ratios included")
def finite(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data, rewards=ANY_REWARD, far=data.draw(st.sampled_from([3.0, 300.0, 1e4])))
    batch = estimated(algorithm, case.batch())
    if not advantage_of(batch).isfinite().all():
        raise Broken(f"advantages are {short(advantage_of(batch))}", case)
    found = update(algorithm, batch, case)
    gradients = {f"gradient of the {name}": x for name, x in found.gradient_T.items()}
    for name, value in {"loss": found.loss, **gradients, **found.metrics, **found.peaks}.items():
        if not value.isfinite().all():
            raise Broken(f"the {name} is {short(value)}", case)


@law("the same input gives the same result, bit for bit; nothing of it, and no generator of noise, is changed")
def repeatable(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    torch.rand(1)  # so that a seed set anew shows
    before, noise = {n: x.clone() for n, x in _tensors(batch)}, _noise()
    done = estimated(algorithm, batch)
    if not torch.equal(advantage_of(estimated(algorithm, batch)), advantage_of(done)):
        raise Broken("the second time advantages differ", case)
    kept = {n: x.clone() for n, x in _tensors(done)}
    one, other = update(algorithm, done, case), update(algorithm, done, case)
    for name, gradient_T in one.gradient_T.items():
        if not torch.equal(gradient_T, other.gradient_T[name]):
            raise Broken(f"the second time the gradient of the {name} differs", case)
    for old, new in ((before, batch), (kept, done)):
        for name, x in _tensors(new):
            if not torch.equal(x.nan_to_num(), old[name].nan_to_num()):
                raise Broken(f"the batch's {name} was written over", case)
    if noise != _noise():
        raise Broken("a global generator of noise has moved: draw from a generator of your own", case)


def _noise() -> tuple[Any, ...]:
    return tuple(torch.get_rng_state().tolist()), random.getstate(), str(np.random.get_state(legacy=False))


@law("rows and groups are found by identity: any order, interleaved, under any numbers")
def identity(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    wanted = estimated(algorithm, batch)
    order = data.draw(st.permutations(range(len(batch))))
    shuffled = batch.select(order)
    renamed = shuffled.replace(group_N=-7 * shuffled.group_N + 5, sample_N=1000 - 3 * shuffled.sample_N, counts=None)
    back = estimated(algorithm, renamed).select([order.index(i) for i in range(len(order))])
    why = f"with the rows in the order {order}"
    same("advantages", advantage_of(back), advantage_of(wanted), case, why)
    same_update(update(algorithm, back.replace(counts=None), case), update(algorithm, wanted, case), case, why)


@law(
    "a group's advantages do not depend on other groups",
    lambda a: not a.across_groups,
    "it declares across_groups",
)
def apart(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    whole = estimated(algorithm, batch)
    for group in range(len(case.groups)):
        rows = (batch.group_N == group).nonzero()[:, 0]
        alone = estimated(algorithm, batch.select(rows).replace(counts=None))
        why = f"in group {group} without the other groups"
        same("advantages", advantage_of(alone), advantage_of(whole.select(rows)), case, why)


@law("it asks for group_size samples to train of each prompt")
def requests(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    asked = sum(request.kind is Kind.TRAIN for request in algorithm.requests(Prompt("case:0", 0, (), (1,))))
    if asked != algorithm.config.group_size:
        raise Broken(f"it asks for {asked} samples to train, and group_size is {algorithm.config.group_size}", case)


@law("a group is what it is, not what was asked for: another group_size changes no advantage")
def sizes(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    other = changed(algorithm, group_size=2 * algorithm.config.group_size + 1)
    found, wanted = (advantage_of(estimated(a, case.batch())) for a in (other, algorithm))
    same("advantages", found, wanted, case, "under another group_size")


@law("the length of the prompt, and of what was not sampled, changes nothing")
def prompts(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    longer = tuple(tuple(replace(a, layouts=tuple("ppp" + x for x in a.layouts)) for a in g) for g in case.groups)
    short_batch, long_batch = (estimated(algorithm, plain(c.batch())) for c in (case, replace(case, groups=longer)))
    same("advantages", advantage_of(long_batch), advantage_of(short_batch), case, "with longer prompts")
    ours, theirs = (update(algorithm, b, case).gradient_T["logprob"][b.mask_T] for b in (long_batch, short_batch))
    same("the gradient", ours, theirs, case, "with longer prompts")


@law(
    "a group of equal rewards has advantages of exactly 0",
    lambda a: a.zero_on_equal_group,
    "promise it with zero_on_equal_group = True",
)
def equal_groups(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data, rewards=st.just(data.draw(ANY_REWARD)))
    advantage_M = advantage_of(estimated(algorithm, case.batch()))
    if (advantage_M != 0).any():
        raise Broken(f"advantages are {short(advantage_M)} although all rewards are equal", case)


@law(
    "rewards that differ by rounding alone do not become a direction",
    lambda a: a.zero_on_equal_group,
    "promise it with zero_on_equal_group = True",
)
def tiny_spread(algorithm: Algorithm, data: st.DataObject) -> None:
    value = data.draw(st.sampled_from([0.0, 1.0, 0.3]))
    case = drawn(algorithm, data, rewards=st.integers(0, 3).map(lambda i: value + i * 1e-15))
    advantage_M = advantage_of(estimated(algorithm, case.batch()))
    if not bool((advantage_M.abs() < 1e-3).all()):
        raise Broken(f"advantages are {short(advantage_M)} although rewards differ by 3e-15 at most", case)


@law(
    "where no token has an advantage and the policy has not moved, log-probs are left alone",
    lambda a: "reference" not in a.before_loss,
    "the KL to the reference in its loss pulls, too",
)
def no_signal(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = estimated(algorithm, case.batch(), steps=1)
    assert batch.advantage_T is not None
    found = update(algorithm, batch.replace(advantage_T=batch.advantage_T * 0), case, moved=False)
    if (found.gradient_T["logprob"] != 0).any():
        raise Broken(f"the gradient is {short(found.gradient_T['logprob'])} although every advantage is 0", case)


@law(
    "rows without an advantage have zero terms, so leaving them out changes nothing",
    lambda a: a.skips_no_signal,
    "promise it with skips_no_signal = True",
)
def skipping(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = estimated(algorithm, case.batch())
    silent = batch.replace(signal_N=batch.mark_signal().signal_N)
    rows = silent.signal_N.nonzero()[:, 0].tolist()
    wanted = update(algorithm, silent, case)
    same_update(update(algorithm, silent, case, parts=[rows]), wanted, case, "without the rows that have no advantage")


@law("a token of positive advantage becomes likelier, one of negative advantage less likely")
def direction(algorithm: Algorithm, data: st.DataObject) -> None:
    case = replace(drawn(algorithm, data), far=0.0)
    for sign, word in ((1.0, "positive"), (-1.0, "negative")):
        pull_M = _pull(algorithm, case, sign, 0.0)
        if not bool((pull_M * sign > 0).all()):
            raise Broken(f"{word} advantages pull at the tokens' log-probs by {short(pull_M)}", case)


@law("a token that has moved against its advantage is pulled back: no clip may let it go")
def pulled_back(algorithm: Algorithm, data: st.DataObject) -> None:
    case = replace(drawn(algorithm, data), far=0.0)
    for sign, word in ((1.0, "less likely although its advantage is positive"), (-1.0, "likelier, and it is negative")):
        pull_M = _pull(algorithm, case, sign, -0.6 * sign)
        if not bool((pull_M * sign > 0).all()):
            raise Broken(f"tokens became {word}, and are pulled by {short(pull_M)}", case)


def _pull(algorithm: Algorithm, case: Case, advantage: float, moved: float) -> Tensor:
    """What an advantage of every token does to the log-probs of a policy that has `moved` by so many nats; of the
    tokens that `select` leaves, [M]."""
    batch = estimated(algorithm, case.batch(), steps=1 if moved == 0 else 2)
    batch = batch.replace(extras_T={**batch.extras_T, "truth/now_T": batch.extras_T["truth/old_T"] + moved})
    found = [
        update(algorithm, batch.replace(advantage_T=torch.full(batch.token_T.shape, value)), case, moved=moved != 0)
        for value in (advantage, 0.0)
    ]
    slopes = [x.gradient_T["logprob"] for x in found]
    return (slopes[1] - slopes[0])[found[0].trained_T]


@law(
    "in a group the better answer has the larger advantage",
    lambda a: "critic" not in a.uses,
    "a critic's values stand between rewards and advantages",
)
def order(algorithm: Algorithm, data: st.DataObject) -> None:
    better, worse = data.draw(st.sampled_from([(1.0, 0.0), (2.0, -1.0), (1.0, -1.0)]))
    asked = drawn(algorithm, data)
    answers = [Answer(("ps",), better), *[Answer(("ps",), worse)] * 5]
    if asked.baseline:
        answers = [Answer(("ps",), (better + worse) / 2), *answers]
    case = Case((tuple(answers),), baseline=asked.baseline)
    batch = estimated(algorithm, case.batch())
    assert batch.advantage_T is not None
    first = len(answers) - 6
    found = {int(row): float(a) for row, a in zip(batch.row_T[batch.mask_T], advantage_of(batch), strict=True)}
    down = [a for row, a in found.items() if row != first]
    if first not in found or (down and not found[first] > max(down)):
        up = f"has the advantage {found[first]:.4g}" if first in found else "is not trained"
        raise Broken(f"the better answer {up}, a worse one {max(down, default=math.nan):.4g}", case)


@law("the loss, the gradient and the metrics do not depend on how the batch is cut into micro-batches and shards")
def split(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = estimated(algorithm, case.batch())
    order = data.draw(st.permutations(range(len(batch))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    same_update(update(algorithm, batch, case, parts), update(algorithm, batch, case), case, f"cut into {parts}")


@law("what stands at masked positions reaches nothing, NaN included")
def masked(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    wanted = estimated(algorithm, batch)
    empty_T = ~batch.mask_T
    dirty = batch.replace(
        token_T=batch.token_T.masked_fill(empty_T, 10**9),
        sampling_logprob_T=batch.sampling_logprob_T.masked_fill(empty_T, math.nan),
        reward_T=batch.reward_T.masked_fill(empty_T & (batch.reward_T == 0), math.nan),
    )
    found = estimated(algorithm, dirty)
    same("advantages", advantage_of(found), advantage_of(wanted), case, "with other numbers at masked positions")
    same_update(update(algorithm, found, case), update(algorithm, wanted, case), case, "with NaN at masked positions")


@law("a group of one, no sampled token, nothing to train: a finite result, and no gradient where nothing is trained")
def degenerate(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    found = update(algorithm, estimated(algorithm, batch.replace(mask_T=batch.mask_T & False)), case)
    if not found.loss.isfinite() or any((g != 0).any() for g in found.gradient_T.values()):
        raise Broken(f"with every token masked the loss is {short(found.loss)}, its gradient not 0", case)
    one = Case((case.groups[0][: 2 if case.baseline else 1],), case.far, case.seed, case.baseline)
    advantage_M = advantage_of(estimated(algorithm, one.batch()))
    if not advantage_M.isfinite().all():
        raise Broken(f"a group of one has advantages {short(advantage_M)}", one)


@law(
    "a sample counts once in its group's baseline, however many trajectories it has",
    lambda a: not a.across_groups,
    "it declares across_groups",
)
def counted_once(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    group, *rest = case.groups
    twice = (replace(group[-1], layouts=(*group[-1].layouts, "p")),)
    more = replace(case, groups=((*group[:-1], *twice), *rest))
    before, after = (estimated(algorithm, plain(c.batch())) for c in (case, more))
    rows = [i for i, s in enumerate(after.sample_N.tolist()) if s != len(group) - 1]
    old = [i for i, s in enumerate(before.sample_N.tolist()) if s != len(group) - 1]
    why = "once the first group's last sample had one more trajectory, without a token"
    same("advantages", advantage_of(after.select(rows)), advantage_of(before.select(old)), case, why)


@law(
    "rewards that are all larger by the same leave advantages as they are",
    lambda a: a.on_shift is not None,
    'promise it with on_shift = "same" (None takes it back)',
)
def shift(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    by = data.draw(st.sampled_from([1.0, -3.0, 10.0]))
    found, wanted = (advantage_of(estimated(algorithm, _rewarded(case, by_).batch())) for by_ in ((1, by), (1, 0.0)))
    same("advantages", found, wanted, case, f"once every reward was {by:+g} (promised by on_shift)")


@law(
    "rewards multiplied by a number change advantages as declared",
    lambda a: a.on_scale is not None,
    'promise it with on_scale = "same" or "linear" (None takes it back)',
)
def scale(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    by = data.draw(st.sampled_from([2.0, 10.0]))
    found, before = (advantage_of(estimated(algorithm, _rewarded(case, by_).batch())) for by_ in ((by, 0.0), (1, 0.0)))
    wanted = before * (by if algorithm.on_scale == "linear" else 1)
    why = f"once every reward was multiplied by {by:g} (on_scale promises {algorithm.on_scale})"
    same("advantages expected as", found, wanted, case, why)


@law("every metric that is reported has a definition")
def defined(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    registry = Registry(algorithm.metrics, type(algorithm))
    reported: list[tuple[str, str]] = []

    spy = copy.copy(algorithm)
    for role, name in (("policy", "loss"), ("critic", "value_loss")):
        function = getattr(algorithm, name)

        def told(batch: Batch, outputs: Any, function: Any = function, role: str = role) -> Any:
            loss = function(batch, outputs)
            reported.extend((role, metric) for metric in (*loss.metrics, *loss.peaks))
            return loss

        setattr(spy, name, told)
    update(spy, estimated(algorithm, case.batch()), case)
    for role, name in reported:
        if registry.find(f"{role}/{name}") is None:
            raise Broken(f"{role}/{name} is in no `metrics` of {type(algorithm).__name__}", case)


class _Measured(dict[str, float]):
    """Metrics of a step: whatever is asked for was measured."""

    def __missing__(self, name: str) -> float:
        return 0.5

    def get(self, name: str, default: Any = None) -> Any:
        return 0.5


@law("what a step taught survives a restart: `state()` is plain data, and `restore` brings it back")
def remembers(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    first = copy.deepcopy(algorithm)
    for _ in range(3):
        first.after_step(_Measured())
    try:
        kept = json.loads(json.dumps(first.state()))
    except (TypeError, ValueError) as error:
        raise Broken(f"state() is not plain data that a checkpoint can hold: {error}", case) from error
    second = copy.deepcopy(algorithm)
    second.restore(kept)
    one, other = (estimated(a, case.batch()) for a in (first, second))
    same("advantages", advantage_of(other), advantage_of(one), case, "after a restart")
    same_update(update(second, other, case), update(first, one, case), case, "after a restart")


# ---------------------------------------------------------------------- of a critic


@law(
    "the value after the last token counts only where a trajectory was cut short",
    lambda a: "critic" in a.before_advantages,
    "it looks at no values",
)
def terminated(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    other_N = batch.extras_N["truth/bootstrap_N"].where(batch.truncated_N, 7.0)
    found = estimated(algorithm, batch.replace(extras_N={"truth/bootstrap_N": other_N}))
    wanted = estimated(algorithm, batch)
    why = "under another value after trajectories that had ended"
    same("advantages", advantage_of(found), advantage_of(wanted), case, why)


@law("the critic moves towards its return, never away", lambda a: "critic" in a.uses, "it has no critic")
def towards(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = estimated(algorithm, case.batch())
    if batch.return_T is None:
        raise Broken("advantages fills no return_T, so the critic has nothing to learn", case)
    pull_T = -update(algorithm, batch, case).gradient_T["value"]
    away_T = pull_T * (batch.return_T - batch.extras_T["truth/value_T"]).nan_to_num() < -1e-6
    if away_T.any() or not (pull_T != 0).any() == (batch.mask_T.any()):
        raise Broken(f"values are pulled by {short(pull_T[batch.mask_T])} towards {short(batch.return_T)}", case)


def _rewarded(case: Case, by: tuple[float, float]) -> Case:
    groups = tuple(tuple(replace(a, reward=a.reward * by[0] + by[1]) for a in group) for group in case.groups)
    return replace(case, groups=groups)


def _tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    found = ((name, getattr(batch, name)) for name in type(batch).__dataclass_fields__)
    return [(name, value) for name, value in found if isinstance(value, torch.Tensor)]


LAWS = (
    declared,
    finite,
    repeatable,
    identity,
    apart,
    requests,
    sizes,
    prompts,
    equal_groups,
    tiny_spread,
    no_signal,
    skipping,
    direction,
    pulled_back,
    order,
    split,
    masked,
    degenerate,
    counted_once,
    shift,
    scale,
    defined,
    remembers,
    terminated,
    towards,
)
