"""What the mathematics of a step cost beside the models: `python -m benchmarks.mathematics [NAME…]`.

1,024 sequences of 8,192 sampled tokens, in groups of 8. For each algorithm: the seconds of everything that the
controller does with such a batch (compacting it, correction, advantages, laying them back, marking rows without
signal); those of the loss and its gradient, which the engine makes, a micro-batch at a time; and the controller's peak
of additional memory over that of the batch. The bound is 1.2 s on two cores: 2 % of one forward pass of a 1.5 B model
on an H100 at 40 % utilisation.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import click
import torch

from treadle.algorithms.base import Algorithm
from treadle.batch import Batch
from treadle.contract.target import algorithm_of
from treadle.handles import Outputs

ROUNDS = 3


def make_batch(sequences: int, length: int, group: int) -> Batch:
    """Sampled tokens alone, every optional field filled."""
    tokens = sequences * length
    noise = torch.Generator().manual_seed(0)
    logprob_T = -torch.rand(tokens, generator=noise)
    row_N = torch.arange(sequences)
    reward_N = (torch.rand(sequences, generator=noise) < 0.5).double()
    offset_N1 = torch.arange(sequences + 1) * length
    return Batch(
        token_T=torch.zeros(tokens, dtype=torch.int64),
        provenance_T=torch.ones(tokens, dtype=torch.uint8),
        sampling_logprob_T=logprob_T + 0.01,
        version_T=torch.zeros(tokens, dtype=torch.int32),
        offset_N1=offset_N1,
        group_N=row_N // group,
        sample_N=row_N,
        bundle_N=row_N,
        baseline_N=row_N % group == 0 if group > 1 else row_N < 0,
        truncated_N=row_N % 7 == 0,
        temperature_N=torch.ones(sequences),
        reward_N=reward_N,
        reward_T=torch.zeros(tokens).index_fill(0, offset_N1[1:] - 1, 1.0),
        mask_T=torch.ones(tokens, dtype=torch.bool),
        signal_N=row_N >= 0,
        minibatch_N=row_N * 0,
        old_logprob_T=logprob_T,
        reference_logprob_T=logprob_T - 0.01,
        value_T=logprob_T + 1,
        bootstrap_N=torch.zeros(sequences),
        reward_parts_N={"first": reward_N, "second": reward_N.flip(0)},
        extras_T={"old_sum_p2_T": logprob_T.exp() / 2},
    )


def nbytes(batch: Batch) -> int:
    """Of what the algorithm reads: the batch's tensors."""
    fields = (getattr(batch, name) for name in type(batch).__dataclass_fields__)
    held = [x for f in fields for x in (f.values() if isinstance(f, dict) else [f]) if isinstance(x, torch.Tensor)]
    return sum(x.nbytes for x in held)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, sequences: int, length: int, group: int, out: Any) -> None:
    """In a process of its own, for its peak of memory to be this algorithm's."""
    algorithm: Algorithm = algorithm_of(name.split()[0], name.split()[1:])
    algorithm.max_tokens = length
    batch = make_batch(sequences, length, group)
    held, before = nbytes(batch), peak()
    estimates, losses, peaks = [], [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        done = algorithm.estimate(batch)
        estimates.append(time.perf_counter() - start)
        peaks.append(peak())
        compact = done.compact()
        logprob_T = (compact.sampling_logprob_T - 0.005).requires_grad_()
        outputs = Outputs(logprob_T=logprob_T, entropy_T=torch.ones(len(logprob_T)))
        start = time.perf_counter()
        if algorithm.two_pass:
            compact = algorithm.select(compact, outputs)
        loss = algorithm.loss(compact, outputs)
        loss.terms[0].term_T.sum().backward()
        losses.append(time.perf_counter() - start)
        del done, compact, outputs, loss, logprob_T
    out.put((median(estimates), median(losses), (peaks[0] - before) / held))


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--sequences", default=1024, show_default=True)
@click.option("--length", default=8192, show_default=True)
def main(names: Sequence[str], sequences: int, length: int) -> None:
    from benchmarks.catalogue import names as ours

    context = multiprocessing.get_context("spawn")
    click.echo(f"{'':<32}{'controller s':>13}{'loss s':>8}{'memory ×':>10}")
    for name in names or [*ours(), "grpo correction.weight=token correction.reject=token"]:
        queue = context.Queue()
        process = context.Process(target=measure, args=(name, sequences, length, 8, queue))
        process.start()
        first, second, memory = queue.get()
        process.join()
        click.echo(f"{name[:31]:<32}{first:>13.2f}{second:>8.2f}{memory:>10.2f}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
