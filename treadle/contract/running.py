"""An algorithm run as the loop and the engines run it: what it does not declare, it does not get.

Suffixes: N trajectories · T tokens of all of them · M trained tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from treadle.algorithms.aggregate import aggregate
from treadle.algorithms.base import Algorithm
from treadle.batch import Batch
from treadle.contract.cases import VERSION, Case, Truth
from treadle.handles import Loss, Outputs

if TYPE_CHECKING:
    from collections.abc import Set

    from torch import Tensor

    from treadle.algorithms.base import Role

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
QUANTITIES = ("logprob", "entropy", "sum_p2", "value")


class Broken(AssertionError):
    """A law does not hold: what was seen, and in which case."""

    def __init__(self, seen: str, case: Case) -> None:
        super().__init__(f"{seen}\n  with\n{case}")


def changed(algorithm: Algorithm, **keys: Any) -> Algorithm:
    """The algorithm under other values of its configuration; what `__init__` made of the old ones stays."""
    other = copy.copy(algorithm)
    other.config = algorithm.config.model_copy(update=keys)
    return other


def estimated(algorithm: Algorithm, batch: Batch, steps: int = 2) -> Batch:
    """Observed and estimated. `steps`: optimizer steps on it; from the second on the policy has moved from the old one,
    so that a pass finds the old log-probs where the algorithm does not say otherwise."""
    algorithm.max_tokens = algorithm.max_tokens or 8
    batch = observed(algorithm, batch, algorithm.before_advantages)
    batch = algorithm.estimate(batch, VERSION)
    return observed(algorithm, batch, changed(algorithm, epochs=steps, minibatches=1).passes_before_loss)


def observed(algorithm: Algorithm, batch: Batch, roles: Set[Role]) -> Batch:
    """With what passes over these roles find."""
    found: dict[str, Tensor] = {}
    seen_T = {name: batch.extras_T[f"truth/{name}_T"].where(batch.mask_T, math.nan) for name in _SEEN}
    if "policy" in roles:
        found["old_logprob_T"] = seen_T["old"]
        found |= {f"old_{name}_T": seen_T[name] for name in algorithm.observes & {"entropy", "sum_p2"}}
    if "reference" in roles:
        found["reference_logprob_T"] = seen_T["reference"]
    if "critic" in roles:
        found["value_T"] = seen_T["value"]
        found["bootstrap_N"] = batch.extras_N["truth/bootstrap_N"]
    return batch.annotated(found)


_SEEN = ("old", "reference", "value", "sum_p2", "entropy")


def advantage_of(batch: Batch) -> Tensor:
    """Of the trained tokens, [M]."""
    assert batch.advantage_T is not None
    return batch.advantage_T[batch.mask_T]


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step would do."""

    loss: Tensor
    gradient_T: dict[str, Tensor]  # by quantity, on the tokens of the full batch
    metrics: dict[str, Tensor]  # sums over tokens of rows with signal
    peaks: dict[str, Tensor]
    trained_T: Tensor  # bool, once `select` has chosen


def update(
    algorithm: Algorithm, batch: Batch, case: Case, parts: Sequence[Sequence[int]] | None = None, moved: bool = True
) -> Update:
    """One optimizer step on an estimated batch cut into `parts`, as an engine makes it. Not `moved`: the policy is
    still the one that the step started with."""
    now = "now" if moved else "old"
    leaves = {
        name: batch.extras_T[f"truth/{kind}_T"].detach().nan_to_num(-1.0).requires_grad_()
        for name, kind in zip(QUANTITIES, (now, "entropy", "sum_p2", "value"), strict=True)
    }
    whole = _with(batch.replace(counts=batch.replace(counts=None).count()), leaves)
    if algorithm.two_pass:
        compact = whole.compact()
        seen = _outputs(compact, algorithm.needs)
        seen = Outputs(**{name: x.detach() for name in seen.__slots__ if (x := getattr(seen, name)) is not None})
        chosen = whole.expanded(algorithm.select(compact, seen)).replace(counts=None)
        whole = _with(chosen.replace(counts=chosen.count()), leaves)
    losses, metrics, peaks = [leaves["logprob"].sum() * 0], {}, {}
    for rows in parts if parts is not None else [range(len(batch))]:
        compact = whole.select(list(rows)).compact()
        for loss in losses_of(algorithm, compact, case):
            losses += [aggregate(term, compact, compact.count()) for term in loss.terms]
            counted_M = compact.signal_N[compact.row_T]
            for name, value_M in loss.metrics.items():
                metrics[name] = metrics.get(name, 0) + value_M.detach()[counted_M].double().sum()
            for name, value_M in loss.peaks.items():
                if counted_M.any():
                    peaks[name] = max(peaks.get(name, -math.inf), float(value_M.detach()[counted_M].max()))
    total = torch.stack([x.to(torch.float64) for x in losses]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    numbers = {name: torch.as_tensor(x) for name, x in peaks.items()}
    return Update(total.detach(), dict(zip(leaves, gradients, strict=True)), metrics, numbers, whole.mask_T)


def losses_of(algorithm: Algorithm, compact: Batch, case: Case) -> Iterator[Loss]:
    """Of the policy and, where it has one, of the critic; their shapes are those of the tokens."""
    kinds = [(algorithm.loss, algorithm.needs)]
    if "critic" in algorithm.trains:
        kinds.append((algorithm.value_loss, frozenset({"value"})))
    for function, needs in kinds:
        loss = function(compact, _outputs(compact, needs))
        if not isinstance(loss, Loss) or not loss.terms:
            raise Broken(f"{function.__name__} returned {loss!r:.80}, not a Loss of terms", case)
        terms = {f"term {i}": term.term_T for i, term in enumerate(loss.terms)}
        for name, value_M in {**terms, **loss.metrics, **loss.peaks}.items():
            if value_M.shape != compact.token_T.shape:
                shape, tokens = tuple(value_M.shape), len(compact.token_T)
                raise Broken(f"{function.__name__}: {name} has shape {shape}, not one value for {tokens} tokens", case)
        yield loss


def _with(batch: Batch, leaves: dict[str, Tensor]) -> Batch:
    return batch.replace(extras_T={**batch.extras_T, **{f"leaf/{name}": x for name, x in leaves.items()}})


def _outputs(compact: Batch, needs: Set[str]) -> Outputs:
    return Outputs(**{f"{name}_T": compact.extras_T[f"leaf/{name}"] for name in QUANTITIES if name in needs})


def same(what: str, found: Tensor, wanted: Tensor, case: Case, why: str) -> None:
    """Raises Broken where two results differ by more than rounding."""
    if found.shape != wanted.shape or not torch.allclose(found.double(), wanted.double(), **CLOSE, equal_nan=True):
        raise Broken(f"{what} {short(wanted)} became {short(found)} {why}", case)


def same_update(found: Update, wanted: Update, case: Case, why: str) -> None:
    same("the loss", found.loss, wanted.loss, case, why)
    for name, gradient_T in wanted.gradient_T.items():
        same(f"the gradient of the {name}", found.gradient_T[name], gradient_T, case, why)
    for kind in ("metrics", "peaks"):
        one, other = getattr(found, kind), getattr(wanted, kind)
        for name in one.keys() | other.keys():
            zero = torch.zeros(())
            same(f"the metric {name}", one.get(name, zero), other.get(name, zero), case, why)


def short(x: Tensor) -> str:
    return str([float(f"{v:.4g}") for v in x.detach().flatten().tolist()]) if x.dim() else f"{float(x):.4g}"


def plain(batch: Batch) -> Batch:
    """What models say made a function of a token's place among the sampled ones of its row: batches with other rows, or
    with longer prompts, can then be compared."""
    sampled_T = (batch.provenance_T == 1).long()
    before_T = sampled_T.cumsum(0) - sampled_T
    first_N = torch.nn.functional.pad(before_T, (0, 1))[batch.offset_N1[:-1]]
    x_T = -0.1 - 0.2 * (before_T - first_N[batch.row_T]).float()
    known = Truth(x_T, x_T - 0.3, x_T + 1, x_T.exp() / 2, x_T - 0.1, -x_T, x_T)
    return known.hidden(batch.replace(extras_N={"truth/bootstrap_N": batch.reward_N.float() * 0}))
