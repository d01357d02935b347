"""The parts of a decode step: native kernels against plain PyTorch, the own decoder against the model's modules."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

from benchmarks.decoding import main
from tests.test_embedded import Turns, ask, assert_same, build, hooked, run, scored, tokens, until, weights
from treadle.errors import ConfigError
from treadle.native import library
from treadle.rollout.embedded import plain
from treadle.rollout.embedded.cache import Row, Shelves, Slot
from treadle.rollout.embedded.choice import choose
from treadle.rollout.embedded.config import Config
from treadle.rollout.embedded.engine import EmbeddedEngine
from treadle.rollout.embedded.kernels import Kernels, Rotation
from treadle.rollout.embedded.native import NativeKernels
from treadle.rollout.embedded.plain import PlainKernels
from treadle.rollout.embedded.plans import PromptPlan, Span
from treadle.rollout.embedded.sampling import sample, uniforms
from treadle.types import Completion, SamplingParams

pytestmark = pytest.mark.usefixtures("native")
TYPES = [torch.float32, torch.bfloat16]
KERNELS = ["torch", "native"]
CPU = torch.device("cpu")


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param


def own_engine(model: Any, kernels: Any, rows: int = 64, owns: bool = True) -> EmbeddedEngine:
    return EmbeddedEngine(model, None, Config(max_sequences=rows, kernels=kernels), Turns(), owns_weights=owns)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------- kernels


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 13, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, (96, 32, 32)), (37, (5,)), (96, (17, 3)), (576, (50,))])
def test_products(dtype: torch.dtype, rows: int, inputs: int, outputs: tuple[int, ...]) -> None:
    linears = [nn.Linear(inputs, n, bias=len(outputs) > 1, dtype=dtype) for n in outputs]
    x = noise(rows, inputs)
    native = NativeKernels(dtype)
    expected = torch.cat(
        [F.linear(x, m.weight.float(), None if m.bias is None else m.bias.float()) for m in linears], 1
    )
    with torch.no_grad():
        for some in (native, PlainKernels(dtype, CPU)):
            found = some.projection(linears)(x.to(some.activation))
            close(found, expected, some.activation)


def test_native_products_read_the_weights_where_they_are() -> None:
    linear = nn.Linear(32, 8, bias=False)
    product = NativeKernels(torch.float32).projection([linear])
    x = noise(3, 32)
    with torch.no_grad():
        before = product(x)
        linear.weight.mul_(2)
        torch.testing.assert_close(product(x), 2 * before)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    """Products, norms and attention of the native kernels; plain PyTorch does not promise that."""
    native, linears = NativeKernels(torch.float32), [nn.Linear(100, 30), nn.Linear(100, 7)]
    x = noise(40, 100)
    product = native.projection(linears)
    with torch.no_grad():
        whole = product(x)
        for rows in range(1, 14):
            assert torch.equal(product(x[:rows]), whole[:rows])
    request = ask("a", tokens(30, 1), 30)
    own = own_engine(hooked(build("Llama")), "native")
    alone = run(lambda: own.generate(request))
    crowd = [ask(f"{i}", tokens(3 + 11 * i, i), 5 + 3 * i) for i in range(9)]
    together = run(lambda: asyncio.gather(*[own.generate(r) for r in (*crowd, request)]))
    assert_same(together[-1], alone)


@pytest.mark.parametrize("stream", [64, 37])
@pytest.mark.parametrize("dtype", TYPES)
def test_norms_and_gates(dtype: torch.dtype, stream: int) -> None:
    native, usual = NativeKernels(dtype), PlainKernels(dtype, CPU)
    weight, delta = noise(stream, seed=1, dtype=dtype), noise(5, stream, seed=2).to(native.activation)
    for change in (None, delta):
        ours, theirs = noise(5, stream), noise(5, stream)
        found = native.add_norm(ours, change, weight, 1e-5), usual.add_norm(theirs, change, weight, 1e-5)
        close(*found, dtype=native.activation)
        close(ours, theirs, torch.float32)
    gate_up = noise(5, 2 * stream, seed=3).to(native.activation) * 5
    close(native.silu_mul(gate_up), usual.silu_mul(gate_up.clone()), native.activation)


@pytest.mark.parametrize("size", [32, 64, 80, 128, 24])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_rotation(size: int, normed: bool, turned: bool) -> None:
    heads, groups, rows = 6, 2, 4
    norms = (noise(size, seed=1), noise(size, seed=2)) if normed else (None, None)
    angle = noise(rows, size // 2, seed=3).repeat(1, 2)
    turn = Rotation(*norms, 1e-6, *((angle.cos(), angle.sin()) if turned else (None, None)))
    ours, theirs = (noise(rows, (heads + 2 * groups) * size) for _ in range(2))
    NativeKernels(torch.float32).rotate(ours, heads, groups, turn)
    PlainKernels(torch.float32, CPU).rotate(theirs, heads, groups, turn)
    close(ours, theirs, torch.float32)


def test_the_types_that_fast_bfloat16_products_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a processor has them, activations are bfloat16 and products go to oneDNN."""
    monkeypatch.setattr(plain, "fast_products", lambda _: True)
    monkeypatch.setattr("treadle.rollout.embedded.native.fast_products", lambda _: True)
    for kernels in (NativeKernels(torch.bfloat16), PlainKernels(torch.bfloat16, CPU)):
        assert (kernels.activation, kernels.copies_weights) == (torch.bfloat16, True)
    model = build("Qwen3", head_dim=32).bfloat16()
    request = ask("a", tokens(40, 1), 20)
    for name in KERNELS:
        own = own_engine(hooked(model), name)
        completion = run(lambda own=own: own.generate(request))
        assert own.stats()["own_decoder"] == 1
        np.testing.assert_allclose(completion.logprob_C, scored(model, request, completion), atol=0.1, rtol=0)


# ---------------------------------------------------------------------- attention


class Fill:
    """Rows of some lengths in a cache of random keys and values, and what attention over them should give."""

    def __init__(self, lengths: Sequence[int], shared: Sequence[int], heads: int, groups: int, size: int) -> None:
        self.lengths, self.shared, self.scale = lengths, shared, size**-0.5
        self.q = noise(len(lengths), heads, size)
        self.k, self.v = noise(len(lengths), groups, size, seed=1), noise(len(lengths), groups, size, seed=2)
        prompt = max(shared)
        self.prompt = noise(groups, prompt, size, seed=3), noise(groups, prompt, size, seed=4)
        self.own = [
            (noise(groups, n, size, seed=5 + i), noise(groups, n, size, seed=50 + i)) for i, n in enumerate(lengths)
        ]

    def rows(self, kernels: Kernels) -> list[Row]:
        slots, prompts = Shelves(kernels.cache_dtype), Shelves(kernels.cache_dtype)
        rows = [Row(slot) for slot in slots.add([n + 1 for n in self.lengths])]
        prompt: Slot | None = None
        if max(self.shared):
            (prompt,) = prompts.add([max(self.shared)])
            prompt.write(0, 0, *self.prompt)
        for i, row in enumerate(rows):
            if kernels.shares_prompts and self.shared[i]:
                row.prompt, row.shared = prompt, self.shared[i]
            row.write(0, row.shared, *(x[:, row.shared :] for x in self.history(i)))
        return rows

    def history(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of row i: those of the prompt it shares, then its own."""
        n = self.shared[i]
        key, value = (torch.cat([p[:, :n], own[:, n:]], 1) for p, own in zip(self.prompt, self.own[i], strict=True))
        return key, value

    def expected(self) -> Tensor:
        out = []
        for i in range(len(self.lengths)):
            key, value = (
                torch.cat([x, y[i][:, None]], 1) for x, y in zip(self.history(i), (self.k, self.v), strict=True)
            )
            out.append(
                F.scaled_dot_product_attention(
                    self.q[i][None, :, None], key[None], value[None], scale=self.scale, enable_gqa=True
                ).flatten()
            )
        return torch.stack(out)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (4, 4), (8, 1), (14, 2)])
@pytest.mark.parametrize("size", [32, 64, 80, 128, 20])
@pytest.mark.parametrize("share", [False, True])
def test_attention(dtype: torch.dtype, heads: int, groups: int, size: int, share: bool, kernels: str) -> None:
    """Ragged rows, over one shelf and several, some of which begin in a prompt that they share."""
    lengths = [0, 1, 17, 63, 64, 130, 31]
    fill = Fill(lengths, [min(n, 20) if share and n > 15 else 0 for n in lengths], heads, groups, size)
    chosen: Kernels = NativeKernels(dtype) if kernels == "native" else PlainKernels(dtype, CPU)
    rows = fill.rows(chosen)
    order = sorted(range(len(rows)), key=lambda i: chosen.order(rows[i]))
    plan = chosen.decode_plan([rows[i] for i in order], [lengths[i] for i in order], CPU)
    found = plan.attend(0, fill.q[order], fill.k[order], fill.v[order], fill.scale)
    close(found, fill.expected()[order], dtype)
    for i, row in enumerate(rows):  # and the new keys and values are where the next step reads them
        key, value = row.read(0, lengths[i] + 1)
        close(key[:, -1], fill.k[i], dtype)
        close(value[:, -1], fill.v[i], dtype)


def test_a_prompt_continues_over_what_is_shared() -> None:
    fill = Fill([40], [12], 4, 2, 16)
    chosen = NativeKernels(torch.float32)
    (row,) = fill.rows(chosen)
    q, k, v = noise(3, 4, 16, seed=7), noise(3, 2, 16, seed=8), noise(3, 2, 16, seed=9)
    found = PromptPlan([Span(row, 40, 43)]).attend(0, q, k, v, 0.25)
    key, value = (torch.cat([x, y.transpose(0, 1)], 1) for x, y in zip(fill.history(0), (k, v), strict=True))
    mask = torch.ones(3, 43, dtype=torch.bool).tril(40)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], key[None], value[None], attn_mask=mask, scale=0.25, enable_gqa=True
    )
    close(found, expected[0].transpose(0, 1).flatten(1), torch.float32)


# ---------------------------------------------------------------------- the cache


def test_slots_keep_their_contents_as_they_move() -> None:
    """Through growth of a shelf, moves to larger shelves, and holes that others fill."""
    shelves = Shelves(None)
    lengths = [3, 64, 65, 10, 200, 64]
    slots = shelves.add(lengths)
    content = {
        slot: (noise(2, n, 4, seed=i), noise(2, n, 4, seed=100 + i))
        for i, (slot, n) in enumerate(zip(slots, lengths, strict=True))
    }
    for slot, pair in content.items():
        slot.write(0, 0, *pair)

    def check() -> None:
        for slot, (key, value) in content.items():
            assert slot.shelf.slots[slot.index] is slot
            found = slot.read(0, key.shape[1])
            assert torch.equal(found[0], key)
            assert torch.equal(found[1], value)

    check()
    assert [s.shelf.capacity for s in slots] == [64, 64, 128, 64, 256, 64]
    shelves.make_room({slots[1]: 65, slots[5]: 300, slots[0]: 4})
    assert [s.shelf.capacity for s in slots] == [64, 128, 128, 64, 256, 512]
    check()
    del content[slots[0]], content[slots[2]]
    shelves.retain(content.keys())
    check()
    assert sum(len(s.slots) for s in shelves.values()) == 4
    shelves.add([5] * 40)
    check()
    shelves.retain(set())
    memory = shelves.nbytes
    assert memory > 0
    shelves.add([5] * 10)
    assert shelves.nbytes == memory  # what is there is used again
    shelves.drop()
    assert shelves.nbytes == 0


def test_one_long_sequence_does_not_make_all_slots_long() -> None:
    own = own_engine(hooked(build("Llama")), "torch")
    short = [ask(f"{i}", tokens(10, i), 4) for i in range(16)]
    run(lambda: asyncio.gather(*[own.generate(r) for r in (*short, ask("long", tokens(900), 4))]))
    position = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, bytes
    assert own.stats()["cache_bytes"] <= position * (16 * 64 + 1024)


# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize("vocabulary", [5, 256, 1000, 49_152])
@pytest.mark.parametrize("dtype", TYPES)
def test_native_sampling_draws_what_the_reference_draws(vocabulary: int, dtype: torch.dtype) -> None:
    rows = 200 if vocabulary < 2000 else 40
    logits = (noise(rows, vocabulary) * 3).to(dtype)
    params = [SamplingParams(temperature=t) for t in (1.0, 0.0, 0.6, 1.7)] * (rows // 4)
    uniform = uniforms(range(rows), range(rows))
    token, logprob = NativeKernels(torch.float32).sample(logits, params, uniform)
    expected_token, expected_logprob = sample(logits.float(), params, uniform)
    assert int((token != expected_token).sum()) == 0
    torch.testing.assert_close(logprob, expected_logprob, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 17, 299])
def test_native_sampling_marks_logits_that_are_no_numbers(bad: float, at: int) -> None:
    logits = noise(3, 300)
    logits[1, at] = bad
    _, logprob = NativeKernels(torch.float32).sample(logits, [SamplingParams()] * 3, uniforms([1, 2, 3], [0, 0, 0]))
    assert logprob.isfinite().tolist() == [True, False, True]
    logits[1] = float("-inf")
    _, logprob = NativeKernels(torch.float32).sample(logits, [SamplingParams()] * 3, uniforms([1, 2, 3], [0, 0, 0]))
    assert logprob.isfinite().tolist() == [True, False, True]


def test_native_sampling_never_draws_what_has_no_weight() -> None:
    logits = torch.full((1, 600), float("-inf"))
    logits[0, 300:303] = torch.tensor([0.0, -200.0, 1.0])
    drawn = set()
    for uniform in np.linspace(1e-12, 1 - 1e-12, 50):
        token, _ = NativeKernels(torch.float32).sample(logits, [SamplingParams()], np.array([uniform]))
        drawn.add(int(token[0]))
    assert drawn == {300, 302}


def test_truncated_distributions_are_those_of_the_reference() -> None:
    params = [SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams()]
    logits, uniform = noise(3, 1000), uniforms([1, 2, 3], [0, 0, 0])
    for ours, theirs in zip(
        NativeKernels(torch.float32).sample(logits, params, uniform), sample(logits, params, uniform), strict=True
    ):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------------- the own decoder

FAMILY: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"head_dim": 24},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "SmolLM3": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
}
LONG_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def crowd() -> list[Any]:
    """Shared prompts, single ones, more requests than rows, lengths that cross shelves."""
    group = [ask(f"g.{i}", tokens(50, 3), 30 + i, prefix="g") for i in range(5)]
    return [*group, ask("one", tokens(1, 1), 20, temperature=0.7), ask("long", tokens(200, 2), 70)]


@pytest.mark.parametrize("name", FAMILY)
def test_the_own_decoder_gives_the_models_logprobs(name: str, kernels: str) -> None:
    """At most 1e-5 nats off in float32, over a publish that recomputes everything."""
    model = build(name, **FAMILY[name])
    own = own_engine(hooked(model), kernels, rows=4)
    requests = crowd()

    async def main() -> list[Completion]:
        tasks = [asyncio.create_task(own.generate(r)) for r in requests]
        await until(lambda: own.stats()["decode_steps"] >= 5)
        await own.load(weights(model), 1, "resume")
        return await asyncio.gather(*tasks)

    for request, completion in zip(requests, run(main), strict=True):
        np.testing.assert_allclose(completion.logprob_C, scored(model, request, completion), atol=1e-5, rtol=0)
    stats = own.stats()
    assert (stats["own_decoder"], stats["native_kernels"]) == (1, int(kernels == "native"))


def test_scaled_rotations_are_the_models(kernels: str) -> None:
    model = build("Llama", rope_parameters=LONG_ROPE)
    own = own_engine(hooked(model), kernels)
    request = ask("a", tokens(300), 20)
    completion = run(lambda: own.generate(request))
    assert own.stats()["own_decoder"] == 1
    np.testing.assert_allclose(completion.logprob_C, scored(model, request, completion), atol=1e-5, rtol=0)


def test_bfloat16_models(kernels: str) -> None:
    model = build("Llama").bfloat16()
    exact = build("Llama").bfloat16().float()
    own = own_engine(hooked(model), kernels)
    requests = crowd()
    for request, completion in zip(
        requests, run(lambda: asyncio.gather(*[own.generate(r) for r in requests])), strict=True
    ):
        np.testing.assert_allclose(completion.logprob_C, scored(exact, request, completion), atol=0.1, rtol=0)


@pytest.mark.parametrize("shared", [False, True])
def test_packed_weights_never_outlive_a_load(kernels: str, shared: bool) -> None:
    """By copy, and in place by a trainer that shares the model: what was made of the weights is made again."""
    first, second = build("Qwen2"), build("Qwen2", seed=1)
    model = hooked(first)
    own = own_engine(model, kernels, owns=not shared)
    request = ask("a", tokens(9), 12, prefix="p")
    before = run(lambda: own.generate(request))
    np.testing.assert_allclose(before.logprob_C, scored(first, request, before), atol=1e-5, rtol=0)
    if shared:
        model.load_state_dict(second.state_dict())
        run(lambda: own.load(None, 1, "resume"))
    else:
        run(lambda: own.load(weights(second), 1, "resume"))
    after = run(lambda: own.generate(request))
    np.testing.assert_allclose(after.logprob_C, scored(second, request, after), atol=1e-5, rtol=0)
    assert set(after.version_C) == {1}


@pytest.mark.parametrize("name", ["Granite", "Qwen3Moe"])
@pytest.mark.parametrize("keys", [1, 2])
def test_other_models_go_through_their_own_modules(name: str, keys: int, kernels: str) -> None:
    model = build(name, num_key_value_heads=keys)
    own = own_engine(hooked(model), kernels)
    requests = crowd()
    for request, completion in zip(
        requests, run(lambda: asyncio.gather(*[own.generate(r) for r in requests])), strict=True
    ):
        np.testing.assert_allclose(completion.logprob_C, scored(model, request, completion), atol=1e-5, rtol=0)
    assert own.stats()["own_decoder"] == 0


def test_a_model_that_computes_something_else_is_found_out(kernels: str, caplog: pytest.LogCaptureFixture) -> None:
    """A Llama whose gate is another function: the proof fails, it is said, and its own modules decode."""
    model = build("Llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()
    own = own_engine(hooked(model), kernels)
    request = ask("a", tokens(9), 12)
    completion = run(lambda: own.generate(request))
    np.testing.assert_allclose(completion.logprob_C, scored(model, request, completion), atol=1e-5, rtol=0)
    assert own.stats()["own_decoder"] == 0
    assert "through its own modules: the engine's pass is off by" in caplog.text


def test_damaged_weights_do_not_spoil_the_proof(kernels: str) -> None:
    """An engine that began with weights that are no numbers uses its own decoder once they are mended."""
    model, sound = hooked(build("Llama")), build("Llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    own = own_engine(model, kernels)
    request = ask("a", tokens(9), 12)
    with pytest.raises(Exception, match="not finite numbers"):
        run(lambda: own.generate(request))
    run(lambda: own.load(weights(sound), 1, "resume"))
    completion = run(lambda: own.generate(request))
    np.testing.assert_allclose(completion.logprob_C, scored(sound, request, completion), atol=1e-5, rtol=0)
    assert own.stats()["own_decoder"] == 1


# ---------------------------------------------------------------------- stats, choice, build


def test_stats_count_what_was_done(kernels: str) -> None:
    model = build("Llama")
    own = own_engine(hooked(model), kernels)
    requests = [ask(f"g.{i}", tokens(40), 5, prefix="g") for i in range(8)]
    run(lambda: asyncio.gather(*[own.generate(r) for r in requests]))
    stats = own.stats()
    head = 2 * model.lm_head.weight.numel()
    body = 2 * sum(p.numel() for n, p in model.named_parameters() if "layers" in n and p.dim() == 2)
    assert (stats["decode_steps"], stats["decode_tokens"], stats["tokens"]) == (4, 32, 40)
    assert (stats["prompt_passes"], stats["prompt_tokens"], stats["prefix_hits"]) == (1, 40, 7)
    assert stats["decode_flops"] == 32 * (body + head)
    assert stats["prompt_flops"] == 40 * body + head
    assert stats["decode_seconds"] > 0 < stats["prompt_seconds"]
    assert all(isinstance(value, int | float) for value in stats.values())


def test_native_kernels_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = build("Llama")
    with pytest.raises(ConfigError, match=r"rollout\.kernels=native needs a float32 or bfloat16 model on a CPU"):
        choose("native", model.half())
    model.float()
    monkeypatch.setattr(library, "_DIRECTORY", tmp_path)
    monkeypatch.setattr(library, "load", functools.cache(library.load.__wrapped__))
    with pytest.raises(ConfigError, match="run `make native`, or use rollout"):
        choose("native", model)
    assert choose("auto", model).name == "torch"
    monkeypatch.setattr(library.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"need a C\+\+ compiler"):
        library.build()
    broken = tmp_path / "kernels.cpp"
    broken.write_text("int main( {")
    monkeypatch.undo()
    monkeypatch.setattr(library, "_DIRECTORY", tmp_path)
    monkeypatch.setattr(library, "_SOURCE", broken)
    with pytest.raises(ConfigError, match=r"do not compile with .*: .*error"):
        library.build()
    assert list(tmp_path.glob("*.so*")) == []


# ---------------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("options", [["--rows", "9"], ["--rows", "1", "--dtype", "bfloat16"]])
def test_the_benchmark_compares(tiny_model: Path, options: list[str]) -> None:
    done = CliRunner().invoke(main, [str(tiny_model), "--new", "4", "--rounds", "1", *options], catch_exceptions=False)
    assert done.exit_code == 0
    for name in ("treadle, torch kernels", "generate", "products"):
        (line,) = [line for line in done.output.splitlines() if line.startswith(name)]
        assert float(line.removeprefix(name).split()[0]) > 0
