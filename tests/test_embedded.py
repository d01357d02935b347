"""The embedded rollout engine against plain forward passes of the same models."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from treadle import attention
from treadle.errors import ModelError, RolloutError, WeightSyncError
from treadle.handles import OnPublish, RolloutHandle
from treadle.rollout.embedded.config import Config
from treadle.rollout.embedded.engine import EmbeddedEngine
from treadle.rollout.embedded.generation import Generation
from treadle.types import Completion, SamplingParams, TokenRequest, noise_key

T = TypeVar("T")
VOCABULARY = 288
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {"head_dim": 16, **MOE},
    "Granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},  # scales its logits: the head path must be its own
    "Cohere": {"logit_scale": 0.5},
}


class Turns:
    """A device of one thread. `before` sees the number of each call and may raise in its place."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.calls = 0
        self.before: Callable[[int], None] = lambda _: None

    async def run(self, call: Callable[[], T], priority: int = 1) -> T:
        assert priority in (0, 1)
        self.calls += 1
        number = self.calls

        def turn() -> T:
            self.before(number)
            return call()

        return await asyncio.get_running_loop().run_in_executor(self.pool, turn)


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of an architecture, spread enough that every weight matters."""
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **ARCHITECTURES.get(name, {}), **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model


def hooked(model: Any) -> Any:
    """A copy for the engine; the original stays a plain Hugging Face model to compare with."""
    own = copy.deepcopy(model)
    attention.install(own)
    return own


def engine(model: Any, rows: int = 64, tokenizer: Any = None, owns: bool = True) -> tuple[EmbeddedEngine, Turns]:
    device = Turns()
    return EmbeddedEngine(model, tokenizer, Config(max_sequences=rows), device, owns_weights=owns), device


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run to the end, within a time limit, and see that no task is left behind."""

    async def main() -> T:
        result = await asyncio.wait_for(_await(work()), 60)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(main())


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.0005)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist())


def ask(name: str, prompt: tuple[int, ...], max_tokens: int = 12, **changes: Any) -> TokenRequest:
    """A request; sampling parameters and fields of the request are told apart by name."""
    own = {k: changes.pop(k) for k in ("prefix", "priority", "position") if k in changes}
    return TokenRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **changes), noise_key(0, name), **own)


def scored(model: Any, request: TokenRequest, completion: Completion) -> np.ndarray:
    """What a plain forward pass says about the completion."""
    ids = torch.tensor([[*request.token_ids, *completion.token_C.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(request.token_ids) - 1 : -1].float()
    logp = (logits / (request.params.temperature or 1.0)).log_softmax(-1)
    return logp.gather(-1, ids[0, len(request.token_ids) :, None])[:, 0].numpy()


def assert_scored(model: Any, request: TokenRequest, completion: Completion) -> None:
    np.testing.assert_allclose(completion.logprob_C, scored(model, request, completion), atol=1e-5, rtol=0)


def assert_same(one: Completion, other: Completion, atol: float = 0.0) -> None:
    assert one.finish == other.finish
    np.testing.assert_array_equal(one.token_C, other.token_C)
    np.testing.assert_allclose(one.logprob_C, other.logprob_C, atol=atol, rtol=0)


def weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """As a trainer exports: names of the parameters, tied ones once."""
    yield from ((name, p.detach()) for name, p in model.named_parameters())


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("Llama")


@pytest.fixture(scope="module")
def other_llama() -> Any:
    return build("Llama", seed=1)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


# ---------------------------------------------------------------------- numerics


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_equal_a_plain_forward_pass(name: str) -> None:
    """Prompts of 1 and 500 tokens side by side, shared prompts, more requests than rows, a preemption on the way."""
    model = build(name)
    group = [ask(f"group.{i}", tokens(20, 3), 8 + i, prefix="group") for i in range(4)]
    single = [
        ask("one", tokens(1, 1), 20, temperature=0.7),
        ask("long", tokens(500, 2), 20, temperature=1.3),
        ask("greedy", tokens(7, 4), 15, temperature=0.0),
    ]
    requests = [*single, *group]
    own, _ = engine(hooked(model), rows=4)

    async def main() -> list[Completion]:
        tasks = [asyncio.create_task(own.generate(r)) for r in requests]
        await until(lambda: own.stats()["decode_steps"] >= 5)
        await own.load(weights(model), 1, "resume")
        return await asyncio.gather(*tasks)

    completions = run(main)
    for request, completion in zip(requests, completions, strict=True):
        assert_scored(model, request, completion)
        assert len(completion.token_C) == request.params.max_tokens
        assert completion.finish == "length"
        dtypes = (completion.token_C.dtype, completion.logprob_C.dtype, completion.version_C.dtype)
        assert dtypes == (np.int64, np.float32, np.int32)
    greedy = completions[2]
    with torch.no_grad():
        ids = torch.tensor([[*tokens(7, 4), *greedy.token_C.tolist()]])
        assert model(input_ids=ids).logits[0, 6:-1].argmax(-1).tolist() == greedy.token_C.tolist()


def test_the_quickstart_kind_of_model_in_bfloat16(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    own, _ = engine(hooked(model))
    requests = [ask(f"{i}", tokens(30, i)) for i in range(4)]
    completions = run(lambda: asyncio.gather(*[own.generate(r) for r in requests]))
    for request, completion in zip(requests, completions, strict=True):
        np.testing.assert_allclose(completion.logprob_C, scored(model, request, completion), atol=0.1, rtol=0)


def test_a_request_samples_the_same_alone_and_in_a_crowd(llama: Any) -> None:
    crowd = [ask(f"{i}", tokens(3 + 11 * i, i), 5 + 3 * i, top_k=50 if i % 2 else 0, top_p=0.9) for i in range(9)]
    own, _ = engine(hooked(llama), rows=4)
    together = run(lambda: asyncio.gather(*[own.generate(r) for r in crowd]))
    for request, completion in zip(crowd, together, strict=True):
        assert_same(run(lambda r=request: own.generate(r)), completion, atol=1e-5)


@given(
    prompt=st.integers(1, 70),
    length=st.integers(2, 40),
    cut=st.floats(0, 1),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
    top_k=st.sampled_from([0, 20]),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_aborted_and_resumed_equals_uninterrupted(
    prompt: int, length: int, cut: float, temperature: float, top_k: int, shared: bool, seed: int
) -> None:
    own, _ = engine(RESUMED)
    start, name = tokens(prompt, seed), f"sample {seed}"
    params = {"temperature": temperature, "top_k": top_k, "prefix": "p" if shared else ""}
    whole = run(lambda: own.generate(ask(name, start, length, **params)))
    done = 1 + int(cut * (length - 2))
    so_far = tuple(whole.token_C[:done].tolist())
    rest = run(lambda: own.generate(ask(name, start + so_far, length - done, position=done, **params)))
    assert rest.token_C.tolist() == whole.token_C[done:].tolist()
    np.testing.assert_allclose(rest.logprob_C, whole.logprob_C[done:], atol=1e-5, rtol=0)


RESUMED = hooked(build("Llama", seed=5))


# ---------------------------------------------------------------------- prompts computed once


def test_a_group_computes_its_prompt_once(llama: Any) -> None:
    own, _ = engine(hooked(llama), rows=3)
    requests = [ask(f"g.{i}", tokens(40), 4, prefix="g") for i in range(8)]
    completions = run(lambda: asyncio.gather(*[own.generate(r) for r in requests]))
    for request, completion in zip(requests, completions, strict=True):
        assert_scored(llama, request, completion)
    assert len({tuple(c.token_C) for c in completions}) == 8
    assert (own.stats()["prompt_tokens"], own.stats()["prefix_hits"]) == (40, 7)


def test_prompts_are_shared_by_key_and_by_tokens(llama: Any) -> None:
    own, _ = engine(hooked(llama))
    alone = [ask("a", tokens(10)), ask("b", tokens(10))]
    unlike = [ask("c", tokens(10), prefix="p"), ask("d", tokens(11), prefix="p"), ask("e", tokens(10), prefix="q")]
    run(lambda: asyncio.gather(*[own.generate(r) for r in (*alone, *unlike)]))
    assert (own.stats()["prompt_tokens"], own.stats()["prefix_hits"]) == (51, 0)


def test_latecomers_share_the_prompt(llama: Any) -> None:
    """One that arrives during the prompt's pass, one while the group decodes; one after its end does not."""
    own, device = engine(hooked(llama))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        late: list[asyncio.Task[Completion]] = []

        def before(call: int) -> None:
            if call == 1:  # on the device's thread, in front of the prompt's pass
                loop.call_soon_threadsafe(lambda: late.append(loop.create_task(own.generate(requests[1]))))
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()

        device.before = before
        first = asyncio.create_task(own.generate(requests[0]))
        await until(lambda: own.stats()["running"] == 2)
        last = asyncio.create_task(own.generate(requests[2]))
        for request, task in zip(requests, (first, late[0], last), strict=True):
            assert_scored(llama, request, await task)
        assert (own.stats()["prompt_tokens"], own.stats()["prefix_hits"]) == (30, 2)
        await until(lambda: own._task is not None and own._task.done())
        await own.generate(requests[0])
        assert own.stats()["prompt_tokens"] == 60

    requests = [ask(f"g.{i}", tokens(30), 60, prefix="g") for i in range(3)]
    run(main)


# ---------------------------------------------------------------------- publishing


async def published(
    own: EmbeddedEngine, new: Any, requests: list[TokenRequest], mode: OnPublish, late: TokenRequest
) -> tuple[list[Completion], Completion]:
    """Completions with a publish in their middle, and that of a request made right after the publish began."""
    tasks = [asyncio.create_task(own.generate(r)) for r in requests]
    await until(lambda: own.stats()["decode_steps"] >= 6)
    loading = asyncio.create_task(own.load(weights(new), 7, mode))
    await asyncio.sleep(0)
    last = asyncio.create_task(own.generate(late))
    await loading
    return await asyncio.gather(*tasks), await last


REQUESTS = [
    ask("a.0", tokens(25, 1), 40, prefix="a"),
    ask("a.1", tokens(25, 1), 40, prefix="a"),
    ask("b", tokens(3), 35),
]
LATE = ask("a.2", tokens(25, 1), 5, prefix="a")


def test_resume_keeps_tokens_and_recomputes_the_rest(llama: Any, other_llama: Any) -> None:
    own, _ = engine(hooked(llama))
    uninterrupted = run(lambda: asyncio.gather(*[own.generate(r) for r in REQUESTS]))
    own, _ = engine(hooked(llama))
    completions, late = run(lambda: published(own, other_llama, REQUESTS, "resume", LATE))
    for request, before, after in zip(REQUESTS, uninterrupted, completions, strict=True):
        kept = int((after.version_C == 0).sum())
        assert 6 <= kept < len(after.token_C) - 5
        assert after.version_C.tolist() == [0] * kept + [7] * (len(after.token_C) - kept)
        assert after.token_C[:kept].tolist() == before.token_C[:kept].tolist()
        assert after.token_C.tolist() != before.token_C.tolist()
        np.testing.assert_allclose(after.logprob_C[:kept], scored(llama, request, after)[:kept], atol=1e-5)
        np.testing.assert_allclose(after.logprob_C[kept:], scored(other_llama, request, after)[kept:], atol=1e-5)
    assert_scored(other_llama, LATE, late)
    assert set(late.version_C) == {7}


def test_continue_keeps_keys_and_values(llama: Any, other_llama: Any) -> None:
    own, _ = engine(hooked(llama))
    completions, late = run(lambda: published(own, other_llama, REQUESTS, "continue", LATE))
    for request, after in zip(REQUESTS, completions, strict=True):
        kept = int((after.version_C == 0).sum())
        assert after.version_C.tolist() == [0] * kept + [7] * (len(after.token_C) - kept)
        np.testing.assert_allclose(after.logprob_C[:kept], scored(llama, request, after)[:kept], atol=1e-5)
        # by hand: the old model's cache up to the last token it sampled, which the new model reads first
        old, new = [*request.token_ids, *after.token_C[: kept - 1]], after.token_C[kept - 1 :].tolist()
        with torch.no_grad():
            cache = llama(input_ids=torch.tensor([old]), use_cache=True).past_key_values
            logits = other_llama(input_ids=torch.tensor([new[:-1]]), past_key_values=cache).logits[0]
        expected = logits.log_softmax(-1)[range(len(new) - 1), new[1:]].numpy()
        np.testing.assert_allclose(after.logprob_C[kept:], expected, atol=1e-5)
        assert np.abs(scored(other_llama, request, after)[kept:] - expected).max() > 1e-3
    assert_scored(other_llama, LATE, late)  # the prompt that its group had computed was forgotten


def test_drain_lets_running_requests_finish_and_admits_none(llama: Any, other_llama: Any) -> None:
    own, _ = engine(hooked(llama))
    completions, late = run(lambda: published(own, other_llama, REQUESTS, "drain", LATE))
    for request, after in zip(REQUESTS, completions, strict=True):
        assert set(after.version_C) == {0}
        assert_scored(llama, request, after)
    assert set(late.version_C) == {7}
    assert_scored(other_llama, LATE, late)


def test_requests_made_during_a_load_wait_for_it(llama: Any, other_llama: Any) -> None:
    own, device = engine(hooked(llama))
    request = ask("a", tokens(9))

    async def main() -> Completion:
        loop = asyncio.get_running_loop()
        made: list[asyncio.Task[Completion]] = []

        def before(_: int) -> None:  # on the device's thread, in front of the copy
            loop.call_soon_threadsafe(lambda: made.append(loop.create_task(own.generate(request))))
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()
            device.before = lambda _: None

        device.before = before
        await own.load(weights(other_llama), 1, "resume")
        return await made[0]

    completion = run(main)
    assert set(completion.version_C) == {1}
    assert_scored(other_llama, request, completion)


def test_a_cancelled_load_must_be_repeated(llama: Any, other_llama: Any) -> None:
    own, device = engine(hooked(llama))

    async def main() -> None:
        flying = asyncio.create_task(own.generate(ask("a", tokens(5), 500)))
        await until(lambda: own.stats()["tokens"] > 2)
        await own.pause()
        cancelled, calls = threading.Event(), device.calls
        device.before = lambda _: None if cancelled.wait(10) else pytest.fail("never cancelled")
        loading = asyncio.create_task(own.load(weights(other_llama), 1, "continue"))
        await until(lambda: device.calls > calls)
        loading.cancel()
        await asyncio.wait([loading])
        cancelled.set()
        assert loading.cancelled()
        with pytest.raises(WeightSyncError, match="cancelled half way"):
            await flying
        with pytest.raises(WeightSyncError, match="the last load failed"):
            await own.generate(ask("b", tokens(5)))

    run(main)


def test_two_publishes_in_one_request(llama: Any, other_llama: Any) -> None:
    own, _ = engine(hooked(llama), rows=1)
    request = ask("a", tokens(9), 60)

    async def main() -> Completion:
        task = asyncio.create_task(own.generate(request))
        for version, model in enumerate([other_llama, llama], start=1):
            seen = own.stats()["tokens"]
            await until(lambda seen=seen: own.stats()["tokens"] >= seen + 4)
            await own.load(weights(model), version, "resume")
        return await task

    completion = run(main)
    assert completion.version_C.tolist() == sorted(completion.version_C.tolist())
    assert set(completion.version_C) == {0, 1, 2}
    for version, model in enumerate([llama, other_llama, llama]):
        at = completion.version_C == version
        np.testing.assert_allclose(completion.logprob_C[at], scored(model, request, completion)[at], atol=1e-5)


def test_shared_weights_are_stamped_and_not_copied(llama: Any, other_llama: Any) -> None:
    shared = hooked(llama)
    own, device = engine(shared, owns=False)
    request = ask("a", tokens(9), 60, prefix="p")

    async def main() -> Completion:
        task = asyncio.create_task(own.generate(request))
        await until(lambda: own.stats()["tokens"] >= 5)
        await own.pause()
        shared.load_state_dict(other_llama.state_dict())  # the trainer's step
        calls = device.calls
        with pytest.raises(RolloutError, match="1 requests are in flight on weights that the trainer"):
            await own.load(None, 1, "drain")
        await own.load(None, 1, "resume")
        assert device.calls == calls
        await own.resume()
        return await task

    completion = run(main)
    for version, model in enumerate([llama, other_llama]):
        at = completion.version_C == version
        assert at.sum() >= 5
        np.testing.assert_allclose(completion.logprob_C[at], scored(model, request, completion)[at], atol=1e-5)


# ---------------------------------------------------------------------- weights that do not fit


def changed(model: Any, **changes: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    """The model's weights with some replaced, added or (None) left out."""
    given = {name.replace("__", "."): value for name, value in changes.items()}
    all_of_it = {**dict(weights(model)), **given}
    return [(name, value) for name, value in all_of_it.items() if value is not None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, "'model.norm.weight' was not sent$"),
        ({"model__norm__weight": None, "model__embed_tokens__weight": None}, "was not sent, nor were 1 more"),
        ({"model__norm__bias": torch.zeros(64)}, "'model.norm.bias' was sent, but LlamaForCausalLM has no tensor of"),
        ({"model__norm__weight": torch.zeros(65)}, r"'model.norm.weight' was sent with shape \[65\], .* has \[64\]"),
        ({"lm_head__weight": torch.zeros(VOCABULARY, 64)}, "'lm_head.weight' is tied to, or repeats"),
    ],
)
def test_weights_that_do_not_fit(
    llama: Any, other_llama: Any, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    own, _ = engine(hooked(llama))
    request = ask("a", tokens(5), 500)

    async def main() -> Completion:
        flying = asyncio.create_task(own.generate(request))
        await until(lambda: own.stats()["decode_steps"] > 2)
        with pytest.raises(WeightSyncError, match=message):
            await own.load(changed(other_llama, **changes), 1, "resume")
        with pytest.raises(WeightSyncError, match=message):
            await flying
        with pytest.raises(WeightSyncError, match="the last load failed"):
            await own.generate(request)
        await own.load(weights(other_llama), 1, "resume")
        return await own.generate(ask("a", tokens(5)))

    completion = run(main)
    assert_scored(other_llama, ask("a", tokens(5)), completion)
    assert set(completion.version_C) == {1}


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_stay_tied_under_either_name(llama: Any, other_llama: Any, name: str) -> None:
    model = hooked(llama)
    own, _ = engine(model)
    sent = [(name if n == "model.embed_tokens.weight" else n, w) for n, w in weights(other_llama)]
    run(lambda: own.load(sent, 1, "drain"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    request = ask("a", tokens(5))
    assert_scored(other_llama, request, run(lambda: own.generate(request)))
    run(lambda: own.load(other_llama.state_dict().items(), 2, "drain"))  # both names


def test_weights_must_match_who_owns_them(llama: Any) -> None:
    own, _ = engine(hooked(llama))
    with pytest.raises(WeightSyncError, match="version 3: this engine has its own copy"):
        run(lambda: own.load(None, 3, "drain"))
    shared, _ = engine(hooked(llama), owns=False)
    with pytest.raises(WeightSyncError, match="version 3: weights were sent"):
        run(lambda: shared.load(weights(llama), 3, "drain"))


# ---------------------------------------------------------------------- scheduling


@pytest.mark.parametrize(("prompt", "passes"), [(200, 2), (20, 1)])  # 12 prompts of 200 tokens take two passes
def test_the_same_requests_give_the_same_bits(llama: Any, prompt: int, passes: int) -> None:
    """Asked through tasks of different depth, all of them are admitted before the first decode pass."""

    async def nested(own: EmbeddedEngine, request: TokenRequest, depth: int) -> Completion:
        if depth:
            return await asyncio.create_task(nested(own, request, depth - 1))
        return await own.generate(request)

    def once() -> tuple[list[Completion], list[tuple[float, float]]]:
        own, device = engine(hooked(llama), rows=64)
        seen: list[tuple[float, float]] = []
        device.before = lambda _: seen.append((own.stats()["running"], own.stats()["decode_steps"]))
        requests = [ask(f"{i // 8}.{i}", tokens(prompt, i // 4), 6 + i % 7, prefix=f"{i // 8}") for i in range(48)]
        completions = run(lambda: asyncio.gather(*[nested(own, r, 6 * (n % 2)) for n, r in enumerate(requests)]))
        return completions, seen

    first, seen = once()
    assert seen[0] == (0, 0)
    assert seen[passes - 1][0] < 48
    assert seen[passes] == (48, 0)
    for _ in range(2):
        again, _ = once()
        for one, other in zip(first, again, strict=True):
            assert_same(one, other)


def test_smaller_priorities_go_first(llama: Any) -> None:
    own, _ = engine(hooked(llama), rows=1)
    done: list[str] = []

    async def one(name: str, priority: int) -> None:
        await own.generate(ask(name, tokens(4), 3, priority=priority))
        done.append(name)

    run(lambda: asyncio.gather(one("a", 1), one("b", 1), one("c", 0), one("d", 0)))
    assert done == ["c", "d", "a", "b"]


def test_others_get_the_device_between_two_tokens(llama: Any) -> None:
    own, device = engine(hooked(llama))

    async def main() -> None:
        task = asyncio.create_task(own.generate(ask("a", tokens(4), 300)))
        before = 0
        while before < 20:
            await device.run(lambda: None)
            tokens_now = int(own.stats()["tokens"])
            assert tokens_now - before <= 3
            before = tokens_now
        task.cancel()
        await asyncio.wait([task])
        await own.close()

    run(main)


def test_pause_keeps_everything_and_stops_the_device(llama: Any) -> None:
    own, device = engine(hooked(llama))
    requests = [ask(f"{i}", tokens(9, i), 30) for i in range(3)]
    whole = run(lambda: asyncio.gather(*[own.generate(r) for r in requests]))

    async def main() -> list[Completion]:
        before = own.stats()["tokens"]
        tasks = [asyncio.create_task(own.generate(r)) for r in requests]
        await until(lambda: own.stats()["tokens"] > before + 10)
        await own.pause()
        await own.pause()
        calls, stats = device.calls, own.stats()
        queued = asyncio.create_task(own.generate(requests[0]))
        await asyncio.sleep(0.05)
        assert device.calls == calls
        assert own.stats() == {**stats, "queue": 1}
        await own.resume()
        assert_same(await queued, whole[0], atol=1e-5)
        return await asyncio.gather(*tasks)

    for one, other in zip(run(main), whole, strict=True):
        assert_same(one, other, atol=1e-5)
    assert own.stats()["prompt_tokens"] == 7 * 9  # nothing was computed again


def test_sleep_frees_the_caches_and_keeps_the_tokens(llama: Any) -> None:
    own, _ = engine(hooked(llama))
    request = ask("a", tokens(9), 40, prefix="p")
    whole = run(lambda: own.generate(request))

    async def main() -> tuple[Completion, Completion]:
        before = own.stats()["tokens"]
        flying = asyncio.create_task(own.generate(request))
        await until(lambda: own.stats()["tokens"] > before + 5)
        await own.sleep()
        assert own.stats()["cache_bytes"] == 0
        assert own._runner.prefixes == {}
        queued = asyncio.create_task(own.generate(request))
        await asyncio.sleep(0.02)
        assert (own.stats()["queue"], own.stats()["running"]) == (2, 0)
        with pytest.raises(RolloutError, match="1 requests are in flight in a held engine"):
            await own.load(weights(llama), 1, "drain")
        await own.wake()
        return await flying, await queued

    for completion in run(main):
        assert_same(completion, whole, atol=1e-5)


def test_drain_finishes_what_sleep_had_stopped(llama: Any, other_llama: Any) -> None:
    own, _ = engine(hooked(llama))

    async def main() -> tuple[Completion, Completion]:
        flying = asyncio.create_task(own.generate(REQUESTS[0]))
        await until(lambda: own.stats()["tokens"] > 5)
        await own.sleep()
        fresh = asyncio.create_task(own.generate(REQUESTS[2]))
        await asyncio.sleep(0)
        await own.wake()
        await own.load(weights(other_llama), 1, "drain")
        assert flying.done()
        return await flying, await fresh

    flying, fresh = run(main)
    assert (set(flying.version_C), set(fresh.version_C)) == ({0}, {1})
    assert_scored(llama, REQUESTS[0], flying)


# ---------------------------------------------------------------------- leaving and failing


def test_cancelling_frees_the_row(llama: Any) -> None:
    own, _ = engine(hooked(llama), rows=2)

    async def main() -> None:
        long = [asyncio.create_task(own.generate(ask(f"long {i}", tokens(9, i), 900))) for i in range(3)]
        kept = ask("kept", tokens(5), 8)
        waiting = asyncio.create_task(own.generate(kept))
        await until(lambda: own.stats()["tokens"] > 10)
        assert (own.stats()["running"], own.stats()["queue"]) == (2, 2)
        long[2].cancel()  # it waits for a row
        long[0].cancel()  # it has one
        assert_scored(llama, kept, await waiting)
        assert (own.stats()["running"], own.stats()["queue"]) == (1, 0)
        assert [t.done() for t in long] == [True, False, True]
        long[1].cancel()
        await asyncio.wait(long)
        await until(lambda: own._task is not None and own._task.done())
        assert own._rows == own._waiting == []

    run(main)


@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=14), rows=st.integers(1, 6), data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_rows_that_leave_in_any_order_disturb_nobody(lengths: list[int], rows: int, data: st.DataObject) -> None:
    own, device = engine(RESUMED, rows=rows)
    requests = [ask(f"{i}", tokens(2 + 5 * i, i), n, prefix=f"{i // 3}") for i, n in enumerate(lengths)]
    leaves = data.draw(st.sets(st.sampled_from(range(len(lengths))), max_size=len(lengths) // 2))

    async def main() -> list[Completion | BaseException]:
        tasks = [asyncio.create_task(own.generate(r)) for r in requests]
        for i in leaves:
            calls = device.calls
            await until(lambda calls=calls: device.calls > calls or all(t.done() for t in tasks))
            tasks[i].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for request, completion in zip(requests, run(main), strict=True):
        if isinstance(completion, Completion):
            assert_scored(RESUMED_PLAIN, request, completion)


RESUMED_PLAIN = build("Llama", seed=5)


def test_a_failing_pass_reaches_everyone_who_waits(llama: Any) -> None:
    own, device = engine(hooked(llama), rows=2)

    def fail(call: int) -> None:
        if call == 4:
            raise ZeroDivisionError("planted")

    device.before = fail
    requests = [ask(f"{i}", tokens(9, i), 30) for i in range(5)]

    async def main() -> list[Completion | BaseException]:
        return await asyncio.gather(*[own.generate(r) for r in requests], return_exceptions=True)

    for error in run(main):
        assert isinstance(error, ZeroDivisionError)
        trace = error.__traceback__
        names = []
        while trace is not None:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        assert names[-1] == "fail"
    request = ask("again", tokens(9))  # and the engine can go on
    assert_scored(llama, request, run(lambda: own.generate(request)))


def test_weights_that_are_no_numbers_are_an_error(llama: Any) -> None:
    model = hooked(llama)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    own, _ = engine(model)
    with pytest.raises(RolloutError, match="sample 'a': the model's logits are not finite"):
        run(lambda: own.generate(ask("a", tokens(4))))


def test_close_ends_what_is_in_flight(llama: Any) -> None:
    own, _ = engine(hooked(llama), rows=1)

    async def main() -> None:
        tasks = [asyncio.create_task(own.generate(ask(f"{i}", tokens(4), 900))) for i in range(2)]
        await until(lambda: own.stats()["tokens"] > 3)
        await own.close()
        await own.close()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, RolloutError)
        with pytest.raises(RolloutError, match="closed"):
            await own.generate(ask("late", tokens(4)))

    run(main)


# ---------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask("s", ()), "its prompt is empty"),
        (ask("s", (3, VOCABULARY)), f"prompt token {VOCABULARY} is outside"),
        (ask("s", (3, -1)), "prompt token -1 is outside"),
        (ask("s", (3,), temperature=-0.1), "temperature -0.1"),
        (ask("s", (3,), temperature=float("nan")), "temperature nan"),
        (ask("s", (3,), top_p=0.0), "top_p 0.0"),
        (ask("s", (3,), top_p=1.1), "top_p 1.1"),
        (ask("s", (3,), top_k=-1), "top_k -1"),
        (ask("s", (3,), max_tokens=0), "max_tokens 0"),
        (ask("s", tokens(1000), 25), "prompt of 1000 tokens and max_tokens 25 do not fit the model's context of 1024"),
        (ask("s", (3,), position=-1), "position -1"),
        (ask("s", (3,), stop=("",)), "an empty stop string"),
        (ask("s", (3,), stop=("x",)), "need a tokenizer"),
    ],
)
def test_requests_that_cannot_be_served(llama: Any, request_: TokenRequest, message: str) -> None:
    own, device = engine(hooked(llama))
    with pytest.raises(RolloutError, match=f"^sample 's': .*{message}"):
        run(lambda: own.generate(request_))
    assert device.calls == 0


def test_the_whole_context_can_be_used(llama: Any) -> None:
    own, _ = engine(hooked(llama))
    request = ask("s", tokens(1000), 24)
    assert_scored(llama, request, run(lambda: own.generate(request)))


def test_stop_tokens_are_part_of_the_completion(llama: Any) -> None:
    own, _ = engine(hooked(llama))
    whole = run(lambda: own.generate(ask("s", tokens(4), 50)))
    stop = int(whole.token_C[20])
    at = whole.token_C.tolist().index(stop)
    stopped = run(lambda: own.generate(ask("s", tokens(4), 50, stop_token_ids=(999, stop))))
    assert stopped.token_C.tolist() == whole.token_C[: at + 1].tolist()
    assert stopped.finish == "stop"
    at_the_limit = run(lambda: own.generate(ask("s", tokens(4), at + 1, stop_token_ids=(stop,))))
    assert at_the_limit.finish == "stop"


def test_stop_strings_end_at_the_token_that_completes_them(llama: Any, tokenizer: Any) -> None:
    own, _ = engine(hooked(llama), tokenizer=tokenizer)
    whole = run(lambda: own.generate(ask("s", tokens(4), 300))).token_C.tolist()
    printable = [t < 256 and tokenizer.decode([t]).isprintable() and "�" not in tokenizer.decode([t]) for t in whole]
    start = next(i for i in range(5, 290) if all(printable[i : i + 3]))  # three bytes in a row that are characters
    stop = tokenizer.decode(whole[start : start + 3])
    ends = next(n for n in range(1, 301) if stop in tokenizer.decode(whole[:n]))
    stopped = run(lambda: own.generate(ask("s", tokens(4), 300, stop=("never this one", stop))))
    assert stopped.token_C.tolist() == whole[:ends]
    assert stopped.finish == "stop"


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("say ENDing", "END"),
        ("a naïve ¶ sign, 漢字 and more", "漢字"),
        ("one\n\ntwo", "\n\n"),
        ("x" * 50 + " word" + "y" * 9, " word"),
        ("before<|end|>after", "<|end|>"),
    ],
)
def test_stop_strings_span_tokens_and_bytes(tokenizer: Any, text: str, stop: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    with asyncio.Runner() as runner:
        generation = Generation(ask("s", (1,), 1000, stop=(stop,)), 0, runner.get_loop().create_future())
        feed = iter(ids)
        while not generation.done.done():
            generation.add(next(feed), -1.0, 0, tokenizer)
        assert len(generation.token_C) == ends < len(ids)
        assert generation.done.result().finish == "stop"


# ---------------------------------------------------------------------- models


class Causal:
    """A plan as a trainer would pass: one whole sequence."""

    longest = 8

    def __call__(self, layer: int, q: Any, k: Any, v: Any, scaling: float) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_a_shared_model_still_trains(rope: str) -> None:
    """Nothing made while generating reaches the trainer's graph; modes are left as they were."""
    rope_parameters = {"rope_type": rope, "rope_theta": 10_000.0, **({"factor": 2.0} if rope == "dynamic" else {})}
    model = hooked(build("Llama", rope_parameters=rope_parameters))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model.model.layers[0].mlp.eval()
    modes = {name: m.training for name, m in model.named_modules()}
    own, _ = engine(model, owns=False)
    run(lambda: own.generate(ask("a", tokens(4), 30)))
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert not any(x.is_inference() for x in (*model.parameters(), *model.buffers()))
    ids = torch.tensor([tokens(8)])
    loss = model(input_ids=ids, use_cache=False, plan=Causal()).logits.logsumexp(-1).sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_dropout_is_off_while_generating(llama: Any) -> None:
    model = hooked(llama)
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    model.train()
    own, _ = engine(model, owns=False)
    request = ask("a", tokens(4))
    assert_scored(llama, request, run(lambda: own.generate(request)))


def test_models_that_cannot_be_driven(llama: Any) -> None:
    with pytest.raises(ModelError, match=r"call treadle\.attention\.install"):
        engine(copy.deepcopy(llama))
    convolutional = build("Lfm2", layer_types=["conv", "full_attention"])
    own, _ = engine(hooked(convolutional))
    with pytest.raises(ModelError, match="1 of 2 layers of Lfm2ForCausalLM"):
        run(lambda: own.generate(ask("a", tokens(4))))


def test_a_sliding_window_is_a_limit() -> None:
    own, _ = engine(hooked(build("Mistral", sliding_window=30)))
    with pytest.raises(RolloutError, match="do not fit the model's context of 30"):
        run(lambda: own.generate(ask("a", tokens(20), 11)))
    assert len(run(lambda: own.generate(ask("a", tokens(20), 10))).token_C) == 10


def test_the_engine_is_a_rollout_handle(llama: Any) -> None:
    own, _ = engine(hooked(llama))
    handle: RolloutHandle = own
    assert all(isinstance(value, (int, float)) for value in handle.stats().values())
