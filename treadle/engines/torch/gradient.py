"""The gradient of one mini-batch: micro-batch by micro-batch, and the same however it was cut.

Suffix M: trained tokens of one micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.algorithms.aggregate import aggregate
from treadle.batch import Batch
from treadle.data.packing import plan
from treadle.engines.torch.mesh import tell
from treadle.engines.torch.sharding import passes
from treadle.errors import TrainingError
from treadle.handles import Loss, Outputs, Term
from treadle.types import Max, Mean, Statistics, merge

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from torch.distributed.device_mesh import DeviceMesh

    from treadle.batch import Counts
    from treadle.engines.torch.network import Network
    from treadle.handles import Objective, Quantity


def accumulate(network: Network, batch: Batch, objective: Objective, budget: int) -> dict[str, Mean | Max]:
    """Add the gradient of a mini-batch, or of a shard of one, to the parameters' and say what was seen.

    Denominators are the whole mini-batch's, so shards' gradients add up to its gradient, and their merged statistics
    are its statistics. Rows without signal are not run: their terms are zero and no metric counts them.

    On a mesh every rank calls it with its shard, and afterwards the parameters' gradient is that of the mini-batch.

    A two-pass objective narrows the mask; then the denominators are counted again from what is left, which only the
    whole mini-batch can tell: without a mesh a shard is refused. The log-probs that it trains are computed at all
    positions it saw, so that they are bit for bit those that it selected by.
    """
    counts = batch.count()
    own = batch.replace(counts=None).count()
    batch = batch.replace(counts=counts)
    chosen = batch
    if objective.select is not None:
        compact = batch.compact()
        scanned = scan(network, batch, objective.needs, budget)
        outputs = Outputs(**{name: x[batch.mask_T] for name, x in scanned.items()})
        compact, left = _selected(network.mesh, objective.select, compact, outputs)
        chosen = batch.expanded(compact).replace(counts=left)

    total, parts, ran, processed = 0.0, [], [], 0
    trained_N = chosen.trained_N
    for rows in passes(network, [r for r in plan(batch, budget) if trained_N[r].any()]):
        seen, trained = batch.select(rows), chosen.select(rows)
        layout = network.layout(seen)
        outputs = network.outputs(seen, objective.needs, layout)
        ran, processed = ran + rows, processed + len(layout)
        if chosen is not batch:
            keep_M = trained.mask_T[seen.mask_T]
            outputs = Outputs(**{name: x[keep_M] for name, x in present(outputs).items()})
        compact = trained.compact()
        loss = checked(objective.loss(compact, outputs), compact, objective.loss.__qualname__)
        value = torch.stack([aggregate(term, compact, compact.count()) for term in loss.terms]).sum()
        value.backward()
        total += value.item()
        parts.append(statistics(compact, loss))
    share = own.tokens / counts.tokens if counts.tokens else 1.0
    useful = len(network.layout(batch.select(ran))) if ran else 0
    return merge(*parts) | {
        "loss": Mean(total, share),
        "tokens": Mean(chosen.count().tokens * share, share),
        "useful_tokens": Mean(useful, processed),
    }


def _selected(
    mesh: DeviceMesh | None, select: Callable[[Batch, Outputs], Batch], compact: Batch, outputs: Outputs
) -> tuple[Batch, Counts]:
    """What is left of these rows, and how much of the mini-batch, whose other rows lie on other ranks: every rank
    selects from all of it, and keeps its own."""
    told = tell((compact, present(outputs)), mesh)
    whole = Batch.concat([part for part, _ in told])
    if whole.replace(counts=None).count() != compact.count():
        raise ValueError("a two-pass objective needs the whole mini-batch, not a shard of it")
    chosen = select(whole, Outputs(**{name: torch.cat([x[name] for _, x in told]) for name in present(outputs)}))
    begin = sum(len(part) for part, _ in told[: 0 if mesh is None else mesh.get_rank()])
    return chosen.select(range(begin, begin + len(compact))), chosen.replace(counts=None).count()


def checked(loss: Any, compact: Batch, function: str) -> Loss:
    """`loss`, if an engine can train it; raises `TrainingError` that names the function which returned it."""
    if not isinstance(loss, Loss) or not loss.terms:
        what = "a Loss without terms" if isinstance(loss, Loss) else f"a {type(loss).__name__}"
        raise TrainingError(f"{function} returned {what}; allowed: a Loss of terms, e.g. Loss([self.term(term_T)])")
    parts: dict[str, Any] = {f"term {i}": t.term_T if isinstance(t, Term) else t for i, t in enumerate(loss.terms)}
    parts |= {f"metric {name}": x for name, x in loss.metrics.items()}
    parts |= {f"peak {name}": x for name, x in loss.peaks.items()}
    for name, x in parts.items():
        if not isinstance(x, Tensor) or x.shape != compact.token_T.shape:
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
            raise TrainingError(
                f"{function} returned a Loss whose {name} has {what}; allowed: a tensor of one value for each of the "
                f"{len(compact.token_T)} trained tokens, and the engine does the averaging"
            )
    if not any(term.term_T.requires_grad for term in loss.terms):
        raise TrainingError(
            f"{function} returned a Loss without gradient; at least one term must be made of the current model's "
            "outputs, not detached"
        )
    return loss


def statistics(compact: Batch, loss: Loss) -> Statistics:
    """Metrics and peaks of one micro-batch over the tokens of rows with signal."""
    counted_M = compact.signal_N[compact.row_T]
    weight = int(counted_M.sum())
    if weight == 0:
        return {}
    metrics = {n: Mean(float(x.detach()[counted_M].double().sum()), weight) for n, x in loss.metrics.items()}
    return metrics | {n: Max(float(x.detach()[counted_M].max())) for n, x in loss.peaks.items()}


@torch.no_grad()
def scan(network: Network, batch: Batch, needs: Set[Quantity], budget: int) -> dict[str, Tensor]:
    """`Outputs` of a whole batch by field name, [T], NaN where not trained, under the plan that trains it."""
    kinds = batch.extras_T["given_id_T"].shape[1:] if "given" in needs else ()
    shapes = {need: (len(batch.token_T), *(kinds if need == "given" else ())) for need in needs}
    whole = {f"{need}_T": torch.full(shape, math.nan, dtype=network.accurate) for need, shape in shapes.items()}
    numbered = number(batch)
    for rows in passes(network, plan(batch, budget, everything=True)):
        part = numbered.select(rows)
        for name, value_M in present(network.outputs(part, needs)).items():
            if name in whole:  # the log-prob is always there
                whole[name][part.compact().extras_T["at"]] = value_M
    return whole


def number(batch: Batch) -> Batch:
    """The batch with each token's position in it as an extra, so that what a part gives can be laid back."""
    return batch.replace(extras_T={**batch.extras_T, "at": torch.arange(len(batch.token_T))})


def present(outputs: Outputs) -> dict[str, Tensor]:
    """The quantities that were asked for, by field name."""
    named = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    return {name: value for name, value in named.items() if value is not None}
