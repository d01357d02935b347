"""Reward models: what they say is what transformers says, however they are asked; and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CTRLConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import treadle
from tests.engine_help import make_batch
from tests.reward_models import Judge, make_reward_model
from tests.runs import books, metrics, samples, settings
from treadle.batch import Batch
from treadle.engines.torch.config import Config
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.model import load_model, reach
from treadle.errors import ConfigError, ModelError, RewardError, WorkerError
from treadle.recipes.config import RLConfig
from treadle.rewards.config import RewardConfig
from treadle.rewards.model import ModelReward
from treadle.rewards.scorer import make_scorer
from treadle.types import Ended, Prompt, Provenance, Trajectory

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {}),
    "gemma": (GemmaConfig, {}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}


@pytest.fixture(scope="module")
def reward_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model", tiny_model)


def engine_of(path: Path, **keys: Any) -> TorchEngine:
    config = Config(dtype="float32", **keys)
    return TorchEngine(load_model(str(path), "float32", True), config, total_steps=1, head="value", trainable=False)


def trajectory(text: str, answer: str, tokens: tuple[int, ...] = (5, 6, 7)) -> Trajectory:
    length = len(tokens)
    return Trajectory(
        prompt=Prompt(text, 0, ({"role": "user", "content": text},), tokens[:1]),
        token_T=np.array(tokens, np.int64),
        provenance_T=np.array([Provenance.PROMPT] + [Provenance.SAMPLED] * (length - 1), np.uint8),
        logprob_T=np.zeros(length, np.float32),
        version_T=np.zeros(length, np.int32),
        turn_ends=(length - 1,),
        ended=Ended.TERMINATED,
        messages=({"role": "user", "content": text}, {"role": "assistant", "content": answer}),
    )


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def tokens_of(model: Path) -> int:
    """Of its tokenizer, but for special ones that were added."""
    return AutoTokenizer.from_pretrained(model).vocab_size


class Handle:
    """A model that says how many tokens it was given, when it is let."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def score(self, batch: Batch) -> Mapping[str, Tensor]:
        self.asked.append(batch.length_N.tolist())
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return {"score_N": batch.length_N.float()}


def reading(model: Path, policy: Path, context: int | None = None, vocabulary: int = 384) -> ModelReward:
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (model, policy))
    return ModelReward(ours, theirs, "judge", context, vocabulary)


# ---------------------------------------------------------------------- the engine


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    config, changes = KINDS[kind]
    path = make_reward_model(tmp_path, tiny_model, config, **changes)
    batch = make_batch([(5, 3), (1, 0), (30, 1), (9, 9), (17, 4)])
    found_N = engine_of(path).scores(batch)
    rows = batch.token_T.split(batch.length_N.tolist())
    expected_N = torch.tensor([Judge(path).tokens(row.tolist()) for row in rows])
    assert found_N.dtype == torch.float32
    assert found_N.std() > 0.01
    assert torch.allclose(found_N, expected_N, atol=1e-5, rtol=1e-5)


def test_a_score_has_the_same_bits_in_any_company(reward_model: Path) -> None:
    engine = engine_of(reward_model, microbatch_tokens=4096)
    batch = make_batch([(n % 13 + 1, n % 5) for n in range(24)])
    together_N = engine.scores(batch)
    for n in range(len(batch)):
        assert torch.equal(engine.scores(batch.select([n])), together_N[n : n + 1])
    half = batch.replace(group_N=torch.zeros_like(batch.group_N)).select(range(1, 24, 2))
    assert torch.equal(engine.scores(half), together_N[1::2])


def test_padding_at_the_end_is_not_scored(tiny_model: Path, tmp_path: Path) -> None:
    """Many reward models have one token for both: they were trained on the state before it, wherever it ends a text."""
    path = make_reward_model(tmp_path, tiny_model, pad_token_id=7)
    engine, judge = engine_of(path), Judge(path)
    batch = make_batch([(5, 3), (4, 2), (2, 0), (1, 1)])
    token_T = batch.token_T.clone()
    token_T[[7, 12, 13, 14, 15]] = 7  # one at the end, two, and nothing else
    token_T[2] = 7  # in the middle
    found_N = engine.scores(batch.replace(token_T=token_T))
    rows = token_T.split(batch.length_N.tolist())
    expected = [judge.tokens(row.tolist()) for row in rows]
    assert found_N[:2].tolist() == pytest.approx(expected[:2], abs=1e-5)
    assert found_N[0].item() == pytest.approx(judge.tokens(rows[0][:-1].tolist()), abs=1e-5)
    assert found_N[2:].isfinite().all()  # nothing but padding: no answer is right


def test_a_model_whose_score_has_another_form_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Its head would not be found, and every score be 0."""
    path = make_reward_model(tmp_path, tiny_model, CTRLConfig, n_embd=32, dff=64, n_layer=2, n_head=2)
    with pytest.raises(ModelError, match="CTRLForSequenceClassification, whose score is not made by one matrix"):
        load_model(str(path), "float32", True)


def test_what_it_reads_ends_at_its_sliding_window(tiny_model: Path, tmp_path: Path) -> None:
    path = make_reward_model(tmp_path, tiny_model, MistralConfig, sliding_window=16, max_position_embeddings=4096)
    assert reach(str(path)) == (16, 384)
    long = make_reward_model(tmp_path / "long", tiny_model, LlamaConfig, max_position_embeddings=512)
    assert reach(str(long)) == (512, 384)
    other = GPT2Config(vocab_size=300, n_positions=16, n_embd=32, n_layer=1, n_head=2)  # by other names
    other.save_pretrained(tmp_path / "other")
    assert reach(str(tmp_path / "other")) == (16, 300)


def test_half_precision_stays_near(reward_model: Path) -> None:
    batch = make_batch([(20, 5), (7, 7), (3, 1)])
    model = load_model(str(reward_model), "bfloat16", True)
    half = TorchEngine(model, Config(dtype="bfloat16"), total_steps=1, head="value", trainable=False)
    assert torch.allclose(half.scores(batch), engine_of(reward_model).scores(batch), atol=0.3)


def test_a_critic_begins_with_what_a_reward_model_says(reward_model: Path) -> None:
    config = Config(dtype="float32", learning_rate=1e-2)
    model = load_model(str(reward_model), "float32", True)
    critic = TorchEngine(model, config, total_steps=4, head="value")
    batch = make_batch([(5, 3), (9, 2)])
    ends = batch.replace(truncated_N=torch.ones_like(batch.truncated_N))
    assert torch.allclose(critic.values(ends)[1], critic.scores(batch), atol=1e-6)
    value_T = critic.values(batch)[0]
    states = batch.token_T[:5].tolist()  # in which the first row's first sampled token was chosen
    assert float(value_T[5]) == pytest.approx(Judge(reward_model).tokens(states), abs=1e-5)
    assert "value_head.weight" in critic.network.parameters()
    assert "value_head.bias" not in critic.network.parameters()


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"num_labels": 2}, "gives 2 scores; a reward model must give one"), ({"head": "lm"}, "gives no score; choose")],
)
def test_what_is_no_reward_model(changes: dict[str, Any], told: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tiny_model if "head" in changes else make_reward_model(tmp_path, tiny_model, **changes)
    with pytest.raises(ModelError, match=told):
        load_model(str(path), "float32", True)


def test_a_reward_model_is_no_policy(reward_model: Path) -> None:
    with pytest.raises(ModelError, match="a LlamaForSequenceClassification, a reward model that generates nothing"):
        load_model(str(reward_model), "float32")


def test_a_reward_model_without_its_score(tiny_model: Path, tmp_path: Path) -> None:
    """A language model whose configuration says otherwise would score at random."""
    from safetensors.torch import load_file, save_file

    path = make_reward_model(tmp_path, tiny_model)
    tensors = load_file(path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors of a LlamaForSequenceClassification, 'score\.weight' first"):
        load_model(str(path), "float32", True)


# ---------------------------------------------------------------------- the reward


@in_a_loop
async def test_it_reads_the_conversation_through_its_own_template(reward_model: Path, tiny_model: Path) -> None:
    reward, handle = reading(reward_model, tiny_model), Handle()
    reward.serve(handle)
    handle.go.set()
    text = "<user>one\n<assistant>two\n"
    encoded = AutoTokenizer.from_pretrained(tiny_model).encode(text, add_special_tokens=False)
    assert await reward(trajectory("one", "two")) == len(encoded)


@in_a_loop
async def test_without_a_template_it_reads_the_very_tokens(tiny_model: Path, tmp_path: Path) -> None:
    plain = make_reward_model(tmp_path / "plain", tiny_model, template=None)
    reward, handle = reading(plain, tiny_model), Handle()
    reward.serve(handle)
    handle.go.set()
    assert await reward(trajectory("one", "two", (1, 2, 3, 4, 5))) == 5
    other = json.loads((plain / "tokenizer.json").read_text())
    other["added_tokens"].append({**other["added_tokens"][0], "id": 1000, "content": "<new>"})
    (plain / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ModelError, match="'judge' has no chat template, so it would read the policy's tokens, but"):
        reading(plain, tiny_model)


@in_a_loop
async def test_those_that_come_meanwhile_are_asked_about_together(reward_model: Path, tiny_model: Path) -> None:
    reward, handle = reading(reward_model, tiny_model), Handle()
    reward.serve(handle)
    calls = [asyncio.ensure_future(reward(trajectory("x", "y" * n))) for n in range(6)]
    await asyncio.sleep(0.01)
    assert [len(rows) for rows in handle.asked] == [1]  # nobody waits for company
    calls += [asyncio.ensure_future(reward(trajectory("x", "y" * n))) for n in range(6, 9)]
    await asyncio.sleep(0.01)
    handle.go.set()
    found = await asyncio.gather(*calls)
    assert found == [found[0] + n for n in range(9)]
    assert [len(rows) for rows in handle.asked] == [1, 8]


@in_a_loop
async def test_one_that_leaves_takes_nobody_along(reward_model: Path, tiny_model: Path) -> None:
    """Neither he who asks for all, nor one of those he asks for."""
    reward, handle = reading(reward_model, tiny_model), Handle()
    reward.serve(handle)
    calls = [asyncio.ensure_future(reward(trajectory("x", "y" * n))) for n in range(6)]
    await asyncio.sleep(0.01)
    calls[0].cancel()  # it was asking for itself; the second asks for the others now
    await asyncio.sleep(0.01)
    calls[1].cancel()
    calls[3].cancel()
    await asyncio.sleep(0.01)
    calls[5].cancel()  # it is asked for, and not there any more when the answer comes
    handle.go.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in found] == [True, True, False, True, False, True]
    assert found[4] == found[2] + 2  # type: ignore[operator]
    assert [len(rows) for rows in handle.asked] == [1, 5, 3]


@in_a_loop
async def test_a_model_that_fails_ends_the_run_and_is_not_asked_again(reward_model: Path, tiny_model: Path) -> None:
    """It is a role: a failure of its own is no reward that failed, which would be tried again and then left out."""
    reward, handle = reading(reward_model, tiny_model), Handle()
    reward.serve(handle)
    handle.error = WorkerError("rank 1 died")
    handle.go.set()
    async with make_scorer(RewardConfig(functions={"model": 1.0}, retries=5), {}, reward) as scorer:
        with pytest.raises(WorkerError, match="rank 1 died"):
            await scorer(trajectory("one", "two"))
    assert len(handle.asked) == 1


@in_a_loop
async def test_a_model_that_fails_fails_all_that_wait_and_leaves_no_function_running(
    reward_model: Path, tiny_model: Path
) -> None:
    reward, handle = reading(reward_model, tiny_model), Handle()
    reward.serve(handle)
    ended: list[str] = []

    async def slow(trajectory: Trajectory) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")
        return 0.0

    config = RewardConfig(functions={"model": 1.0, "m:slow": 1.0}, retries=0)
    async with make_scorer(config, {"m:slow": slow}, reward) as scorer:
        calls = [asyncio.ensure_future(scorer(trajectory("one", "y" * n))) for n in range(5)]
        await asyncio.sleep(0.05)
        handle.error = WorkerError("rank 1 died")
        handle.go.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, WorkerError) for one in found)
    assert ended == ["slow"] * 5
    assert len(handle.asked) == 2  # the first, and the others together
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_a_loop
async def test_it_waits_for_its_turn_without_the_limit_of_functions(reward_model: Path, tiny_model: Path) -> None:
    reward, handle = reading(reward_model, tiny_model), Handle()
    reward.serve(handle)
    config = RewardConfig(functions={"model": 2.0, "tests.runs:variety": 8.0}, timeout_s=0.05, retries=0)
    async with make_scorer(config, {}, reward) as scorer:
        call = asyncio.ensure_future(scorer(trajectory("one", "two")))
        await asyncio.sleep(0.2)
        handle.go.set()
        found = await call
    assert set(found.parts) == {"model", "tests.runs:variety"}
    assert found.value == 2 * found.parts["model"] + 3


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
@in_a_loop
async def test_a_score_that_is_no_number(score: float, reward_model: Path, tiny_model: Path) -> None:
    class Broken(Handle):
        async def score(self, batch: Batch) -> Mapping[str, Tensor]:
            return {"score_N": torch.full((len(batch),), score)}

    reward = reading(reward_model, tiny_model)
    reward.serve(Broken())
    async with make_scorer(RewardConfig(functions={"model": 1.0}), {}, reward) as scorer:
        with pytest.raises(RewardError, match="reward 'model' of prompt 'one' is not a reward"):
            await scorer(trajectory("one", "two"))


@in_a_loop
async def test_a_conversation_that_cannot_be_read(reward_model: Path, tiny_model: Path, tmp_path: Path) -> None:
    reward = reading(reward_model, tiny_model, context=20)
    reward.serve(Handle())
    with pytest.raises(
        RewardError, match=r"'one': its conversation has 4\d tokens, and the reward model 'judge' reads"
    ):
        await reward(trajectory("one", "t" * 20))
    strict = make_reward_model(tmp_path, tiny_model, template="{{ raise_exception('no system here') }}")
    with pytest.raises(RewardError, match=r"template of the reward model 'judge' refuses this .*no system"):
        await reading(strict, tiny_model)(trajectory("one", "two"))
    with pytest.raises(RewardError, match="has no messages for the reward model to read"):
        await reward(replace(trajectory("one", "two"), messages=()))
    small = reading(reward_model, tiny_model, vocabulary=tokens_of(tiny_model))
    with pytest.raises(RewardError, match=r"knows 2\d\d tokens, and its tokenizer made token 2\d\d of this"):
        await small(trajectory("<|end|>", "<|pad|>"))
    silent = reading(make_reward_model(tmp_path / "silent", tiny_model, template="{{ '' }}"), tiny_model)
    with pytest.raises(RewardError, match="has 0 tokens"):
        await silent(trajectory("one", "two"))


# ---------------------------------------------------------------------- configuration and runs


def test_reward_and_model_belong_together(tmp_path: Path, tiny_model: Path) -> None:
    base = settings(tmp_path, tiny_model)
    for wrong in ({"reward": "model"}, {"reward_model": {"model": "somewhere"}}):
        with pytest.raises(ConfigError, match=r"reward\.functions and reward_model\.model belong together"):
            treadle.train(base | wrong)
    config = RLConfig.model_validate(base | {"reward": "model", "reward_model": {"model": "somewhere"}})
    assert config.reward.functions == {"model": 1.0}


def scored(run: Path, judge: Judge) -> int:
    """All samples' scores are what the judge says of their text."""
    rows = [row for found in samples(run).values() for row in found]
    for row in rows:
        (prompt, answer) = (message["content"] for message in json.loads(row["messages"]))
        expected = judge.text(f"<user>{prompt}\n<assistant>{answer}\n")
        assert row["reward_parts"]["model"] == pytest.approx(expected, abs=1e-5)
    return len(rows)


def test_a_run_with_a_reward_model(tiny_model: Path, reward_model: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "reward": {"functions": {"model": 1.0, "tests.runs:variety": 0.5}},
        "reward_model": {"model": str(reward_model)},
    }
    config = settings(tmp_path, tiny_model, evaluation={"samples": 2}, **more)
    config["data"]["evaluation"] = config["data"]["train"]
    treadle.train(config)
    run = tmp_path / "run"
    assert scored(run, Judge(reward_model)) > 3 * 2 * 4
    assert books(run)["trained"] == 3 * 2 * 4
    assert treadle.evaluate(run)["evaluation/greedy"]


def test_equal_runs_stay_equal_though_scores_come_in_any_company(
    tiny_model: Path, reward_model: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"reward": "model", "reward_model": {"model": str(reward_model)}}
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        treadle.train(settings(tmp_path / name, tiny_model, **more))
        runs.append(tmp_path / name / "run")
    assert metrics(runs[0]) == metrics(runs[1])
    assert samples(runs[0]) == samples(runs[1])


def test_ppo_with_a_critic_that_begins_as_the_reward_model(
    tiny_model: Path, reward_model: Path, tmp_path: Path
) -> None:
    algorithm = {"name": "ppo", "group_size": 4, "minibatches": 2}
    both: dict[str, Any] = {"reward_model": {"model": str(reward_model)}, "critic": {"model": str(reward_model)}}
    treadle.train(settings(tmp_path, tiny_model, reward="model", algorithm=algorithm, **both))
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert all(np.isfinite(row["critic/loss"]) for row in rows)
    assert rows[-1]["critic/updated"] == 1


def test_a_tokenizer_that_is_not_the_models(tiny_model: Path, tmp_path: Path) -> None:
    path = make_reward_model(tmp_path / "model", tiny_model, vocab_size=100)
    more: dict[str, Any] = {"reward": "model", "reward_model": {"model": str(path)}}
    with pytest.raises(ModelError, match=r"knows 100 tokens, and its tokenizer makes 2\d\d; they do not belong"):
        treadle.train(settings(tmp_path, tiny_model, **more))
