"""A batch to four workers and back, against what Ray needs for the same arrays and against verl: `make bench-dispatch`,
or, without verl,

    python -m benchmarks.dispatch --peer none

About 100 MB of trajectories of log-normal lengths go to four Ray workers by a `@sharded` method, which answers with two
float32 numbers a token, and these are laid together in the order of the batch. Three things are told:

- bytes copied, counted where they are, over those that no way through an object store can do without: a copy of the
  batch in, a copy of the results out, a copy of them laid together;
- time over that of `ray.put`, `ray.get` and `numpy.concatenate` for arrays that are cut already, through the same
  actors;
- time of verl's `DataProto` for the same data over ours. It is padded already when its time begins.

All take turns within a round; the figures are medians over rounds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import ray
import torch

from benchmarks.turns import ROOT, Job, Player, command
from treadle.batch import Batch
from treadle.controller.config import ControllerConfig, PoolConfig
from treadle.controller.host import Seat
from treadle.controller.ray import RayBackend, RayLink
from treadle.controller.sharding import split
from treadle.controller.verbs import everywhere, sharded

RANKS, GROUP, PROMPT, ANSWER = 4, 8, 400, 2048
ATTENTION = 1 / 8192
RESULTS = ("old_logprob_T", "value_T")
PEER = ROOT / ".cache" / "verl" / "bin" / "python"
SERIALIZATIONS = ("torch", "numpy")
"""What verl offers; the first is its default."""


class Echo:
    """A worker that computes nothing."""

    def __init__(self, seat: Seat) -> None:
        self.rank = seat.rank

    @sharded
    def look(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {name: getattr(batch, name) for name in RESULTS}

    @everywhere
    async def bare(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [arrays[name] for name in RESULTS]


# ---------------------------------------------------------------------- the data


def make(groups: int, seed: int = 0) -> Batch:
    """What a step trains on, as it is before the update: answers of a group begin with its prompt."""
    draw = np.random.default_rng(seed)
    prompt = draw.integers(50, PROMPT + 1, groups).repeat(GROUP)
    answer = np.exp(draw.normal(np.log(450), 0.6, groups * GROUP)).clip(1, ANSWER).astype(np.int64)
    length = torch.from_numpy(prompt + answer)
    offset_N1 = torch.cat([length.new_zeros(1), length.cumsum(0)])
    size, rows = int(offset_N1[-1]), len(length)
    token_T = torch.from_numpy(draw.integers(0, 50_000, size))
    for first in range(0, rows, GROUP):
        begin, same = int(offset_N1[first]), int(prompt[first])
        for row in range(first + 1, first + GROUP):
            token_T[offset_N1[row] : offset_N1[row] + same] = token_T[begin : begin + same]
    at_T = torch.arange(size) - torch.repeat_interleave(offset_N1[:-1], length)
    sampled_T = at_T >= torch.repeat_interleave(torch.from_numpy(prompt), length)
    noise = torch.Generator().manual_seed(seed)

    def found() -> torch.Tensor:
        return torch.where(sampled_T, torch.randn(size, generator=noise), torch.nan)

    none_N = torch.zeros(rows, dtype=torch.bool)
    return Batch(
        token_T=token_T,
        provenance_T=sampled_T.to(torch.uint8),
        sampling_logprob_T=found(),
        version_T=torch.where(sampled_T, 3, -1).to(torch.int32),
        offset_N1=offset_N1,
        group_N=torch.arange(groups).repeat_interleave(GROUP),
        sample_N=torch.arange(rows),
        bundle_N=torch.arange(rows),
        baseline_N=none_N,
        truncated_N=none_N,
        temperature_N=torch.ones(rows),
        reward_N=torch.rand(rows, generator=noise, dtype=torch.float64),
        reward_T=found(),
        mask_T=sampled_T,
        signal_N=~none_N,
        minibatch_N=torch.zeros(rows, dtype=torch.int64),
        old_logprob_T=found(),
        reference_logprob_T=found(),
        value_T=found(),
        advantage_T=found(),
        return_T=found(),
    )


def tensors(value: Any) -> dict[str, torch.Tensor]:
    """All of a batch, or of results by name."""
    if isinstance(value, Mapping):
        return {name: v for name, v in value.items() if isinstance(v, torch.Tensor)}
    if isinstance(value, Batch):
        return tensors({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return {}


def size_of(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(value).values())


# ---------------------------------------------------------------------- bytes


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes written while this is open, by where; results are counted as they come back."""
    found = {"select": 0, "put": 0, "results": 0, "gather": 0}
    select, gather, share = Batch.select, Batch.gather, RayLink.share

    def selecting(self: Batch, rows: Any) -> Batch:
        part, whole = select(self, rows), {t.untyped_storage().data_ptr() for t in tensors(self).values()}
        copies = [t for t in tensors(part).values() if t.untyped_storage().data_ptr() not in whole]
        found["select"] += sum(t.nbytes for t in copies)
        return part

    def gathering(self: Batch, rows: Any, results: Sequence[Any]) -> Any:
        whole = gather(self, rows, results)
        found["results"] += sum(map(size_of, results))
        found["gather"] += size_of(whole)
        return whole

    def sharing(self: RayLink, value: Any) -> Any:
        # what does not lie end to end is copied once more before Ray writes it
        found["put"] += size_of(value) + sum(t.nbytes for t in tensors(value).values() if not t.is_contiguous())
        return share(self, value)

    with (
        patch.object(Batch, "select", selecting),
        patch.object(Batch, "gather", gathering),
        patch.object(RayLink, "share", sharing),
    ):
        yield found


# ---------------------------------------------------------------------- the ways


def through_ray(actors: Sequence[Any], parts: Sequence[Mapping[str, np.ndarray]]) -> list[np.ndarray]:
    """What Ray and numpy alone do with arrays that are cut already."""
    calls = [a.call.remote(None, "echo", "bare", ray.put(part)) for a, part in zip(actors, parts, strict=True)]
    columns = zip(*ray.get(calls), strict=True)
    return [np.concatenate(column) for column in columns]


def peer(batch: Batch, serialization: str, folder: Path) -> Player:
    """verl in its own environment, with the same data."""
    if not PEER.exists():
        raise SystemExit(
            f"{PEER} is missing: `make bench-dispatch` makes verl's environment, `--peer none` does without"
        )
    data = folder / "batch.pt"
    torch.save({"ranks": RANKS, "prompt": PROMPT, "answer": ANSWER, **tensors(batch)}, data)
    job = Job(len(batch) // GROUP, GROUP, ANSWER, data=str(data), options={"results": RESULTS})
    variables = {"VERL_DATAPROTO_SERIALIZATION_METHOD": serialization, "RAY_USAGE_STATS_ENABLED": "0"}
    return Player("verl", command(PEER, "benchmarks.verl_dispatch", job), ROOT / "runs/benchmarks/verl.log", variables)


async def measure(groups: int, rounds: int, serialization: str | None) -> str:
    """Markdown of one comparison."""
    batch = make(groups)
    with ExitStack() as stack:
        verl = None
        if serialization is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            verl = peer(batch, serialization, folder)
            stack.callback(verl.end)
            verl.warmed_up()
        config = ControllerConfig(backend="ray")
        backend = await RayBackend.open(config, {"all": PoolConfig(ranks=RANKS, cpus=0.25, threads=1)})
        try:
            echo = await backend.group("echo", "all", Echo, Echo, ATTENTION)
            actors = [link.actor for link in backend._links["all"]]
            rows = split(batch.units(ATTENTION), RANKS)
            parts = [{n: t.numpy() for n, t in tensors(batch.select(mine)).items()} for mine in rows]
            with counted() as copied:
                answer = await echo.look(batch)
            for name in RESULTS:
                torch.testing.assert_close(answer[name], getattr(batch, name), rtol=0, atol=0, equal_nan=True)
            through_ray(actors, parts)
            seconds: dict[str, list[float]] = {"treadle": [], "bare": [], "verl": []}
            for _ in range(rounds):
                begin = time.perf_counter()
                await echo.look(batch)
                seconds["treadle"].append(time.perf_counter() - begin)
                seconds["bare"].append(_timed(lambda: through_ray(actors, parts)))
                if verl is not None:
                    seconds["verl"].append(verl.step()["dispatch"])
        finally:
            await backend.close()
    return table(batch, copied, seconds, serialization)


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# ---------------------------------------------------------------------- reporting


def floor(batch: Batch) -> int:
    """Bytes of a batch in, of results out, and of results laid together."""
    return size_of(batch) + 2 * size_of({name: getattr(batch, name) for name in RESULTS})


def table(
    batch: Batch, copied: Mapping[str, int], seconds: Mapping[str, Sequence[float]], serialization: str | None
) -> str:
    """Markdown: bytes, and the time of each way with its ratio, medians over rounds."""
    ratio = sum(copied.values()) / floor(batch)
    where = ", ".join(f"{name} {count / 1e6:.0f} MB" for name, count in copied.items())
    lines = [
        f"{len(batch)} trajectories, {len(batch.token_T)} tokens, {size_of(batch) / 1e6:.0f} MB, {RANKS} workers",
        "",
        f"Copied: {sum(copied.values()) / 1e6:.0f} MB ({where}), {ratio:.2f} times the least.",
        "",
        "| | s | against treadle, by round |",
        "|---|---|---|",
    ]
    for side, times in seconds.items():
        if not times:
            continue
        ratios = sorted(t / ours for t, ours in zip(times, seconds["treadle"], strict=True))
        name = f"verl ({serialization})" if side == "verl" else side
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {name} | {median(times):.3f} | {spread} |")
    over = sorted(ours / bare for ours, bare in zip(seconds["treadle"], seconds["bare"], strict=True))
    lines += ["", f"treadle ÷ bare: {median(over):.2f} ({over[0]:.2f} to {over[-1]:.2f} by round)"]
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--groups", default=400, help=f"of {GROUP} trajectories")
@click.option("--rounds", default=5)
@click.option(
    "--peer", "peers", multiple=True, default=SERIALIZATIONS, help="verl's ways to serialize: torch, numpy; none"
)
def main(groups: int, rounds: int, peers: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for serialization in peers:
        if serialization not in (*SERIALIZATIONS, "none"):
            raise click.BadParameter(f"--peer {serialization}: it is one of {', '.join(SERIALIZATIONS)}, none")
        click.echo(asyncio.run(measure(groups, rounds, None if serialization == "none" else serialization)) + "\n")


if __name__ == "__main__":
    main()
