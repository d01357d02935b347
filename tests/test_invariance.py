"""The normaliser rule and the identity rule: how a batch is cut changes neither loss, gradient nor metrics; and at
equal weights the ratio of two passes is exactly 1."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine_help import logprobs, make_batch, ppo
from treadle.batch import Batch
from treadle.engines.torch.config import Config
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.gradient import accumulate
from treadle.engines.torch.model import load_model
from treadle.engines.torch.network import Network
from treadle.handles import Aggregate, Loss, Objective, Outputs, Term
from treadle.types import Mean, merge

AGGREGATES = get_args(Aggregate)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
WHOLE = 100_000  # tokens: one micro-batch


@pytest.fixture(scope="module")
def networks(tiny_model: Path) -> dict[torch.dtype, Network]:
    """The tiny model in three precisions, chunks of logits smaller than a batch."""

    def network(dtype: torch.dtype) -> Network:
        model = load_model(str(tiny_model), "float32").to(dtype)
        return Network(model, "lm", chunk=8, recompute=False)

    return {dtype: network(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)}


def run(network: Network, parts: list[Batch], objective: Objective, budget: int) -> tuple[dict[str, float], Tensor]:
    """Merged statistics and the whole gradient of these parts of one mini-batch, as data-parallel ranks would do it."""
    network.model.zero_grad()
    found = merge(*(accumulate(network, part, objective, budget) for part in parts))
    del found["useful_tokens"]  # says how the batch was cut
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters().values()]
    return {name: value.value for name, value in found.items()}, torch.cat([g.flatten() for g in gradients])


def assert_equal(ours: tuple[dict[str, float], Tensor], theirs: tuple[dict[str, float], Tensor]) -> None:
    tolerance = TOLERANCE[theirs[1].dtype]
    assert ours[0] == pytest.approx(theirs[0], rel=10 * tolerance, abs=tolerance)
    assert (ours[1] - theirs[1]).norm() <= tolerance * theirs[1].norm()
    assert theirs[1].norm() > 0


@cache
def ragged() -> Batch:
    """Nine trajectories of 3 to 40 tokens; one has no trained token, two have no signal, two share a bundle."""
    lengths = [(3, 1), (12, 9), (2, 17), (30, 10), (5, 0), (4, 4), (9, 2), (1, 6), (20, 12)]
    batch = make_batch(lengths, seed=4)
    silent_N = torch.tensor([i in (1, 6) for i in range(9)])
    bundle_N = torch.tensor([0, 1, 2, 3, 4, 2, 6, 7, 8])
    assert batch.advantage_T is not None
    advantage_T = batch.advantage_T.masked_fill(silent_N[batch.row_T], 0.0)
    return batch.replace(signal_N=~silent_N, bundle_N=bundle_N, advantage_T=advantage_T)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A micro-batch budget, and shards: a permutation of the rows dealt to some ranks, bundles kept whole."""
    budget, ranks = draw(st.integers(1, 130)), draw(st.integers(1, 4))
    order = draw(st.permutations(range(9)))
    rank_of_bundle = draw(st.lists(st.integers(0, ranks - 1), min_size=9, max_size=9))
    bundle_N = ragged().bundle_N.tolist()
    return budget, [[r for r in order if rank_of_bundle[bundle_N[r]] == rank] for rank in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@settings(max_examples=8, deadline=None)
@given(cut=cuts())
def test_any_cut_gives_the_same(
    networks: dict[torch.dtype, Network], dtype: torch.dtype, aggregate: Aggregate, cut: tuple[int, list[list[int]]]
) -> None:
    budget, shards = cut
    batch = ragged()
    whole = run(networks[dtype], [batch], ppo(aggregate), WHOLE)
    parts = [batch.select(rows) for rows in shards if rows]
    assert_equal(run(networks[dtype], parts, ppo(aggregate), budget), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_leaving_out_rows_without_signal_changes_nothing(
    networks: dict[torch.dtype, Network], dtype: torch.dtype, aggregate: Aggregate
) -> None:
    batch = ragged()
    skipped = run(networks[dtype], [batch], ppo(aggregate), 50)
    # One bundle for all: whatever has signal takes the others with it, so every row is run.
    everything = batch.replace(bundle_N=torch.zeros_like(batch.bundle_N))
    assert_equal(run(networks[dtype], [everything], ppo(aggregate), 50), skipped)
    # Rows said to have signal: the same loss and gradient; metrics now count them.
    statistics, gradient = run(networks[dtype], [batch.replace(signal_N=batch.signal_N | True)], ppo(aggregate), 50)
    assert_equal(({**skipped[0], "loss": statistics["loss"]}, gradient), skipped)
    assert statistics["entropy"] != skipped[0]["entropy"]


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_loss_is_what_its_aggregate_says(networks: dict[torch.dtype, Network], aggregate: Aggregate) -> None:
    batch = ragged().replace(signal_N=torch.ones(9, dtype=torch.bool))
    tokens = [1, 9, 17, 10, 0, 4, 2, 6, 12]
    terms = {r: torch.arange(1, n + 1, dtype=torch.float64) * (r + 1) for r, n in enumerate(tokens)}
    term_T = batch.expand(torch.cat(list(terms.values())))

    def loss(compact: Batch, outputs: Outputs) -> Loss:
        assert outputs.logprob_T is not None
        return Loss([Term(compact.extras_T["term"] + 0 * outputs.logprob_T, aggregate, length=7, coefficient=2.0)])

    found, _ = run(networks[torch.float64], [batch.replace(extras_T={"term": term_T})], Objective(loss), 50)
    total, trained = sum(float(t.sum()) for t in terms.values()), sum(n > 0 for n in tokens)
    expected = {
        "token-mean": total / sum(tokens),
        "sequence-mean-token-mean": sum(float(t.mean()) for t in terms.values() if len(t)) / trained,
        "sequence-mean-token-sum": total / trained,
        "constant": total / (trained * 7),
    }
    assert found["loss"] == pytest.approx(2.0 * expected[aggregate])


def test_masked_positions_reach_nothing(networks: dict[torch.dtype, Network]) -> None:
    batch = ragged()
    assert batch.old_logprob_T is not None
    assert batch.advantage_T is not None
    extra_T = torch.where(batch.mask_T, 1.0, 0.0)
    spoilt = {
        "sampling_logprob_T": torch.where(batch.mask_T, batch.sampling_logprob_T, torch.nan),
        "old_logprob_T": torch.where(batch.mask_T, batch.old_logprob_T, torch.nan),
        "advantage_T": torch.where(batch.mask_T, batch.advantage_T, torch.inf),
        "reward_T": torch.where(batch.mask_T, batch.reward_T, torch.nan),
        "extras_T": {"extra": torch.where(batch.mask_T, extra_T, torch.nan)},
    }

    def loss(compact: Batch, outputs: Outputs) -> Loss:
        found = ppo().loss(compact, outputs)
        touched = compact.extras_T["extra"] + compact.sampling_logprob_T + compact.reward_T
        return Loss([*found.terms, Term(touched * outputs.logprob_T)], {**found.metrics, "touched": touched})  # type: ignore[operator]

    objective = Objective(loss, ppo().needs)
    clean = run(networks[torch.float32], [batch.replace(extras_T={"extra": extra_T})], objective, 50)
    dirty = run(networks[torch.float32], [batch.replace(**spoilt)], objective, 50)
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])


def test_a_fully_masked_batch_has_zero_gradient(networks: dict[torch.dtype, Network]) -> None:
    batch = ragged()
    masked = batch.replace(mask_T=torch.zeros_like(batch.mask_T))
    statistics, gradient = run(networks[torch.float32], [masked], ppo("sequence-mean-token-mean"), 50)
    assert statistics == {"loss": 0.0, "tokens": 0.0}
    assert not gradient.any()


def keep_likely(narrow: bool = True) -> Objective:
    """Two passes: train only tokens whose log-prob is above the mini-batch's mean."""

    def select(batch: Batch, outputs: Outputs) -> Batch:
        assert outputs.logprob_T is not None
        assert len(outputs.logprob_T) == len(batch.token_T)
        mask_T = outputs.logprob_T > outputs.logprob_T.mean() if narrow else batch.mask_T
        return batch.replace(mask_T=mask_T, extras_T={"first": outputs.logprob_T})

    def loss(batch: Batch, outputs: Outputs) -> Loss:
        assert outputs.logprob_T is not None
        same_T = batch.extras_T["first"] == outputs.logprob_T
        return Loss([Term(outputs.logprob_T)], {"same": same_T.float(), "count": torch.ones_like(outputs.logprob_T)})

    return Objective(loss, select=select)


@pytest.mark.parametrize("budget", [20, 50, WHOLE])
def test_two_passes_see_the_same_and_count_what_is_left(networks: dict[torch.dtype, Network], budget: int) -> None:
    network, batch = networks[torch.float32], ragged().replace(signal_N=torch.ones(9, dtype=torch.bool))
    statistics, gradient = run(network, [batch], keep_likely(), budget)
    everything, _ = run(network, [batch], keep_likely(narrow=False), budget)
    assert statistics["same"] == everything["same"] == 1.0
    assert 0 < statistics["tokens"] < everything["tokens"] == batch.count().tokens
    assert statistics["loss"] > everything["loss"]  # the mean of the likelier ones
    # the same tokens, chosen beforehand
    with torch.no_grad():
        logprob_T = network.outputs(batch.select([0, 1, 2, 3, 5, 6, 7, 8]), {"logprob"}).logprob_T
    assert logprob_T is not None
    mask_T = batch.mask_T.clone()
    mask_T[batch.mask_T] = logprob_T > logprob_T.mean()
    direct = Objective(lambda _, outputs: Loss([Term(outputs.logprob_T)]))  # type: ignore[arg-type]
    other, expected = run(network, [batch.replace(mask_T=mask_T)], direct, WHOLE)
    assert statistics["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_two_passes_refuse_a_shard(networks: dict[torch.dtype, Network]) -> None:
    with pytest.raises(ValueError, match="whole mini-batch"):
        accumulate(networks[torch.float32], ragged().select([0, 1]), keep_likely(), 50)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[TorchEngine]:
    model = load_model(str(tiny_model), request.param)
    engine = TorchEngine(
        model, Config(microbatch_tokens=50, head_chunk=8, activation_checkpointing=True), total_steps=5
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_ratio_is_exactly_one_at_equal_weights(engine: TorchEngine, temperature: float, minibatches: int) -> None:
    batch = ragged().replace(
        temperature_N=torch.full((9,), temperature), minibatch_N=torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2]) % minibatches
    )
    old_logprob_T = logprobs(engine, batch)
    assert old_logprob_T.isnan().equal(~batch.mask_T)
    for part in batch.replace(old_logprob_T=old_logprob_T).minibatches():
        found = accumulate(engine.network, part, ppo(), engine.config.microbatch_tokens)
        ratio, largest = found["ratio"], found["ratio_max"]
        assert isinstance(ratio, Mean)
        assert ratio.total == ratio.weight
        assert largest.value == 1.0
