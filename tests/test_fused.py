"""Fused decoder layers: the native steps against float64 by the book, whole layers against the model's own modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from tests.engine_help import make_batch, ppo
from tests.spmd import Ranks
from tests.test_engine import random_model
from treadle.batch import Batch
from treadle.engines.torch import fused
from treadle.engines.torch.attention import TreeAttention
from treadle.engines.torch.config import Config
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.gradient import accumulate
from treadle.engines.torch.layout import lay_out
from treadle.engines.torch.mesh import make_mesh
from treadle.engines.torch.model import load_model, load_sharded
from treadle.native import library

pytestmark = pytest.mark.usefixtures("native")
CPU = torch.device("cpu")
OPS: Any = torch.ops.treadle


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def gradients(run: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What `run` gives, and the gradient of its inputs, in their type."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], tolerance: float = 2e-6) -> None:
    """Distance relative to the size of the whole."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        assert (mine.double() - other).norm() <= tolerance * other.norm() + 1e-8


# ---------------------------------------------------------------------- steps


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (65, 64), (200, 576), (5, 100)])
def test_norms(rows: int, size: int) -> None:
    x, weight, grad = noise(rows, size, scale=3), noise(size, seed=1), noise(rows, size, seed=2)
    ours = gradients(lambda x, weight: fused._Norm.apply(x, weight, 1e-5), grad, x, weight)
    theirs = gradients(lambda x, w: F.rms_norm(x, (size,), w, 1e-5), grad, x.double(), weight.double())
    close(ours, theirs)


@pytest.mark.parametrize("size", [1, 16, 37])
def test_gates_of_any_size(size: int) -> None:
    gate_up, grad = noise(9, 2 * size, scale=4), noise(9, size, seed=1)
    gate_up[0, :size], gate_up[1, :size] = -200.0, 200.0  # beyond what an exponential can hold
    gate_up[2, :size] = -88.5

    def book(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    close(gradients(fused._Gate.apply, grad, gate_up), gradients(book, grad, gate_up.double()))


@pytest.mark.parametrize("biased", [False, True])
def test_joined_products(biased: bool) -> None:
    sizes = (6, 3, 3)
    x, grad = noise(11, 5), noise(11, sum(sizes), seed=1)
    weights = [noise(n, 5, seed=2 + n) for n in sizes]
    biases = [noise(n, seed=20 + n) for n in sizes] if biased else []

    def book(x: Tensor, *p: Tensor) -> Tensor:
        return torch.cat([F.linear(x, p[i], p[3 + i] if biased else None) for i in range(3)], 1)

    ours = gradients(lambda x, *p: fused._Product.apply(x, 3, *p), grad, x, *weights, *biases)
    close(ours, gradients(book, grad, *(p.double() for p in (x, *weights, *biases))))


families = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 70), min_size=1, max_size=6)), min_size=1, max_size=4
)


@given(families, st.sampled_from([(1, 1), (2, 1), (4, 2), (9, 3)]), st.sampled_from([2, 4, 16, 24, 64, 80]))
@example([(50, [30, 17, 16, 1, 33])], (9, 3), 64)
@example([(1, [600])], (4, 2), 64)
@example([(16, [16, 0, 48]), (0, [1]), (0, [200])], (2, 1), 16)
def test_attention_over_a_layout(shape: list[tuple[int, list[int]]], heads_keys: tuple[int, int], size: int) -> None:
    """Rotation and all: the plain definition, with a copy of the trunk for every branch, in float64."""
    heads, keys = heads_keys
    random = torch.Generator().manual_seed(0)
    rows, family_of = [], []
    for number, (trunk, branches) in enumerate(shape):
        shared = torch.randint(1000, (trunk,), generator=random)
        for branch in branches:
            row = torch.cat([shared, torch.randint(1000, (branch,), generator=random)])
            if len(row):
                rows.append(row)
                family_of.append(number)
    if not rows:
        return
    layout = lay_out(rows, family_of)
    plan = TreeAttention(layout, CPU)
    qkv = noise(len(layout), (heads + 2 * keys) * size, scale=2)
    grad = noise(len(layout), heads * size, seed=1)
    angle_SD = (layout.position_S[:, None] / torch.arange(1, size // 2 + 1)).repeat(1, 2)
    cosine, sine = angle_SD.cos(), angle_SD.sin()

    def book(x: Tensor) -> Tensor:
        q, k, v = (
            p.view(len(x), -1, size).transpose(0, 1)[None] for p in x.split([heads * size, *[keys * size] * 2], 1)
        )

        def turned(p: Tensor) -> Tensor:
            return p * cosine.double() + torch.cat((-p[..., size // 2 :], p[..., : size // 2]), -1) * sine.double()

        return plan.unshared(turned(q), turned(k), v, 0.3).transpose(1, 2)[0].flatten(1)

    def ours(x: Tensor) -> Tensor:
        return fused._Attention.apply(x.clone(), heads, keys, cosine, sine, plan.segments, 0.3)  # type: ignore[return-value]

    close(gradients(ours, grad, qkv), gradients(book, grad, qkv.double()), 5e-6)


def test_attention_does_not_depend_on_threads() -> None:
    layout = lay_out(
        [torch.cat([torch.arange(20), torch.arange(100 + i, 130)]) for i in range(9)], [0, 0, 0, 1, 1, 2, 3, 3, 3]
    )
    plan, qkv, grad = TreeAttention(layout, CPU), noise(len(layout), 96), noise(len(layout), 64, seed=1)
    found = []
    for threads in (1, 2, 3):
        with torch_threads(threads):
            out, norm = OPS.tree_attend(qkv, 4, 1, plan.segments, 0.25)
            found.append((out, OPS.tree_attend_backward(grad, qkv, out, norm, 4, 1, plan.segments, 0.25)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ---------------------------------------------------------------------- whole layers

FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "one key head": (Qwen3Config, {"num_key_value_heads": 1}),
    "as many as queries": (Qwen3Config, {"num_key_value_heads": 4}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2, "pad_token_id": 0}),
}
LENGTHS = [(5, 9), (5, 3), (4, 12), (7, 1), (3, 30), (8, 8)]


def family_batch() -> Batch:
    """Rows of one group begin with the same prompt."""
    batch = make_batch(LENGTHS, vocabulary=128)
    rows = [row.clone() for row in batch.token_T.split(batch.length_N.tolist())]
    for leader, follower in ((0, 1), (2, 3), (4, 5)):
        shared = min(LENGTHS[leader][0], LENGTHS[follower][0])
        rows[follower][:shared] = rows[leader][:shared]
    return batch.replace(token_T=torch.cat(rows))


def trained(engine: TorchEngine, used: bool) -> dict[str, Tensor]:
    """The gradient of one mini-batch."""
    engine.network.fused = used
    assert engine.optimizer is not None
    engine.optimizer.adamw.zero_grad()
    accumulate(engine.network, family_batch(), ppo(), 64)
    return {n: p.grad.double().clone() for n, p in engine.network.parameters().items() if p.grad is not None}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_train_as_the_models_own(name: str, recompute: bool) -> None:
    config, changes = FUSED[name]
    settings = Config(dtype="float32", microbatch_tokens=64, head_chunk=8, activation_checkpointing=recompute)
    engine = TorchEngine(random_model(config, **changes), settings, total_steps=1)
    assert engine.network.fused
    with counted() as calls:
        ours = trained(engine, used=True)
    assert calls["attend"] >= len(engine.network.layers)
    with counted() as calls:
        theirs = trained(engine, used=False)
    assert not calls["attend"]
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        assert (ours[parameter] - gradient).norm() <= 3e-5 * gradient.norm() + 1e-9, parameter


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (GemmaConfig, {}),
        (Gemma2Config, {"attn_logit_softcapping": None}),
        (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        (MistralConfig, {"sliding_window": 4000}),
        (LlamaConfig, {"hidden_act": "gelu"}),
    ],
)
def test_other_models_keep_their_layers(config: Any, changes: dict[str, Any]) -> None:
    engine = TorchEngine(random_model(config, **changes), Config(dtype="float32"), total_steps=1)
    assert not engine.network.fused


def test_half_precision_keeps_its_layers() -> None:
    engine = TorchEngine(random_model(LlamaConfig).bfloat16(), Config(), total_steps=1)
    assert not engine.network.fused


def sharded(path: str, ways: int | None, directory: Path) -> tuple[bool, dict[str, Tensor]]:
    """Weights after two steps, on two ranks or alone."""
    library._DIRECTORY = directory  # where this test's process has it
    mesh = None if ways is None else make_mesh(2, ways)
    model = load_model(path, "float32") if mesh is None else load_sharded(path, "float32", mesh)
    settings = Config(dtype="float32", microbatch_tokens=64, head_chunk=8, learning_rate=1e-3)
    engine = TorchEngine(model, settings, total_steps=2, mesh=mesh)
    batch = family_batch()
    batch = batch.replace(counts=batch.count())
    rank = 0 if mesh is None else dist.get_rank()
    for _ in range(2):
        engine.step(batch if mesh is None else batch.select(range(3 * rank, 3 * rank + 3)), ppo())
    return engine.network.fused, {name: x.clone() for name, x in engine.export()}


@pytest.mark.parametrize("ways", [1, 2])
def test_sharded_layers_are_fused_on_every_rank(ranks: Ranks, tmp_path: Path, ways: int) -> None:
    model = random_model(LlamaConfig)
    model.save_pretrained(tmp_path / "model")
    told = ranks.run(2, sharded, str(tmp_path / "model"), ways, library._DIRECTORY)
    used, alone = sharded(str(tmp_path / "model"), None, library._DIRECTORY)
    assert used
    assert all(fused for fused, _ in told)
    for name, weight in alone.items():
        assert (told[0][1][name] - weight).norm() <= 1e-5 * weight.norm(), name


@pytest.mark.parametrize("kind", ["a hook", "another class"])
def test_an_adapter_has_its_effect(kind: str) -> None:
    """A layer that has one goes the model's own way."""
    engine = TorchEngine(random_model(LlamaConfig), Config(dtype="float32", microbatch_tokens=64), total_steps=1)
    before = trained(engine, used=True)
    mlp = engine.network.layers[0].mlp
    if kind == "a hook":
        mlp.up_proj.register_forward_hook(lambda _, args, out: out + args[0].sum(-1, keepdim=True))
    else:

        class Adapted(torch.nn.Linear):
            def forward(self, *args: Any) -> Tensor:
                return super().forward(*args) + args[0].sum(-1, keepdim=True)

        mlp.up_proj.__class__ = Adapted
    ours, theirs = trained(engine, used=True), trained(engine, used=False)
    name = "model.layers.0.mlp.down_proj.weight"
    assert (ours[name] - before[name]).norm() > 0.01 * before[name].norm()
    for parameter, gradient in theirs.items():
        assert (ours[parameter] - gradient).norm() <= 3e-5 * gradient.norm() + 1e-9, parameter


def test_without_the_library_layers_are_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_DIRECTORY", tmp_path)
    engine = TorchEngine(random_model(LlamaConfig), Config(dtype="float32"), total_steps=1)
    assert not engine.network.fused
    assert all("forward" not in vars(layer) for layer in engine.network.layers)


def test_a_fused_layer_that_is_wrong_is_found_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof at start-up is made of the model's own pass."""
    right = fused._Gate.apply
    monkeypatch.setattr(fused._Gate, "apply", lambda gate_up: right(gate_up) * 1.05)
    with pytest.raises(Exception, match="cannot be run packed: its logits are off"):
        TorchEngine(random_model(LlamaConfig), Config(dtype="float32"), total_steps=1)


# ---------------------------------------------------------------------- help


class counted:
    """How often layers attend in the fused way."""

    def __enter__(self) -> dict[str, int]:
        calls = {"attend": 0}
        self._patch = pytest.MonkeyPatch()
        right = fused._Attention.apply

        def attend(*args: Any) -> Any:
            calls["attend"] += 1
            return right(*args)

        self._patch.setattr(fused._Attention, "apply", attend)
        return calls

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


class torch_threads:
    def __init__(self, threads: int) -> None:
        self._threads, self._before = threads, torch.get_num_threads()

    def __enter__(self) -> None:
        torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)
