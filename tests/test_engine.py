"""The torch engine against plain Hugging Face passes, its optimizer, its checkpoints, and models it must refuse."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)

from tests.engine_help import logprobs, make_batch, ppo, value_regression
from treadle.attention import install
from treadle.batch import Batch
from treadle.engines.torch import model as models
from treadle.engines.torch.config import Config
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.gradient import accumulate, scan
from treadle.engines.torch.model import checkpoint_tensors, load_model, load_tokenizer, places
from treadle.engines.torch.writing import write_model
from treadle.errors import ModelError, RunError, TrainingError
from treadle.handles import Loss, Objective, Outputs, Term

LENGTHS = [(3, 5), (7, 2), (2, 9), (11, 4)]
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def engine_of(path: Path, dtype: str = "float32", head: Any = "lm", trainable: bool = True, **keys: Any) -> TorchEngine:
    keys = {"dtype": dtype, "learning_rate": 1e-2, "microbatch_tokens": 24, "head_chunk": 4, **keys}
    return TorchEngine(load_model(str(path), dtype), Config(**keys), total_steps=10, head=head, trainable=trainable)


def random_model(config: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**{**SMALL, **changes}))
    with torch.no_grad():  # untrained models are so timid that their faults hide in rounding
        for p in model.parameters():
            p.mul_(4.0 if p.ndim > 1 else 1.0)
    install(model)
    return model.eval()


def plain_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Each trajectory alone through the whole model with transformers' own attention; [T], NaN where not trained."""
    model.set_attn_implementation("sdpa")
    rows = []
    with torch.no_grad():
        for token_S in batch.token_T.split(batch.length_N.tolist()):
            logp_SV = (model(input_ids=token_S[None], use_cache=False).logits[0].double() / temperature).log_softmax(-1)
            chosen_S = logp_SV[:-1].gather(1, token_S[1:, None])[:, 0]
            rows.append(torch.cat([chosen_S.new_full((1,), torch.nan), chosen_S]))
    install(model)
    return torch.cat(rows).masked_fill(~batch.mask_T, torch.nan)


def snapshot(engine: TorchEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.network.parameters().items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in ours.items())


# ---------------------------------------------------------------------- passes


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_a_plain_forward_pass(tiny_model: Path, temperature: float) -> None:
    engine = engine_of(tiny_model)
    batch = make_batch(LENGTHS, temperature=temperature)
    expected_T = plain_logprobs(engine.model, batch, temperature).float()
    logprob_T = logprobs(engine, batch)
    assert logprob_T.dtype == torch.float32
    torch.testing.assert_close(logprob_T, expected_T, atol=1e-5, rtol=1e-5, equal_nan=True)


ARCHITECTURES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "gemma": (GemmaConfig, {}),
    "mistral": (MistralConfig, {}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gemma2": (Gemma2Config, {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0}),
    "cohere": (CohereConfig, {"logit_scale": 0.3}),
    "granite": (GraniteConfig, {"logits_scaling": 4.0}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("recompute", [False, True])
def test_architectures_agree_with_themselves_packed(name: str, recompute: bool) -> None:
    config, changes = ARCHITECTURES[name]
    model = random_model(config, **changes)
    batch = make_batch(LENGTHS, vocabulary=128)
    expected_T = plain_logprobs(model, batch).float()
    settings = Config(dtype="float32", microbatch_tokens=24, head_chunk=4, activation_checkpointing=recompute)
    engine = TorchEngine(model, settings, total_steps=1)
    torch.testing.assert_close(logprobs(engine, batch), expected_T, atol=2e-5, rtol=2e-5, equal_nan=True)
    before = snapshot(engine)
    engine.step(batch, ppo())
    assert not same(snapshot(engine), before)
    assert not any(m.training for m in model.modules())


@pytest.mark.parametrize("head", ["lm", "value"])
def test_recomputing_activations_gives_the_same_gradient(tiny_model: Path, head: Any) -> None:
    batch, objective = make_batch(LENGTHS), ppo() if head == "lm" else value_regression()
    gradients = []
    for recompute in (False, True):
        engine = engine_of(tiny_model, head=head, activation_checkpointing=recompute)
        if engine.network.value_head is not None:
            torch.nn.init.ones_(engine.network.value_head.weight)
        modes: set[bool] = set()
        for layer in engine.model.model.layers:
            layer.register_forward_hook(lambda module, *_, modes=modes: modes.add(module.training))
        accumulate(engine.network, batch, objective, 24)
        assert modes == {False}  # a layer in training mode might drop activations
        gradients.append({n: p.grad for n, p in engine.network.parameters().items() if p.grad is not None})
    assert same(*gradients)


def test_end_of_sequence_is_trained_though_it_pads(tiny_model: Path) -> None:
    engine = engine_of(tiny_model)
    batch = make_batch(LENGTHS)
    end = engine.model.config.eos_token_id
    engine.model.config.pad_token_id = end
    token_T = batch.token_T.clone()
    token_T[batch.offset_N1[1:] - 1] = end
    batch = batch.replace(token_T=token_T)
    logprob_T = logprobs(engine, batch)
    assert logprob_T[batch.offset_N1[1:] - 1].isfinite().all()
    torch.testing.assert_close(
        logprob_T, plain_logprobs(engine.model, batch).float(), atol=1e-5, rtol=1e-5, equal_nan=True
    )


def test_values_belong_to_the_state_before_the_token(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, head="value", trainable=False)
    assert engine.network.value_head is not None
    batch = make_batch(LENGTHS)
    value_T, bootstrap_N = engine.values(batch)
    assert not value_T[batch.mask_T].any()  # the head starts at zero
    torch.nn.init.normal_(engine.network.value_head.weight, generator=torch.Generator().manual_seed(0))
    value_T, bootstrap_N = engine.values(batch)
    engine.model.set_attn_implementation("sdpa")
    for row, token_S in enumerate(batch.token_T.split(batch.length_N.tolist())):
        with torch.no_grad():
            hidden_SE = engine.model.model(input_ids=token_S[None], use_cache=False).last_hidden_state[0]
        state_S = hidden_SE @ engine.network.value_head.weight[0].detach()
        start, end = batch.offset_N1[row : row + 2].tolist()
        at = slice(start + LENGTHS[row][0], end)
        torch.testing.assert_close(value_T[at], state_S[LENGTHS[row][0] - 1 : -1], atol=1e-5, rtol=1e-5)
        expected = state_S[-1] if batch.truncated_N[row] else torch.tensor(0.0)
        torch.testing.assert_close(bootstrap_N[row], expected, atol=1e-5, rtol=1e-5)
    assert value_T.isnan().equal(~batch.mask_T)


def test_a_critic_learns_and_leaves_the_language_head_alone(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, head="value")
    batch = make_batch(LENGTHS)
    losses = [engine.step(batch, value_regression())["loss"].value for _ in range(25)]
    assert losses[-1] < 0.5 * losses[0]
    assert {n for n in engine.network.parameters() if "head" in n} == {"value_head.weight", "value_head.bias"}


def test_objectives_get_only_what_the_head_gives(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="lm head"):
        engine_of(tiny_model).step(make_batch(LENGTHS), value_regression())
    with pytest.raises(ValueError, match="value head"):
        engine_of(tiny_model, head="value").step(make_batch(LENGTHS), ppo())


def test_what_cannot_be_trained_is_refused(tiny_model: Path) -> None:
    engine, batch = engine_of(tiny_model), make_batch(LENGTHS)
    with pytest.raises(ValueError, match="temperature 0"):
        logprobs(engine, batch.replace(temperature_N=torch.zeros(4)))
    with pytest.raises(ValueError, match="nothing before it"):
        logprobs(engine, batch.replace(mask_T=torch.ones_like(batch.mask_T)))
    with pytest.raises(ValueError, match="not trainable"):
        engine_of(tiny_model, trainable=False).step(batch, ppo())


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda x: None, "a NoneType; allowed: a Loss"),
        (lambda x: Loss([]), "a Loss without terms"),
        (lambda x: Loss([x.mean()]), r"term 0 has shape \(\); allowed: .* each of the 7 trained tokens"),
        (lambda x: Loss([Term(x), Term(x[:-1])]), r"term 1 has shape \(6,\)"),
        (lambda x: Loss([Term(0.5)]), "term 0 has type float"),  # type: ignore[arg-type]
        (lambda x: Loss([Term(x)], metrics={"kl": x.mean()}), r"metric kl has shape \(\)"),
        (lambda x: Loss([Term(x)], peaks={"ratio": x[None]}), r"peak ratio has shape \(1, 7\)"),
        (lambda x: Loss([Term(x.detach())]), "a Loss without gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_names_its_function(tiny_model: Path, made: Any, match: str) -> None:
    def my_loss(_: Batch, outputs: Outputs) -> Loss:
        return made(outputs.logprob_T)

    with pytest.raises(TrainingError, match=rf"my_loss returned .*{match}"):
        engine_of(tiny_model).step(make_batch([(3, 5), (2, 2)]), Objective(my_loss))


# ---------------------------------------------------------------------- optimizer


def test_step_is_that_of_plain_adamw(tiny_model: Path) -> None:
    keys: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.8, 0.9), "epsilon": 1e-6, "max_grad_norm": 0.5}
    engine, other = engine_of(tiny_model, **keys), engine_of(tiny_model)
    batch = make_batch(LENGTHS)
    named = other.network.parameters()
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for _ in range(2):
        found = engine.step(batch, ppo())
        accumulate(other.network, batch, ppo(), 24)
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
        plain.step()
        plain.zero_grad()
        assert found["grad_norm"].value == pytest.approx(float(norm))
    for name, p in engine.network.parameters().items():
        torch.testing.assert_close(p, named[name], atol=1e-6, rtol=1e-5)


def test_masters_learn_what_bfloat16_cannot_hold(tiny_model: Path) -> None:
    """Steps far below the spacing of bfloat16 add up in the masters, and move the very tensors of the model."""
    engine = engine_of(tiny_model, "bfloat16", learning_rate=1e-5)
    assert engine.optimizer is not None
    weight = engine.model.model.layers[0].mlp.up_proj.weight
    address, before = weight.data_ptr(), weight.detach().clone()
    share = []
    for _ in range(30):
        engine.step(make_batch(LENGTHS), ppo(clip=1e6))
        share.append(float((weight != before).float().mean()))
    assert share[0] < 0.2 < 2 * share[0] < share[-1]
    assert weight.data_ptr() == address
    for name, p in engine.network.parameters().items():
        assert torch.equal(p, engine.optimizer.masters[name].bfloat16())
        assert p.grad is None
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight


def test_bfloat16_gradients_add_up_in_float32(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, "bfloat16")
    assert engine.optimizer is not None
    accumulate(engine.network, make_batch(LENGTHS * 4), ppo(), 24)
    master = engine.optimizer.masters["model.layers.0.mlp.up_proj.weight"]
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    assert not torch.equal(master.grad, master.grad.bfloat16().float())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules(tiny_model: Path, schedule: str, expected: list[float]) -> None:
    config = Config(dtype="float32", learning_rate=2e-4, schedule=schedule, warmup_steps=4)  # type: ignore[arg-type]
    engine = TorchEngine(load_model(str(tiny_model), "float32"), config, total_steps=8)
    rates = [engine.step(make_batch([(2, 2)]), ppo())["learning_rate"].value for _ in range(8)]
    assert rates == pytest.approx([2e-4 * e for e in expected], rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model: Path, dtype: str) -> None:
    engine = engine_of(tiny_model, dtype, max_skipped_steps=2)
    batch = make_batch(LENGTHS)
    assert batch.advantage_T is not None
    bad = batch.replace(advantage_T=batch.advantage_T.clone().fill_(torch.inf))
    engine.step(batch, ppo())
    before = snapshot(engine)
    found = engine.step(bad, ppo())
    assert found["skipped_steps"].value == 1
    assert same(snapshot(engine), before)
    assert engine.step(batch, ppo())["skipped_steps"].value == 1
    engine.step(bad, ppo())
    with pytest.raises(TrainingError, match="max_skipped_steps"):
        engine.step(bad, ppo())


def test_nothing_to_train_is_a_step_with_zero_gradient(tiny_model: Path) -> None:
    engine = engine_of(tiny_model)
    before = snapshot(engine)
    batch = make_batch(LENGTHS)
    found = engine.step(batch.replace(signal_N=torch.zeros(4, dtype=torch.bool)), ppo())
    assert found["grad_norm"].value == 0
    assert same(snapshot(engine), before)


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_resuming_is_bit_exact(tiny_model: Path, tmp_path: Path, dtype: str, head: Any) -> None:
    objective = ppo() if head == "lm" else value_regression()
    keys = {"schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.01, "max_skipped_steps": 9}
    first, second = (engine_of(tiny_model, dtype, head, **keys) for _ in range(2))
    batch = make_batch(LENGTHS)
    assert batch.advantage_T is not None
    bad = batch.replace(advantage_T=batch.advantage_T * torch.nan)
    for part in (batch, bad, batch):
        first.step(part, objective)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    for _ in range(2):
        assert first.step(batch, objective) == second.step(batch, objective)
    assert same(snapshot(first), snapshot(second))
    assert first.optimizer is not None
    assert second.optimizer is not None
    assert same(first.optimizer.tensors(), second.optimizer.tensors())
    assert first.optimizer.counters() == second.optimizer.counters() == {
        "taken": 5, "skipped": 1, "skipped_in_a_row": 0
    }  # fmt: skip


def test_a_fresh_state_saves_and_loads(tiny_model: Path, tmp_path: Path) -> None:
    first, second = engine_of(tiny_model), engine_of(tiny_model)
    first.save(tmp_path / "state")
    second.step(make_batch(LENGTHS), ppo())
    second.load(tmp_path / "state")
    assert first.step(make_batch(LENGTHS), ppo()) == second.step(make_batch(LENGTHS), ppo())


def test_damaged_and_foreign_checkpoints_are_named(tiny_model: Path, tmp_path: Path) -> None:
    engine = engine_of(tiny_model)
    with pytest.raises(RunError, match=r"state\.json is missing"):
        engine.load(tmp_path)
    engine.save(tmp_path / "good")
    with pytest.raises(RunError, match=r"does not fit this model: 'weight/value_head\.bias'"):
        engine_of(tiny_model, head="value").load(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "cut")
    tensors = tmp_path / "cut" / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    with pytest.raises(RunError, match=r"cut/state\.safetensors is missing or damaged"):
        engine.load(tmp_path / "cut")
    (tmp_path / "cut" / "state.json").write_text('{"taken": 1')
    with pytest.raises(RunError, match=r"state\.json is missing or damaged"):
        engine.load(tmp_path / "cut")
    (tmp_path / "cut" / "state.json").write_text('{"taken": 1}')
    with pytest.raises(RunError, match="exactly the keys"):
        engine.load(tmp_path / "cut")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_is_what_a_saved_directory_loads(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    engine = engine_of(tiny_model, dtype)
    engine.step(make_batch(LENGTHS), ppo())
    write_model(engine.export(), tmp_path / "saved", str(tiny_model))
    again = load_model(str(tmp_path / "saved"), dtype)
    exported = dict(engine.export())
    assert same(exported, {n: p.detach() for n, p in again.named_parameters()})
    assert again.lm_head.weight is again.model.embed_tokens.weight
    batch = make_batch(LENGTHS)
    other = TorchEngine(again, engine.config, total_steps=1, trainable=False)
    assert torch.equal(logprobs(engine, batch)[batch.mask_T], logprobs(other, batch)[batch.mask_T])
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == dtype
    assert load_tokenizer(str(tmp_path / "saved")).chat_template


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_what_is_written_to_a_checkpoints_places_is_loaded(name: str) -> None:
    config, changes = ARCHITECTURES[name]
    source, target = random_model(config, **changes), random_model(config, **changes)
    with torch.no_grad():
        for p in target.parameters():
            p.zero_()
    sent, there = dict(checkpoint_tensors(source)), places(target)
    assert sent.keys() == there.keys()
    for tensor_name, tensor in sent.items():
        there[tensor_name].copy_(tensor)
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    "scatter",
    [lambda x: x.flip(-1), lambda x: x.reshape(-1)[torch.randperm(x.numel())], lambda x: x[:1].expand(2, *x.shape[1:])],
)
def test_a_checkpoint_that_has_no_places_is_refused(monkeypatch: pytest.MonkeyPatch, scatter: Any) -> None:
    def revert(_: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{name}.0": scatter(tensor) if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}

    monkeypatch.setattr("treadle.engines.torch.model.revert_weight_conversion", revert)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM holds '.*\.0' of its checkpoint scattered"):
        places(random_model(LlamaConfig))


def test_offload_and_onload_change_nothing(tiny_model: Path) -> None:
    moved, still = engine_of(tiny_model, "bfloat16"), engine_of(tiny_model, "bfloat16")
    batch = make_batch(LENGTHS)
    for _ in range(2):
        assert moved.step(batch, ppo()) == still.step(batch, ppo())
        moved.offload()
        moved.onload()


def test_close_frees_the_optimizer_and_leaves_the_model(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, "bfloat16")
    engine.step(make_batch(LENGTHS), ppo())
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.step(make_batch(LENGTHS), ppo())
    assert logprobs(TorchEngine(engine.model, engine.config, total_steps=1), make_batch(LENGTHS)).isfinite().any()


# ---------------------------------------------------------------------- models


def test_dropout_is_off_whatever_the_configuration_says(tiny_model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model, tmp_path / "wet")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    model = load_model(str(path), "float32")
    assert model.config.attention_dropout == 0.0
    assert not any(m.training for m in model.modules())


def refused(path: str | Path, match: str) -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match=match):
        load_model(str(path), "float32")
    assert time.monotonic() - start < 5


def test_models_that_are_not_there_are_refused_at_once(tmp_path: Path) -> None:
    refused("nowhere/at/all", "no model directory 'nowhere/at/all'")
    refused("./nowhere", r"no model directory '\./nowhere'")
    refused("no-such-owner-of-models/no-such-model", "no model directory 'no-such-owner-of-models/no-such-model'")
    refused(tmp_path, r"has no config\.json")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "no model directory")
    for long in ("x" * 300, "/" + "x" * 300):
        refused(long, "no model directory")
    with pytest.raises(ModelError, match="no model directory"):
        load_tokenizer("nowhere/at/all")


def test_damaged_models_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.*tokenizer\.json"):
        load_tokenizer(str(path))
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:-100])
    refused(path, "its weights .*cannot be loaded")
    (path / "model.safetensors").unlink()
    refused(path, "its weights .*cannot be loaded")
    (path / "config.json").write_text("{")
    refused(path, r"config\.json cannot be used")


def edited(tiny_model: Path, path: Path, name: str, change: Any) -> str:
    """A copy of the model in which one file says something else: some keys, or everything."""
    shutil.copytree(tiny_model, path)
    content = json.loads((path / name).read_text()) | change if change else change
    (path / name).write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({}, "model_type"),
        ([], "model_type"),
        ({"model_type": "nope"}, "`nope`"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"num_hidden_layers": "x"}, "'num_hidden_layers' expected int"),
        ({"vocab_size": 10}, "Padding_idx"),
        ({"hidden_act": "zz"}, "KeyError: 'zz'"),
    ],
)
def test_a_senseless_configuration_is_named(tiny_model: Path, tmp_path: Path, change: Any, match: str) -> None:
    path = edited(tiny_model, tmp_path / "model", "config.json", change)
    refused(path, rf"model '{path}': its config\.json cannot be used: .*{match}")
    for read in (models.context_length, load_tokenizer) if match not in ("Padding_idx", "KeyError: 'zz'") else ():
        with pytest.raises(ModelError, match=rf"its config\.json cannot be used: .*{match}"):
            read(path)  # those two show only when the model is built


def test_a_senseless_tokenizer_is_named(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with pytest.raises(ModelError, match="has no tokenizer that can be loaded"):
            load_tokenizer(edited(tiny_model, tmp_path / name, name, []))


def test_end_tokens_are_the_models_and_the_tokenizers(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    path = edited(tiny_model, tmp_path / "model", "generation_config.json", {"eos_token_id": "x"})
    model = load_model(path, "float32")
    for configured in ("x", [256, 1.5], 999, -1, [[256]]):
        model.generation_config.eos_token_id = configured
        with pytest.raises(
            ModelError, match=rf"'{path}': eos_token_id .*json is .*; allowed: a token id from 0 to 287"
        ):
            models.end_tokens(model, tokenizer)
    for configured, expected in ((256, (256,)), ([7, 256], (7, 256)), (3, (3, 256)), (None, (256,))):
        model.generation_config.eos_token_id = configured
        assert models.end_tokens(model, tokenizer) == expected


def test_vocabularies_must_fit(tiny_model: Path) -> None:
    small, policy = random_model(LlamaConfig), load_model(str(tiny_model), "float32")
    tokenizer = load_tokenizer(str(tiny_model))
    models.check_vocabulary(policy, policy, tokenizer, "reference")
    models.check_vocabulary(small, small, tokenizer, "reference")
    with pytest.raises(ModelError, match=rf"the critic '.*' has a vocabulary of 128 .* policy '{tiny_model}' uses 262"):
        models.check_vocabulary(policy, small, tokenizer, "critic")


def test_weights_that_are_not_finite_are_named_as_such() -> None:
    model = random_model(LlamaConfig)
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    with pytest.raises(ModelError, match="LlamaForCausalLM: the model's own logits are not finite"):
        TorchEngine(model, Config(), total_steps=1)


def test_incomplete_and_foreign_models_are_refused(tmp_path: Path) -> None:
    model = random_model(LlamaConfig, tie_word_embeddings=False)
    model.model.save_pretrained(tmp_path / "headless")
    config = json.loads((tmp_path / "headless" / "config.json").read_text())
    (tmp_path / "headless" / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    refused(tmp_path / "headless", "lacks 1 tensors of a LlamaForCausalLM, 'lm_head.weight'")
    T5Config().save_pretrained(tmp_path / "t5")
    refused(tmp_path / "t5", "is a t5, not a causal language model")


@pytest.mark.parametrize(
    ("config", "changes", "match"),
    [
        (BertConfig, {"is_decoder": False}, "BertLMHeadModel cannot be run packed"),
        (Gemma2Config, {}, "caps its scores"),
        (Lfm2Config, {"layer_types": ["conv", "full_attention"]}, r"\['conv'\] layers, which cannot run packed"),
    ],
)
def test_architectures_that_cannot_run_packed_are_refused(config: Any, changes: dict[str, Any], match: str) -> None:
    model = random_model(config, **changes)
    with pytest.raises(ModelError, match=match):
        TorchEngine(model, Config(), total_steps=1)


def test_an_unknown_rule_of_logits_is_found_out() -> None:
    model = random_model(LlamaConfig)
    plain = model.forward
    model.forward = lambda **keys: (lambda out: (setattr(out, "logits", out.logits * 1.5), out)[1])(plain(**keys))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .* off by 33\.3%"):
        TorchEngine(model, Config(), total_steps=1)


def test_a_loss_can_look_at_several_quantities_of_one_pass(tiny_model: Path) -> None:
    seen: list[Outputs] = []

    def loss(batch: Batch, outputs: Outputs) -> Loss:
        seen.append(outputs)
        return ppo().loss(batch, outputs)

    engine_of(tiny_model, microbatch_tokens=1000).step(make_batch(LENGTHS), Objective(loss, ppo().needs))
    (outputs,) = seen
    assert outputs.entropy_T is not None
    assert outputs.sum_p2_T is not None
    assert outputs.value_T is None
    assert ((outputs.entropy_T > 0) & (outputs.sum_p2_T < 1)).all()


def test_given_ids_have_their_log_probs_and_train(tiny_model: Path) -> None:
    """Distillation asks for the teacher's ids: here the token itself and another, cut and laid back with the rows."""
    batch = make_batch(LENGTHS)
    given_id_T = torch.stack([batch.token_T, (batch.token_T + 7) % 256], dim=1)
    batch = batch.annotated({"given_id_T": given_id_T})
    engine = engine_of(tiny_model)
    found = scan(engine.network, batch, {"logprob", "given"}, budget=24)
    trained = batch.mask_T
    assert torch.equal(found["given_T"][trained, 0], found["logprob_T"][trained])
    assert found["given_T"][~trained].isnan().all()

    def loss(_: Batch, outputs: Outputs) -> Loss:
        assert outputs.given_T is not None
        return Loss([Term(-outputs.given_T[:, 1])])

    before = found["given_T"][trained, 1].mean()
    for _ in range(3):
        engine.step(batch, Objective(loss, frozenset({"given"})))
    after = scan(engine.network, batch, {"given"}, budget=24)["given_T"][trained, 1].mean()
    assert after > before + 0.1
