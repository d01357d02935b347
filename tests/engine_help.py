"""Batches and an objective for the tests of the training engine."""

from __future__ import annotations

import torch

from treadle.batch import Batch
from treadle.handles import Aggregate, Loss, Objective, Outputs, Term, TrainingEngine


def make_batch(
    lengths: list[tuple[int, int]],
    *,
    seed: int = 0,
    vocabulary: int = 256,
    temperature: float = 1.0,
    minibatches: int = 1,
) -> Batch:
    """Trajectories of (prompt, sampled) tokens, with random tokens, advantages and old log-probs near the truth."""
    make = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0] + [p + s for p, s in lengths]).cumsum(0)
    total, rows = int(offsets[-1]), len(lengths)
    provenance_T = torch.cat([torch.tensor([0] * p + [1] * s, dtype=torch.uint8) for p, s in lengths])
    advantage_T = torch.randn(total, generator=make, dtype=torch.float64)
    return Batch(
        token_T=torch.randint(vocabulary, (total,), generator=make),
        provenance_T=provenance_T,
        sampling_logprob_T=torch.where(provenance_T == 1, -1.0, torch.nan),
        version_T=torch.where(provenance_T == 1, 0, -1).int(),
        offset_N1=offsets,
        group_N=torch.arange(rows) // 2,
        sample_N=torch.arange(rows),
        bundle_N=torch.arange(rows),
        baseline_N=torch.zeros(rows, dtype=torch.bool),
        truncated_N=torch.arange(rows) % 3 == 0,
        temperature_N=torch.full((rows,), temperature),
        reward_N=torch.zeros(rows, dtype=torch.float64),
        reward_T=torch.zeros(total),
        mask_T=provenance_T == 1,
        signal_N=torch.ones(rows, dtype=torch.bool),
        minibatch_N=torch.arange(rows) % minibatches,
        old_logprob_T=-5.5 + torch.randn(total, generator=make, dtype=torch.float64),
        advantage_T=advantage_T,
    )


def ppo(aggregate: Aggregate = "token-mean", clip: float = 0.2) -> Objective:
    """A clipped surrogate with an entropy and a Σp² bonus: every quantity that a language-model head gives."""

    def loss(batch: Batch, outputs: Outputs) -> Loss:
        assert batch.advantage_T is not None
        assert batch.old_logprob_T is not None
        assert outputs.logprob_T is not None
        assert outputs.entropy_T is not None
        assert outputs.sum_p2_T is not None
        ratio_T = (outputs.logprob_T - batch.old_logprob_T).exp()
        clipped_T = ratio_T.clamp(1 - clip, 1 + clip)
        surrogate_T = torch.minimum(ratio_T * batch.advantage_T, clipped_T * batch.advantage_T)
        scale_T = batch.advantage_T.abs()  # so that a row without advantage has a zero term
        terms = [
            Term(-surrogate_T, aggregate, length=7),
            Term(outputs.entropy_T * scale_T, aggregate, length=7, coefficient=-0.01),
            Term(outputs.sum_p2_T * scale_T, aggregate, length=7, coefficient=0.3),
        ]
        return Loss(terms, metrics={"ratio": ratio_T, "entropy": outputs.entropy_T}, peaks={"ratio_max": ratio_T})

    return Objective(loss, needs=frozenset({"logprob", "entropy", "sum_p2"}))


def value_regression() -> Objective:
    """Half the squared error of the values against the advantages."""

    def loss(batch: Batch, outputs: Outputs) -> Loss:
        assert batch.advantage_T is not None
        assert outputs.value_T is not None
        error_T = outputs.value_T - batch.advantage_T
        return Loss([Term(0.5 * error_T.square())], metrics={"error": error_T.abs()})

    return Objective(loss, needs=frozenset({"value"}))


def logprobs(engine: TrainingEngine, batch: Batch) -> torch.Tensor:
    return engine.quantities(batch, {"logprob"})["logprob_T"]
