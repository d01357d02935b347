"""The torch engine with its weights spread over ranks: what they find together is what one process finds."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Lfm2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests import reward_models
from tests.engine_help import ppo, value_regression
from tests.spmd import Failed, Ranks
from tests.test_invariance import keep_likely, ragged
from treadle.batch import Batch
from treadle.data.packing import plan
from treadle.engines.torch.config import Config
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.gradient import accumulate
from treadle.engines.torch.mesh import make_mesh, together
from treadle.engines.torch.model import has_score, load_model, load_sharded
from treadle.engines.torch.network import Network
from treadle.engines.torch.sharding import check, local, units
from treadle.errors import ConfigError, ModelError, TrainingError
from treadle.handles import Objective, Quantity
from treadle.types import Statistics, merge

WORLDS = [(2, 2), (4, 4), (4, 2)]  # ranks, and how many share one copy of the weights
ROWS = {  # of `ragged()`, by rank: unequal numbers of micro-batches, and none
    1: [[0, 1, 2, 3, 4, 5, 6, 7, 8]],
    2: [[0, 1, 2, 3, 4, 5, 7], [6, 8]],
    4: [[0, 1, 2, 5, 3], [], [4, 6], [7, 8]],
}
SMALL: dict[str, Any] = {**reward_models.SMALL, "vocab_size": 256, "pad_token_id": 0}
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"vocab_size": 257}),  # with biases, and rows that cannot be cut evenly
    "qwen3": (Qwen3Config, {}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}


@pytest.fixture(scope="session")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of small random models, untimid ones."""
    home = tmp_path_factory.mktemp("architectures")
    for name, (config, changes) in ARCHITECTURES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(**{**SMALL, **changes}))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4.0 if p.ndim > 1 else 1.0)
        model.save_pretrained(home / name)
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_config(Qwen2Config(**{**SMALL, "num_labels": 1}))
    scorer.save_pretrained(home / "reward")
    return {name: str(home / name) for name in (*ARCHITECTURES, "reward")}


def engine_of(
    path: str, shard: int | None = None, head: Any = "lm", trainable: bool = True, **keys: Any
) -> TorchEngine:
    """Spread over the process group, if there is one."""
    keys = {"dtype": "float32", "learning_rate": 1e-4, "microbatch_tokens": 24, "head_chunk": 4, **keys}
    config, scores = Config(**keys, shard_ranks=shard), has_score(path)
    if not dist.is_initialized():
        model = load_model(path, config.dtype, scores)
        return TorchEngine(model, config, total_steps=10, head=head, trainable=trainable)
    mesh = make_mesh(dist.get_world_size(), shard)
    model = load_sharded(path, config.dtype, mesh, scores)
    return TorchEngine(model, config, total_steps=10, head=head, trainable=trainable, mesh=mesh)


def rows_here(batch: Batch) -> Batch:
    return batch.select(ROWS[dist.get_world_size()][dist.get_rank()] if dist.is_initialized() else ROWS[1][0])


def objective_of(head: str) -> Objective:
    return ppo() if head == "lm" else value_regression()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(engine: TorchEngine) -> dict[str, Tensor]:
    return {name: full(p) for name, p in engine.network.parameters().items()}


def learn(engine: TorchEngine, steps: int, objective: Objective | None = None) -> list[Statistics]:
    chosen = objective or objective_of(engine.network.head)
    return [engine.step(rows_here(ragged()), chosen) for _ in range(steps)]


def together_of(told: Sequence[Sequence[Statistics]]) -> list[dict[str, float]]:
    """Numbers of each step, the ranks' merged; but for what says how the batch was cut."""
    merged = [merge(*ranks) for ranks in zip(*told, strict=True)]
    return [{name: s.value for name, s in step.items() if name != "useful_tokens"} for step in merged]


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# ---------------------------------------------------------------------- training


def train(path: str, shard: int | None, head: Any, keys: dict[str, Any]) -> Any:
    engine = engine_of(path, shard, head, **keys)
    if engine.network.value_head is not None:
        with torch.no_grad():
            engine.network.value_head.weight.fill_(0.5)
    accumulate(engine.network, rows_here(ragged()), objective_of(head), 24)
    assert engine.optimizer is not None
    gradient = {n: full(p.grad) for n, p in engine.network.parameters().items() if p.grad is not None}
    for p in (*engine.network.parameters().values(), *engine.optimizer.masters.values()):
        p.grad = None
    return gradient, learn(engine, 3), weights_of(engine)


@pytest.mark.parametrize("world", [WORLDS[0], *(pytest.param(world, marks=pytest.mark.slow) for world in WORLDS[1:])])
@pytest.mark.parametrize(
    ("name", "head", "keys"),
    [
        ("llama", "lm", {}),
        ("llama", "value", {}),
        ("qwen2", "lm", {"activation_checkpointing": True}),
        ("qwen2", "value", {"max_grad_norm": 0.01}),
        ("qwen3", "lm", {"max_grad_norm": 0.01, "weight_decay": 0.1}),
        ("qwen3_moe", "lm", {"microbatch_tokens": 2048}),
        ("reward", "value", {}),  # a critic that begins as a reward model
        ("llama", "lm", {"cpu_offload": True, "activation_checkpointing": True}),
    ],
)
def test_ranks_learn_what_one_process_learns(
    ranks: Ranks, architectures: dict[str, str], world: tuple[int, int], name: str, head: str, keys: dict[str, Any]
) -> None:
    alone = train(architectures[name], None, head, {k: v for k, v in keys.items() if k != "cpu_offload"})
    told = ranks.run(world[0], train, architectures[name], world[1], head, keys)
    assert together_of([statistics for _, statistics, _ in told]) == [
        pytest.approx(step, rel=1e-5, abs=1e-5) for step in together_of([alone[1]])
    ]
    for gradient, _, weights in told:
        assert gradient.keys() == alone[0].keys()
        whole = [torch.cat([g.flatten() for g in x.values()]) for x in (gradient, alone[0])]
        assert (whole[0] - whole[1]).norm() <= 1e-5 * whole[1].norm()
        assert_close(weights, alone[2])
    assert all(torch.equal(told[0][2][n], weights[n]) for _, _, weights in told for n in weights)


def needs_of(head: str) -> set[Quantity]:
    return {"value"} if head == "value" else {"logprob", "entropy"}


def observe(path: str, shard: int | None, head: Any, dtype: str) -> tuple[dict[str, Tensor], bool, int]:
    """What a frozen model finds, whether a second pass finds the same bits, and the bytes that this rank holds."""
    engine = engine_of(path, shard, head, trainable=False, dtype=dtype)
    for p in engine.network.value_head.parameters() if engine.network.value_head is not None else ():
        with torch.no_grad():
            p.add_(0.5)
    batch, needs = rows_here(ragged()), needs_of(head)
    found = dict(engine.quantities(batch, needs))
    same = all(torch.equal(x[batch.mask_T], found[n][batch.mask_T]) for n, x in engine.quantities(batch, needs).items())
    if head == "value":
        found["state_T"], found["bootstrap_N"] = engine.values(batch)
    held = sum(local(p).nbytes for p in engine.network.root.parameters())
    return found, same, held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_frozen_model_finds_the_same(ranks: Ranks, architectures: dict[str, str], head: str, dtype: str) -> None:
    path = architectures["qwen2"]
    batch = ragged().replace(extras_T={"at": torch.arange(len(ragged().token_T))})
    alone, _, _ = observe(path, None, head, dtype)
    size = sum(p.nbytes for p in load_model(path, dtype).parameters())
    tolerance = 1e-5 if dtype == "float32" else 0.1
    for count, shard in WORLDS:
        for rows, (found, same, held) in zip(
            ROWS[count], ranks.run(count, observe, path, shard, head, dtype), strict=True
        ):
            at_T = batch.select(rows).extras_T["at"]
            for name, whole in alone.items():
                expected = whole[rows] if name.endswith("_N") else whole[at_T]
                torch.testing.assert_close(found[name], expected, equal_nan=True, atol=tolerance, rtol=tolerance)
            assert same
            assert held < 1.1 * size / shard


def scored(path: str, shard: int | None) -> tuple[Tensor, int]:
    """What a reward model says of this rank's rows, and the bytes that it holds there."""
    engine = engine_of(path, shard, "value", trainable=False)
    return engine.scores(rows_here(ragged())), sum(local(p).nbytes for p in engine.network.root.parameters())


def test_a_reward_model_says_the_same_to_the_last_bit(ranks: Ranks, architectures: dict[str, str]) -> None:
    """Ranks with more rows than others, and one with none."""
    alone_N, size = scored(architectures["reward"], None)
    assert alone_N.std() > 0.01
    for count, shard in WORLDS:
        told = ranks.run(count, scored, architectures["reward"], shard)
        for rows, (score_N, held) in zip(ROWS[count], told, strict=True):
            assert torch.equal(score_N, alone_N[rows])
            assert held < 1.1 * size / shard


def ratios(path: str, dtype: str) -> list[float]:
    """Of a pass and the step that follows it, at the same weights: the largest and the smallest on this rank."""
    engine, batch, found = engine_of(path, dtype=dtype), rows_here(ragged()), []
    for _ in range(2):
        old_logprob_T = engine.quantities(batch, {"logprob"})["logprob_T"]
        step = engine.step(batch.replace(old_logprob_T=old_logprob_T), ppo())
        found += [step["ratio"].value, step["ratio_max"].value] if "ratio" in step else []
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_exactly_one_before_the_update(ranks: Ranks, architectures: dict[str, str], dtype: str) -> None:
    """So a pass sees the weights that the step before has made, and a step those that the pass has seen."""
    told = ranks.run(2, ratios, architectures["llama"], dtype)
    assert told[0] == [1.0] * 4


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("world", [(1, 1), *WORLDS])
def test_float32_masters_learn_under_bfloat16(
    ranks: Ranks, architectures: dict[str, str], world: tuple[int, int], head: str
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have: sums are cut by threads
    try:
        alone = train(architectures["qwen2"], None, head, {"dtype": "bfloat16"})
    finally:
        torch.set_num_threads(threads)
    told = ranks.run(world[0], train, architectures["qwen2"], world[1], head, {"dtype": "bfloat16"})
    for ours, theirs in zip(together_of([s for _, s, _ in told]), together_of([alone[1]]), strict=True):
        assert ours == pytest.approx(theirs, rel=0.05, abs=0.02)
    gradient, _, weights = told[0]
    assert {x.dtype for x in (*gradient.values(), *weights.values())} == {torch.float32}
    assert not any(torch.equal(w, w.bfloat16().float()) for n, w in weights.items() if "mlp" in n)
    assert not any(torch.equal(g, g.bfloat16().float()) for n, g in gradient.items() if "mlp" in n)
    assert_close({n: w.to(alone[2][n].dtype) for n, w in weights.items()}, alone[2], 1e-2)
    if world[0] == 1:  # the very same arithmetic
        assert together_of([told[0][1]]) == together_of([alone[1]])


def two_pass(path: str, shard: int | None, narrow: bool) -> Any:
    engine = engine_of(path, shard)
    batch = ragged().replace(signal_N=torch.ones(9, dtype=torch.bool))
    return [engine.step(rows_here(batch), keep_likely(narrow)) for _ in range(2)], weights_of(engine)


@pytest.mark.parametrize("narrow", [True, False])
def test_two_passes_select_from_the_whole_minibatch(ranks: Ranks, architectures: dict[str, str], narrow: bool) -> None:
    alone = two_pass(architectures["llama"], None, narrow)
    for count, shard in WORLDS:
        told = ranks.run(count, two_pass, architectures["llama"], shard, narrow)
        for ours, theirs in zip(together_of([s for s, _ in told]), together_of([alone[0]]), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
            assert ours["same"] == 1.0
        assert_close(told[0][1], alone[1])


def nothing(path: str, shard: int | None) -> Any:
    """Steps with nothing to train, and with what is not finite on one rank only."""
    engine = engine_of(path, shard, max_skipped_steps=2)
    before, batch = weights_of(engine), rows_here(ragged())
    assert batch.advantage_T is not None
    dark = engine.step(batch.replace(signal_N=torch.zeros_like(batch.signal_N)), ppo())
    still = weights_of(engine)
    spoilt = batch.replace(advantage_T=batch.advantage_T * (torch.inf if dist.get_rank() == 0 else 1.0))
    skipped = engine.step(spoilt, ppo())
    try:
        engine.step(spoilt, ppo())
    except TrainingError as error:
        raised = str(error)
    else:
        raised = ""
    same = [all(torch.equal(w, before[n]) for n, w in x.items()) for x in (still, weights_of(engine))]
    return dark["grad_norm"].value, skipped["updated"].value, raised, same


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_agree_on_what_is_not_finite(
    ranks: Ranks, architectures: dict[str, str], world: tuple[int, int]
) -> None:
    for norm, updated, raised, same in ranks.run(world[0], nothing, architectures["llama"], world[1]):
        assert norm == updated == 0
        assert "max_skipped_steps" in raised
        assert same == [True, True]


# ---------------------------------------------------------------------- communication


class Count(TorchDispatchMode):
    """Collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def collectives(path: str, shard: int | None) -> Any:
    """Of a step and of a pass without gradient, in many micro-batches and in one."""
    engine, found = engine_of(path, shard), []
    for budget in (24, 10_000):
        engine.config = engine.config.model_copy(update={"microbatch_tokens": budget})
        for call in (lambda: engine.step(rows_here(ragged()), ppo()), lambda: observed(engine)):
            with Count() as count:
                call()
            found.append(count.seen)
    return found, len(units(engine.network.root)), len(plan(rows_here(ragged()), 24))


def observed(engine: TorchEngine) -> Any:
    return engine.quantities(rows_here(ragged()), {"logprob"})


def test_gradients_travel_once_a_step(ranks: Ranks, architectures: dict[str, str]) -> None:
    told = ranks.run(4, collectives, architectures["llama"], 2)
    passes = [number for *_, number in told]
    assert max(passes) > 2
    assert min(passes) == 0
    for (many, many_seen, one, one_seen), parts, _ in told:
        assert parts == 3  # two layers and the rest
        assert many["_reduce_scatter_base_"] == one["_reduce_scatter_base_"] == parts
        # over replicas: a part's gradient each; else the number of passes, and the norm
        assert many["allreduce_"] == one["allreduce_"] == parts + 2
        # a layer's weights forward and backward, the rest's once
        assert many["_allgather_base_"] == max(passes) * (2 * 2 + 1)
        assert one["_allgather_base_"] == 2 * 2 + 1
        assert not many_seen["_reduce_scatter_base_"]
        # without gradient the rest stays whole from pass to pass; rows with and without signal have one each, at least
        assert many_seen["_allgather_base_"] > one_seen["_allgather_base_"] == 2 * 2 + 1


def test_ranks_that_cannot_share_are_refused(ranks: Ranks, architectures: dict[str, str]) -> None:
    for shard in (3, 8):
        with pytest.raises(ConfigError, match=rf"trainer\.shard_ranks={shard} does not divide the 4 .* 1, 2, 4, or"):
            make_mesh(4, shard)
    for wrong, config in (("shard_ranks=2", Config(shard_ranks=2)), ("cpu_offload=true", Config(cpu_offload=True))):
        with pytest.raises(ConfigError, match=rf"trainer\.{wrong} needs sharded weights"):
            TorchEngine(load_model(architectures["llama"], "float32"), config, total_steps=1)
    for shard, shape in ((None, (1, 4)), (2, (2, 2)), (1, (4, 1))):
        assert ranks.run(4, lambda n: tuple(make_mesh(4, n).shape), shard) == [shape] * 4


def wrongly_wrapped(path: str, how: str) -> str:
    mesh, network = make_mesh(2, 2), Network(load_model(path, "float32"), "lm", 4, False)
    over = make_mesh(2, 1) if how == "another mesh" else mesh
    for layer in network.layers if how != "nothing" else ():
        if how != "a layer is missing" or layer is not network.layers[0]:
            fully_shard(layer, mesh=over)
    if how != "nothing":
        fully_shard(network.root, mesh=over)
    if how == "a part is whole":
        with torch.no_grad():
            p = network.lm_head.weight
            p._local_tensor = p.full_tensor()
    try:
        check(network, mesh)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("nothing", "this rank has not sharded"),
        ("another mesh", "this rank has not sharded"),
        ("a part is whole", r"'model.model.embed_tokens.weight' .* has \(256, 64\), not \(128, 64\)"),
        ("a layer is missing", "has 2 sharded units, not 3"),
        ("rightly", "^$"),
    ],
)
def test_what_is_wrongly_wrapped_is_found_out(
    ranks: Ranks, architectures: dict[str, str], how: str, match: str
) -> None:
    for said in ranks.run(2, wrongly_wrapped, architectures["llama"], how):
        assert re.search(match, said)


def test_an_architecture_that_cannot_run_packed_is_refused_by_all(ranks: Ranks, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))
    model.save_pretrained(tmp_path)

    def refused(path: str) -> None:
        with pytest.raises(ModelError, match=r"\['conv'\] layers, which cannot run packed"):
            engine_of(path)

    ranks.run(2, refused, str(tmp_path))


def test_the_first_error_of_any_rank_is_raised_by_all(ranks: Ranks) -> None:
    def work() -> int:
        if dist.get_rank() == 1:
            raise ModelError("broken here")
        return dist.get_rank()

    def each() -> str:
        with pytest.raises(ModelError, match="broken here") as caught:
            together(work, make_mesh(2, 2))
        return str(caught.value)

    assert ranks.run(2, each) == ["broken here (on rank 1)", "broken here"]


# ---------------------------------------------------------------------- the ranks of these tests


@pytest.mark.slow
def test_ranks_that_hang_fail_or_die_end_the_test_with_what_they_said() -> None:
    mine = Ranks(2)

    def work(how: str) -> int:
        if dist.get_rank() == 1:
            if how == "raises":
                raise ValueError("said by rank 1")
            if how == "dies":
                os._exit(3)
        if how != "works":
            dist.barrier()
        return dist.get_rank()

    try:
        for how, match in (("raises", "said by rank 1"), ("dies", "rank 1:\ndied"), ("hangs", "did not end in 2 s")):
            with pytest.raises(Failed, match=match):
                mine.run(
                    2, work if how != "hangs" else (lambda: time.sleep(30)), *([how] * (how != "hangs")), timeout=2
                )
            assert mine.run(2, work, "works") == [0, 1]
    finally:
        mine.close()
