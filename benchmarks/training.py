"""Forward and backward of the training engine against the plain Hugging Face way, in one alternating run.

`python -m benchmarks.training [--dtype bfloat16] [--rounds 5]` prints, for a batch of groups (6 prompts of about 50
tokens × 8 answers of about 30) and for 8 sequences of 512: useful tokens (trained ones) per second of both, the ratio,
and the gradient's error against float32; then what the optimizer's part of a step takes. The plain way pads, and holds
the logits of all positions; in bfloat16 it is autocast over float32 weights, the nearest in gradient precision. Each
has a process of its own, set up as its users would have it, and they take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from multiprocessing import get_context
from statistics import median
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from treadle.algorithms.grpo import GRPO, GRPOConfig
from treadle.batch import Batch
from treadle.controller.device import keep_memory
from treadle.engines.torch.config import Config
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.gradient import accumulate
from treadle.engines.torch.model import load_model
from treadle.handles import Objective
from treadle.types import Ended, Group, Kind, Prompt, Provenance, Reward, Sample, Trajectory

Gradients = dict[str, np.ndarray]
Shape = tuple[int, int, tuple[int, int], tuple[int, int]]
SHAPES: dict[str, Shape] = {  # groups, samples of each, range of prompt lengths, range of answer lengths
    "grouped 6 × 8": (6, 8, (46, 54), (24, 36)),
    "8 × 512": (8, 1, (1, 1), (511, 511)),
}


def make_batch(shape: Shape, vocabulary: int = 40_000) -> Batch:
    """Random tokens; advantages of both signs."""
    random = np.random.default_rng(0)
    groups, samples, prompts, answers = shape
    made = []
    for i in range(groups):
        prompt = Prompt(
            str(i), i, (), tuple(random.integers(vocabulary, size=random.integers(*prompts, endpoint=True)))
        )
        rows = [
            _trajectory(prompt, random.integers(vocabulary, size=random.integers(*answers, endpoint=True)), random)
            for _ in range(samples)
        ]
        made.append(Group(i, prompt, tuple(Sample(f"{i}.{j}", Kind.TRAIN, (row,)) for j, row in enumerate(rows))))
    batch = Batch.pack(made)
    advantage_N = torch.from_numpy(random.standard_normal(len(batch)).astype(np.float32))
    return batch.replace(advantage_T=advantage_N[batch.row_T])


def _trajectory(prompt: Prompt, answer: np.ndarray, random: np.random.Generator) -> Trajectory:
    token_T = np.concatenate([np.array(prompt.token_ids), answer])
    sampled_T = np.arange(len(token_T)) >= len(prompt.token_ids)
    return Trajectory(
        prompt=prompt,
        token_T=token_T,
        provenance_T=np.where(sampled_T, Provenance.SAMPLED, Provenance.PROMPT).astype(np.uint8),
        logprob_T=np.where(sampled_T, -1.0, np.nan).astype(np.float32),
        version_T=np.where(sampled_T, 0, -1).astype(np.int32),
        turn_ends=(len(token_T) - 1,),
        ended=Ended.TERMINATED,
        reward=Reward(float(random.random())),
    )


class Plain:
    """One padded forward pass with all logits, one backward pass; the loss is the same token mean."""

    def __init__(self, model: str, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.half = dtype == "bfloat16"

    def run(self, batch: Batch) -> None:
        assert batch.advantage_T is not None
        rows = [x.split(batch.length_N.tolist()) for x in (batch.token_T, batch.mask_T, batch.advantage_T)]
        token_NL, mask_NL, advantage_NL = (torch.nn.utils.rnn.pad_sequence(list(x), batch_first=True) for x in rows)
        real_NL = torch.arange(token_NL.shape[1]) < batch.length_N[:, None]
        self.model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if self.half else nullcontext():
            logits = self.model(input_ids=token_NL, attention_mask=real_NL.long(), use_cache=False).logits[:, :-1]
        logprob_NL = logits.float().log_softmax(-1).gather(-1, token_NL[:, 1:, None])[..., 0]
        terms = torch.where(mask_NL[:, 1:], logprob_NL * advantage_NL[:, 1:], 0.0)
        (-terms.sum() / mask_NL.sum()).backward()

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


class Ours:
    def __init__(self, model: str, dtype: str, microbatch: int) -> None:
        config = Config(learning_rate=0.0, microbatch_tokens=microbatch)
        self.engine = TorchEngine(load_model(model, dtype), config, total_steps=1)
        algorithm = GRPO(GRPOConfig(aggregate="token-mean"))
        self.objective = Objective(loss=algorithm.loss, needs=algorithm.needs)

    def run(self, batch: Batch) -> None:
        assert self.engine.optimizer is not None
        self.engine.optimizer.adamw.zero_grad()
        accumulate(self.engine.network, batch, self.objective, self.engine.config.microbatch_tokens)

    def gradients(self) -> dict[str, Tensor]:
        assert self.engine.optimizer is not None
        return {n: p.grad for n, p in self.engine.optimizer.masters.items() if p.grad is not None}


def difference(ours: Gradients, truth: Gradients) -> float:
    """Norm of the difference over the norm of the truth, all parameters together."""
    error = sum(float(np.square(ours[n] - g, dtype=np.float64).sum()) for n, g in truth.items())
    return (error / sum(float(np.square(g, dtype=np.float64).sum()) for g in truth.values())) ** 0.5


# ---------------------------------------------------------------------- turns

side: Plain | Ours  # of this process


def begin(kind: type[Plain] | type[Ours], *arguments: object) -> None:
    """In a process of its own: set up one side."""
    global side
    if kind is Ours:
        keep_memory()  # as the thread of a run's device does
    side = kind(*arguments)  # type: ignore[arg-type]


def timed(shape: str) -> float:
    batch = make_batch(SHAPES[shape])
    start = time.perf_counter()
    side.run(batch)
    return time.perf_counter() - start


def gradients() -> Gradients:
    return {name: gradient.float().numpy() for name, gradient in side.gradients().items()}


def optimizer_step() -> float:
    """Seconds for using up the gradient: clip, update, cast, publish."""
    assert isinstance(side, Ours)
    assert side.engine.optimizer is not None
    start = time.perf_counter()
    side.engine.optimizer.step()
    return time.perf_counter() - start


def process(stack: ExitStack, kind: type[Plain] | type[Ours], *arguments: object) -> Callable[..., Any]:
    """A process of one side; calls of the result run there."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=begin, initargs=(kind, *arguments))
    stack.enter_context(pool)
    return lambda call, *of: pool.submit(call, *of).result()


@click.command()
@click.option("--model", default="models/smollm2", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--microbatch", type=click.IntRange(min=1), default=4096, show_default=True, help="tokens")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--shape", "shapes", type=click.Choice(list(SHAPES)), multiple=True, default=list(SHAPES))
def main(model: str, dtype: str, microbatch: int, rounds: int, shapes: tuple[str, ...]) -> None:
    """Measure training against the plain way."""
    with ExitStack() as stack:
        ours, plain = process(stack, Ours, model, dtype, microbatch), process(stack, Plain, model, dtype)
        exact = plain if dtype == "float32" else process(stack, Plain, model, "float32")
        for shape in shapes:
            for each in {ours, plain, exact}:
                each(timed, shape)  # warm up
            truth = exact(gradients)
            error, theirs = (difference(each(gradients), truth) for each in (ours, plain))
            times = [(ours(timed, shape), plain(timed, shape)) for _ in range(rounds)]
            mine, other = (median(column) for column in zip(*times, strict=True))
            trained = make_batch(SHAPES[shape]).count().tokens
            print(
                f"{shape} {dtype}: ours {mine:.2f} s ({trained / mine:.0f} useful tokens/s), plain {other:.2f} s "
                f"({trained / other:.0f}), ratio {median(b / a for a, b in times):.2f}; "
                f"gradient error ours {error:.1e}, plain {theirs:.1e}",
                flush=True,
            )
        took = []
        for _ in range(rounds):
            ours(timed, shapes[0])
            took.append(ours(optimizer_step))
        print(f"optimizer, clip, cast and publish: {median(took):.2f} s")


if __name__ == "__main__":
    main()
