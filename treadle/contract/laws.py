"""The laws that every algorithm keeps, each with what it looks like when one does not.

A law draws its cases, runs the algorithm as the loop and the engines would, and raises `Broken`. Suffixes: N
trajectories · T tokens of all of them · M trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from treadle.algorithms.aggregate import aggregate
from treadle.algorithms.base import Algorithm
from treadle.algorithms.policy_gradient import PolicyGradient
from treadle.batch import Batch
from treadle.contract.cases import ANY_REWARD, Answer, Case, cases
from treadle.handles import Loss, Outputs
from treadle.metrics import Registry
from treadle.types import Kind, Prompt

if TYPE_CHECKING:
    from torch import Tensor

QUANTITIES = ("logprob_T", "entropy_T", "sum_p2_T", "value_T")
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


class Broken(AssertionError):
    """A law does not hold: what was seen, and in which case."""

    def __init__(self, seen: str, case: Case) -> None:
        super().__init__(f"{seen}\n  with\n{case}")


@dataclass(frozen=True, slots=True)
class Law:
    name: str
    says: str
    holds: Callable[[Algorithm, st.DataObject], None]
    applies: Callable[[Algorithm], bool]
    unless: str  # why it may not apply


LAWS: list[Law] = []


def law(
    says: str, applies: Callable[[Algorithm], bool] = lambda _: True, unless: str = ""
) -> Callable[..., Callable[..., None]]:
    def keep(holds: Callable[[Algorithm, st.DataObject], None]) -> Callable[[Algorithm, st.DataObject], None]:
        LAWS.append(Law(holds.__name__, says, holds, applies, unless))
        return holds

    return keep


# ---------------------------------------------------------------------- running an algorithm


def drawn(algorithm: Algorithm, data: st.DataObject, **how: object) -> Case:
    kinds = {request.kind for request in algorithm.requests(Prompt("case:0", 0, (), (1,)))}
    return data.draw(cases(baseline=Kind.BASELINE in kinds, **how))  # type: ignore[arg-type]


def estimated(algorithm: Algorithm, case: Case, batch: Batch | None = None) -> Batch:
    algorithm.max_tokens = algorithm.max_tokens or 8
    return algorithm.estimate(case.batch() if batch is None else batch)


def advantages(algorithm: Algorithm, case: Case, batch: Batch | None = None) -> Tensor:
    """Of the trained tokens, [M]."""
    found = estimated(algorithm, case, batch)
    assert found.advantage_T is not None
    return found.advantage_T[found.mask_T]


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step would do."""

    loss: Tensor
    gradient_T: dict[str, Tensor]  # by quantity, on the tokens of the full batch
    metrics: dict[str, Tensor]  # sums over tokens of rows with signal
    peaks: dict[str, Tensor]


def update(
    algorithm: Algorithm,
    batch: Batch,
    case: Case,
    parts: Sequence[Sequence[int]] | None = None,
    at_start: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Update:
    """One optimizer step on an estimated batch cut into `parts`, as an engine makes it. `at_start`: the policy has not
    moved from the old one, whose log-probs no pass has noted."""
    noise = torch.Generator().manual_seed(case.seed + 1)
    now_T = batch.old_logprob_T if at_start else batch.extras_T["now_T"]
    assert now_T is not None
    others = torch.rand(3, len(batch.token_T), generator=noise)
    leaves = [x.detach().to(dtype).nan_to_num(-1.0).requires_grad_() for x in (now_T, *others)]
    whole = batch.replace(counts=batch.replace(counts=None).count(), extras_T={**batch.extras_T, **_named(leaves)})
    if at_start and "policy" not in algorithm.before_advantages:
        whole = whole.replace(old_logprob_T=None)
    if algorithm.two_pass:
        compact = whole.compact()
        chosen = whole.expanded(algorithm.select(compact, _outputs(compact, detached=True))).replace(counts=None)
        whole = chosen.replace(counts=chosen.count(), extras_T={**chosen.extras_T, **_named(leaves)})
    losses, metrics, peaks = [whole.extras_T["logprob_T"].sum() * 0], {}, {}
    for rows in parts if parts is not None else [range(len(batch))]:
        compact = whole.select(list(rows)).compact()
        for loss in _losses(algorithm, compact, case):
            losses += [aggregate(term, compact, compact.count()) for term in loss.terms]
            counted_M = compact.signal_N[compact.row_T]
            for name, value_M in loss.metrics.items():
                metrics[name] = metrics.get(name, 0) + value_M.detach()[counted_M].double().sum()
            for name, value_M in loss.peaks.items():
                if counted_M.any():
                    peaks[name] = max(peaks.get(name, -math.inf), float(value_M.detach()[counted_M].max()))
    total = torch.stack([x.to(torch.float64) for x in losses]).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    numbers = {name: torch.as_tensor(x) for name, x in peaks.items()}
    return Update(total.detach(), dict(zip(QUANTITIES, gradients, strict=True)), metrics, numbers)


def _named(leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(QUANTITIES, leaves, strict=True))


def _outputs(compact: Batch, detached: bool = False) -> Outputs:
    found = {name: compact.extras_T[name] for name in QUANTITIES}
    return Outputs(**{name: x.detach() if detached else x for name, x in found.items()})


def _losses(algorithm: Algorithm, compact: Batch, case: Case) -> Iterator[Loss]:
    kinds = [algorithm.loss, *([algorithm.value_loss] if "critic" in algorithm.uses else [])]
    for function in kinds:
        loss = function(compact, _outputs(compact))
        if not isinstance(loss, Loss) or not loss.terms:
            raise Broken(f"{function.__name__} returned {loss!r:.80}, not a Loss of terms", case)
        tensors = {"a term": loss.terms[0].term_T, **loss.metrics, **loss.peaks}
        for name, value_M in tensors.items():
            if value_M.shape != compact.token_T.shape:
                shape, tokens = tuple(value_M.shape), len(compact.token_T)
                raise Broken(f"{function.__name__}: {name} has shape {shape}, not one value for {tokens} tokens", case)
        yield loss


def same(what: str, found: Tensor, wanted: Tensor, case: Case, why: str) -> None:
    """Raises Broken where two results differ by more than rounding."""
    if found.shape != wanted.shape or not torch.allclose(found.double(), wanted.double(), **CLOSE, equal_nan=True):
        raise Broken(f"{what} {_short(wanted)} became {_short(found)} {why}", case)


def same_update(found: Update, wanted: Update, case: Case, why: str) -> None:
    same("the loss", found.loss, wanted.loss, case, why)
    for name, gradient_T in wanted.gradient_T.items():
        same(f"the gradient of {name}", found.gradient_T[name], gradient_T, case, why)
    for kind in ("metrics", "peaks"):
        one, other = getattr(found, kind), getattr(wanted, kind)
        for name in one.keys() | other.keys():
            zero = torch.zeros(())
            same(f"the metric {name}", one.get(name, zero), other.get(name, zero), case, why)


def _short(x: Tensor) -> str:
    return str([float(f"{v:.4g}") for v in x.detach().flatten().tolist()]) if x.dim() else f"{float(x):.4g}"


# ---------------------------------------------------------------------- laws


@law("advantages, losses, gradients and metrics are finite on any finite input, extreme ratios included")
def finite(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data, rewards=ANY_REWARD, far=data.draw(st.sampled_from([3.0, 300.0, 1e4])))
    batch = estimated(algorithm, case)
    advantage_M = advantages(algorithm, case)
    if not advantage_M.isfinite().all():
        raise Broken(f"advantages are {_short(advantage_M)}", case)
    found = update(algorithm, batch, case)
    for name, value in {"loss": found.loss, **found.gradient_T, **found.metrics, **found.peaks}.items():
        if not value.isfinite().all():
            what = f"the gradient of {name}" if name in QUANTITIES else f"the {name}"
            raise Broken(f"{what} is {_short(value)}", case)


@law("the same input gives the same result, and nothing of it is changed")
def repeatable(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    before = {n: x.clone() for n, x in _tensors(batch)}
    done = estimated(algorithm, case, batch)
    same("advantages", advantages(algorithm, case, batch), _advantage(done), case, "the second time")
    kept = {n: x.clone() for n, x in _tensors(done)}
    one = update(algorithm, done, case)
    same_update(update(algorithm, done, case), one, case, "the second time")
    for old, new in ((before, batch), (kept, done)):
        for name, x in _tensors(new):
            if not torch.equal(x.nan_to_num(), old[name].nan_to_num()):
                raise Broken(f"the batch's {name} was written over", case)


@law("rows and groups are found by identity: any order, interleaved, under any numbers")
def identity(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    wanted = estimated(algorithm, case, batch)
    order = data.draw(st.permutations(range(len(batch))))
    shuffled = batch.select(order)
    renamed = shuffled.replace(group_N=-7 * shuffled.group_N + 5, sample_N=1000 - 3 * shuffled.sample_N, counts=None)
    found = estimated(algorithm, case, renamed)
    back = found.select([order.index(i) for i in range(len(order))])
    same("advantages", _advantage(back), _advantage(wanted), case, f"with the rows in the order {order}")
    one, other = update(algorithm, wanted, case), update(algorithm, back.replace(counts=None), case)
    same_update(other, one, case, f"with the rows in the order {order}")


@law(
    "a group's advantages do not depend on other groups",
    lambda a: not a.across_groups,
    "it declares across_groups",
)
def apart(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    whole = estimated(algorithm, case, batch)
    for group in range(len(case.groups)):
        rows = (batch.group_N == group).nonzero()[:, 0]
        alone = estimated(algorithm, case, batch.select(rows).replace(counts=None))
        why = f"in group {group} without the other groups"
        same("advantages", _advantage(alone), _advantage(whole.select(rows)), case, why)


@law(
    "a group of equal rewards has advantages of exactly 0",
    lambda a: a.zero_on_equal_group,
    "promise it with zero_on_equal_group = True",
)
def equal_groups(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data, rewards=st.just(data.draw(ANY_REWARD)))
    advantage_M = advantages(algorithm, case)
    if (advantage_M != 0).any():
        raise Broken(f"advantages are {_short(advantage_M)} although all rewards are equal", case)


@law(
    "rewards that differ by rounding alone do not become a direction",
    lambda a: a.zero_on_equal_group,
    "promise it with zero_on_equal_group = True",
)
def tiny_spread(algorithm: Algorithm, data: st.DataObject) -> None:
    value = data.draw(st.sampled_from([0.0, 1.0, 0.3]))
    case = drawn(algorithm, data, rewards=st.integers(0, 3).map(lambda i: value + i * 1e-15))
    advantage_M = advantages(algorithm, case)
    if not bool((advantage_M.abs() < 1e-3).all()):
        raise Broken(f"advantages are {_short(advantage_M)} although rewards differ by 3e-15 at most", case)


@law(
    "where no token has an advantage and the policy has not moved, log-probs are left alone",
    lambda a: "reference" not in a.before_loss,
    "the KL to the reference in its loss pulls, too",
)
def no_signal(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = estimated(algorithm, case)
    assert batch.advantage_T is not None
    found = update(algorithm, batch.replace(advantage_T=batch.advantage_T * 0), case, at_start=True)
    gradient_T = found.gradient_T["logprob_T"]
    if (gradient_T != 0).any():
        raise Broken(f"the gradient is {_short(gradient_T)} although every advantage is 0", case)


@law(
    "rows without an advantage have zero terms, so leaving them out changes nothing",
    lambda a: a.skips_no_signal,
    "promise it with skips_no_signal = True",
)
def skipping(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = estimated(algorithm, case)
    silent_N = batch.mark_signal().signal_N
    wanted = update(algorithm, batch.replace(signal_N=silent_N), case)
    rows = silent_N.nonzero()[:, 0].tolist()
    found = update(algorithm, batch.replace(signal_N=silent_N), case, parts=[rows])
    same_update(found, wanted, case, "without the rows that have no advantage")


@law("a token of positive advantage becomes likelier, one of negative advantage less likely")
def direction(algorithm: Algorithm, data: st.DataObject) -> None:
    case = replace(drawn(algorithm, data), far=0.0)
    for sign, word in ((1.0, "positive"), (-1.0, "negative")):
        pull_M = _pull(algorithm, case, sign, 0.0)
        if not bool((pull_M * sign > 0).all()):
            raise Broken(f"{word} advantages pull at the tokens' log-probs by {_short(pull_M)}", case)


@law("a token that has moved against its advantage is pulled back: no clip may let it go")
def pulled_back(algorithm: Algorithm, data: st.DataObject) -> None:
    case = replace(drawn(algorithm, data), far=0.0)
    for sign, word in ((1.0, "less likely although its advantage is positive"), (-1.0, "likelier, and it is negative")):
        pull_M = _pull(algorithm, case, sign, -0.6 * sign)
        if not bool((pull_M * sign > 0).all()):
            raise Broken(f"tokens became {word}, and are pulled by {_short(pull_M)}", case)


def _pull(algorithm: Algorithm, case: Case, advantage: float, moved: float) -> Tensor:
    """What an advantage of every token does to the log-probs of a policy that has `moved` by so many nats, [M]."""
    batch = estimated(algorithm, case)
    assert batch.old_logprob_T is not None
    now_T = batch.old_logprob_T + moved
    slopes = []
    for value in (advantage, 0.0):
        given = batch.replace(
            advantage_T=torch.full(batch.token_T.shape, value), extras_T={**batch.extras_T, "now_T": now_T}
        )
        slopes.append(update(algorithm, given, case, at_start=moved == 0).gradient_T["logprob_T"][batch.mask_T])
    return slopes[1] - slopes[0]


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
    up, *down = advantages(algorithm, case).tolist()
    if not up > max(down):
        raise Broken(f"the better answer has the advantage {up:.4g}, a worse one {max(down):.4g}", case)


@law("the loss, the gradient and the metrics do not depend on how the batch is cut into micro-batches and shards")
def split(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = estimated(algorithm, case)
    order = data.draw(st.permutations(range(len(batch))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    same_update(update(algorithm, batch, case, parts), update(algorithm, batch, case), case, f"cut into {parts}")


@law("what stands at masked positions reaches nothing, NaN included")
def masked(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    wanted = estimated(algorithm, case, batch)
    empty_T = ~batch.mask_T
    names = ("old_logprob_T", "reference_logprob_T", "value_T", "sampling_logprob_T", "reward_T")
    soiled = {n: getattr(batch, n).masked_fill(empty_T & (n != "reward_T"), math.nan) for n in names}
    dirty = batch.replace(**soiled, token_T=batch.token_T.masked_fill(empty_T, 10**9))
    found = estimated(algorithm, case, dirty)
    same("advantages", _advantage(found), _advantage(wanted), case, "with other numbers at masked positions")
    same_update(update(algorithm, found, case), update(algorithm, wanted, case), case, "with NaN at masked positions")


@law("a group of one, no sampled token, nothing to train: a finite result, and no gradient where nothing is trained")
def degenerate(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    batch = case.batch()
    nothing = batch.replace(mask_T=batch.mask_T & False)
    found = update(algorithm, estimated(algorithm, case, nothing), case)
    if not found.loss.isfinite() or any((g != 0).any() for g in found.gradient_T.values()):
        raise Broken(f"with every token masked the loss is {_short(found.loss)}, its gradient not 0", case)
    one = Case((case.groups[0][: 2 if case.baseline else 1],), case.far, case.seed, case.baseline)
    if not advantages(algorithm, one).isfinite().all():
        raise Broken(f"a group of one has advantages {_short(advantages(algorithm, one))}", one)


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
    before, after = (estimated(algorithm, case, _plain(c.batch())) for c in (case, more))
    rows = [i for i, s in enumerate(after.sample_N.tolist()) if s != len(group) - 1]
    old = [i for i, s in enumerate(before.sample_N.tolist()) if s != len(group) - 1]
    why = "once the first group's last sample had one more trajectory, without a token"
    same("advantages", _advantage(after.select(rows)), _advantage(before.select(old)), case, why)


@law(
    "a rejected sample is in no baseline and in no denominator",
    lambda a: isinstance(a, PolicyGradient),
    "it cannot reject: a subclass of Estimator, Objective or a whole algorithm of ours can",
)
def rejected(algorithm: Algorithm, data: st.DataObject) -> None:
    rejecting = type(algorithm)(algorithm.config.model_copy(update={"truncated": "reject"}))
    case = drawn(algorithm, data)
    first = (Answer(("pss",), data.draw(st.sampled_from([0.0, 5.0])), truncated=True),)
    at = 1 if case.baseline else 0
    groups = [tuple(replace(a, truncated=False) for a in group) for group in case.groups]
    more = replace(case, groups=((*groups[0][:at], *first, *groups[0][at:]), *groups[1:]))
    batch = _plain(more.batch())
    kept = [i for i in range(len(batch)) if i != at]
    found = estimated(rejecting, case, batch)
    wanted = estimated(rejecting, case, batch.select(kept).replace(counts=None))
    why = "beside a rejected sample"
    same("advantages", _advantage(found.select(kept)), _advantage(wanted), more, why)
    ours, theirs = (update(rejecting, b, case).gradient_T["logprob_T"][b.mask_T] for b in (found, wanted))
    same("the gradient", ours, theirs, more, why)


@law(
    "rewards that are all larger by the same leave advantages as they are",
    lambda a: a.on_shift is not None,
    'promise it with on_shift = "same"',
)
def shift(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    by = data.draw(st.sampled_from([1.0, -3.0, 10.0]))
    found = advantages(algorithm, _rewarded(case, lambda r: r + by))
    same("advantages", found, advantages(algorithm, case), case, f"once every reward was {by:+g}")


@law(
    "rewards multiplied by a number change advantages as declared",
    lambda a: a.on_scale is not None,
    'promise it with on_scale = "same" or "linear"',
)
def scale(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    by = data.draw(st.sampled_from([2.0, 10.0]))
    wanted = advantages(algorithm, case) * (by if algorithm.on_scale == "linear" else 1)
    found = advantages(algorithm, _rewarded(case, lambda r: r * by))
    same("advantages expected as", found, wanted, case, f"once every reward was multiplied by {by:g}")


@law("every metric that is reported has a definition")
def defined(algorithm: Algorithm, data: st.DataObject) -> None:
    case = drawn(algorithm, data)
    compact = estimated(algorithm, case).compact()
    leaves = [torch.zeros(len(compact.token_T), requires_grad=True) for _ in QUANTITIES]
    filled = compact.replace(extras_T={**compact.extras_T, **_named(leaves)})
    if algorithm.two_pass:
        filled = algorithm.select(filled, _outputs(filled))
    registry = Registry(algorithm.metrics, type(algorithm))
    functions = {"policy": algorithm.loss, **({"critic": algorithm.value_loss} if "critic" in algorithm.uses else {})}
    for role, function in functions.items():
        loss = function(filled, _outputs(filled))
        for name in (*loss.metrics, *loss.peaks):
            if registry.find(f"{role}/{name}") is None:
                raise Broken(f"{role}/{name} is in no `metrics` of {type(algorithm).__name__}", case)


def _advantage(batch: Batch) -> Tensor:
    assert batch.advantage_T is not None
    return batch.advantage_T[batch.mask_T]


def _plain(batch: Batch) -> Batch:
    """With log-probs that a token has wherever it stands, so that batches with other rows can be compared."""
    same_T = torch.where(batch.provenance_T == 1, -0.1 - 0.2 * batch.token_T, math.nan)
    names = ("old_logprob_T", "reference_logprob_T", "sampling_logprob_T")
    extras = {"old_sum_p2_T": same_T.exp() / 2, "now_T": same_T - 0.1}
    fields = {**dict.fromkeys(names, same_T), "value_T": same_T + 1, "bootstrap_N": batch.reward_N.float() * 0}
    return batch.replace(**fields, extras_T=extras)


def _rewarded(case: Case, change: Callable[[float], float]) -> Case:
    groups = tuple(tuple(replace(a, reward=change(a.reward)) for a in group) for group in case.groups)
    return replace(case, groups=groups)


def _tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for name in type(batch).__dataclass_fields__:
        value = getattr(batch, name)
        if isinstance(value, torch.Tensor):
            yield name, value
