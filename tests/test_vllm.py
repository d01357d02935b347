"""The vLLM rollout engine, always the real one: what it samples, how weights change under it, how engines die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine_help import logprobs, make_batch
from tests.vllm_help import ARCHITECTURES, VOCABULARY, Apart, ask, make_model, scores, tokens
from treadle.errors import RolloutError
from treadle.handles import OnPublish
from treadle.rollout.vllm.replica import VllmReplica, _engines
from treadle.types import Completion

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Apart]:
    """A trainer and two engines, of four requests each."""
    path = make_model(tmp_path_factory.mktemp("model"))
    decoder = AutoTokenizer.from_pretrained(tiny_model)
    apart = Apart(path, decoder=decoder, replicas=2, max_sequences=4, timeout=15.0, restarts=100)
    apart.run(apart.publish)
    yield apart
    apart.close()


def plain(pair: Apart) -> Any:
    """The trainer's weights in a Hugging Face model of its own, with nothing of ours in it."""
    model = AutoModelForCausalLM.from_pretrained(pair.trainer.model.name_or_path, dtype=torch.float32).eval()
    model.load_state_dict(pair.trainer.model.state_dict())
    return model


def assert_sampled_by(model: Any, pair: Apart, requests: list[Any], completions: list[Completion]) -> None:
    for request, completion in zip(requests, completions, strict=True):
        np.testing.assert_allclose(completion.logprob_C, scores(model, request, completion), atol=1e-4)


# ---------------------------------------------------------------------- what is sampled


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trainer_and_engine_agree(name: str, tmp_path: Path) -> None:
    """At the first publish, after one more, and after twenty; at three temperatures; by a plain forward pass, and by
    the trainer's own."""
    apart = Apart(make_model(tmp_path / "model", name), max_sequences=16)
    try:
        publishes = 0
        for until in (1, 2, 21):
            while publishes < until:
                if publishes:
                    apart.learn(0.01)
                apart.run(apart.publish)
                publishes += 1
            model = plain(apart)
            for temperature in (0.6, 1.0, 1.3):
                requests = [
                    ask(f"{until}/{temperature}.{i}", tokens(20 + i, seed=i), 12, temperature=temperature)
                    for i in range(4)
                ]

                async def all_of_them(requests: list[Any] = requests) -> list[Completion]:
                    return await asyncio.gather(*(apart.pool.generate(r) for r in requests))

                completions = apart.run(all_of_them)
                assert_sampled_by(model, apart, requests, completions)
                assert {int(v) for c in completions for v in c.version_C} == {publishes - 1}
                _assert_trainer_agrees(apart, requests[0], completions[0], temperature)
    finally:
        apart.close()


def _assert_trainer_agrees(apart: Apart, request: Any, completion: Completion, temperature: float) -> None:
    prompt, sampled = len(request.token_ids), len(completion.token_C)
    batch = make_batch([(prompt, sampled)], temperature=temperature)
    batch = batch.replace(token_T=torch.tensor([*request.token_ids, *completion.token_C.tolist()]))
    found = logprobs(apart.trainer, batch)[batch.mask_T].numpy()
    np.testing.assert_allclose(completion.logprob_C, found, atol=1e-4)


def test_more_prompts_than_one_pass_computes(tmp_path: Path) -> None:
    """vLLM would compute one of them in two parts, which it cannot do on a CPU for a request with noise of its own."""
    apart = Apart(make_model(tmp_path / "model"), max_sequences=16)
    try:
        apart.run(apart.publish)
        requests = [ask(f"long/{i}.0", tokens(450 + i, seed=i), 8) for i in range(16)]

        async def main() -> list[Completion]:
            return await asyncio.gather(*(apart.pool.generate(r) for r in requests))

        assert_sampled_by(plain(apart), apart, requests, apart.run(main))
    finally:
        apart.close()


def test_bfloat16_agrees_within_its_precision(tmp_path: Path) -> None:
    apart = Apart(make_model(tmp_path / "model"), dtype="bfloat16", tolerance=0.5, max_sequences=16)
    try:
        for number in range(4):
            if number:
                apart.learn(0.01)
            assert apart.run(apart.publish)["publish/probe_gap"].value < 0.3
        request = ask("a", tokens(30), 40)
        completion = apart.run(lambda: apart.pool.generate(request))
        _, gap = completion, np.abs(completion.logprob_C - scores(plain(apart), request, completion))
        assert gap.mean() < 0.05
        assert gap.max() < 0.4
    finally:
        apart.close()


def test_a_request_is_drawn_again_to_the_token(pair: Apart) -> None:
    request = ask("again", tokens(20), 30)
    one, two = (pair.run(lambda: pair.pool.generate(request)) for _ in range(2))
    other = pair.run(lambda: pair.pool.generate(ask("another", tokens(20), 30)))
    assert one.token_C.tolist() == two.token_C.tolist()
    assert one.token_C.tolist() != other.token_C.tolist()


def test_greedy_takes_the_likeliest_and_reports_its_log_prob_at_temperature_one(pair: Apart) -> None:
    request = ask("greedy", tokens(20), 12, temperature=0.0)
    completion = pair.run(lambda: pair.pool.generate(request))
    model, ids = plain(pair), list(request.token_ids)
    for token, logprob in zip(completion.token_C.tolist(), completion.logprob_C, strict=True):
        with torch.no_grad():
            found = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        assert token == int(found.argmax())
        assert float(logprob) == pytest.approx(float(found[token]), abs=1e-4)
        ids.append(token)


@pytest.mark.parametrize("limit", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 20, "top_p": 0.5}])
def test_top_k_and_top_p_keep_what_they_should_and_log_probs_are_of_what_is_left(
    limit: dict[str, Any], pair: Apart
) -> None:
    from treadle.rollout.embedded.sampling import truncate

    request = ask(f"cut {limit}", tokens(20), 12, temperature=0.8, **limit)
    completion = pair.run(lambda: pair.pool.generate(request))
    ids = torch.tensor([[*request.token_ids, *completion.token_C.tolist()]])
    with torch.no_grad():
        logits = plain(pair)(ids, use_cache=False).logits[0, 19:-1] / 0.8
    for row, token, logprob in zip(logits, completion.token_C.tolist(), completion.logprob_C, strict=True):
        kept = truncate(row, limit.get("top_k", 0), limit.get("top_p", 1.0)).log_softmax(-1)
        assert float(logprob) == pytest.approx(float(kept[token]), abs=1e-4)


def test_the_frequencies_are_those_of_the_distribution(pair: Apart) -> None:
    """A chi-square test over the likeliest first tokens of 600 samples."""
    prompt, count = tokens(9), 600

    async def many() -> list[Completion]:
        asked = (ask(f"often/{i}.0", prompt, 1, temperature=0.7) for i in range(count))
        return await asyncio.gather(*(pair.pool.generate(request) for request in asked))

    drawn = np.bincount([int(c.token_C[0]) for c in pair.run(many)], minlength=VOCABULARY)
    with torch.no_grad():
        logits = plain(pair)(torch.tensor([prompt]), use_cache=False).logits[0, -1] / 0.7
    expected = logits.double().softmax(-1).numpy() * count
    often = expected > 8
    seen = np.append(drawn[often], drawn[~often].sum())
    due = np.append(expected[often], expected[~often].sum())
    assert ((seen - due) ** 2 / due).sum() < len(due) + 5 * np.sqrt(2 * len(due))


def test_stop_tokens_and_stop_strings_end_an_answer_with_the_token_that_completes_them(pair: Apart) -> None:
    request = ask("stops", tokens(20), 40)
    whole = pair.run(lambda: pair.pool.generate(request)).token_C.tolist()
    stop = next(t for t in whole[5:] if t not in whole[:5])
    by_token = pair.run(lambda: pair.pool.generate(ask("stops", tokens(20), 40, stop_token_ids=(stop,))))
    assert by_token.token_C.tolist() == whole[: whole.index(stop) + 1]
    assert by_token.finish == "stop"
    assert pair.pool._decoder is not None
    text = pair.pool._decoder.decode(whole[8:10], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    by_text = pair.run(lambda: pair.pool.generate(ask("stops", tokens(20), 40, stop=(text,))))
    assert by_text.finish == "stop"
    assert by_text.token_C.tolist() == whole[: len(by_text.token_C)]
    assert len(by_text.token_C) <= 10
    assert pair.run(lambda: pair.pool.generate(request)).finish == "length"


def test_no_end_token_but_those_asked_for_ends_an_answer(pair: Apart) -> None:
    """The model's own end token is not asked for here."""
    found = pair.run(lambda: pair.pool.generate(ask("ends", tokens(8), 400, temperature=2.0)))
    assert len(found.token_C) == 400


def test_bad_requests_are_refused_by_name(pair: Apart) -> None:
    for request, match in [
        (ask("x", (), 4), "prompt is empty"),
        (ask("x", (VOCABULARY,), 4), "outside the model's vocabulary"),
        (ask("x", tokens(500), 40), "do not fit"),
        (ask("x", tokens(4), 0), "max_tokens 0"),
        (ask("x", tokens(4), 4, top_p=0.0), "top_p"),
    ]:
        with pytest.raises(RolloutError, match=match):
            pair.run(lambda request=request: pair.pool.generate(request))


def test_more_requests_than_fit_wait_their_turn_and_evaluation_goes_first(pair: Apart) -> None:
    async def main() -> list[str]:
        ended: list[str] = []

        async def one(name: str, priority: int) -> None:
            await pair.pool.generate(ask(name, tokens(20, seed=hash(name) % 97), 24, priority=priority))
            ended.append(name)

        usual = [asyncio.create_task(one(f"usual {i}", 1)) for i in range(24)]
        await asyncio.sleep(0)
        first = asyncio.create_task(one("evaluation", 0))
        await asyncio.gather(*usual, first)
        return ended

    ended = pair.run(main)
    assert ended.index("evaluation") < 20
    assert len(ended) == 25


def test_a_groups_prompt_is_computed_once(pair: Apart) -> None:
    async def main() -> None:
        for i in range(4):
            await pair.pool.generate(ask(f"shared.{i}", tokens(200, seed=77), 2))

    before = pair.pool.stats()
    pair.run(main)
    after = pair.pool.stats()
    assert max(after[f"{slot}/prefix_hits"] - before[f"{slot}/prefix_hits"] for slot in "01") > 0


# ---------------------------------------------------------------------- weights that change under requests


def versions(completion: Completion) -> list[int]:
    """The versions that sampled, in order, each once."""
    found = completion.version_C.tolist()
    assert found == sorted(found)
    return sorted(set(found))


@pytest.mark.parametrize("on_publish", ["drain", "resume", "continue"])
def test_weights_change_under_requests_and_every_token_has_the_version_that_sampled_it(
    on_publish: OnPublish, pair: Apart
) -> None:
    pair.publisher.on_publish = on_publish
    requests = [ask(f"flight/{on_publish}/{i}.0", tokens(40, seed=i), 400) for i in range(6)]

    async def main() -> tuple[list[Completion], list[int]]:
        running = [asyncio.create_task(pair.pool.generate(r)) for r in requests]
        published = []
        for _ in range(3):
            while pair.pool.stats()["tokens"] < seen[0] + 200 and not all(task.done() for task in running):
                await asyncio.sleep(0.01)
            seen[0] = int(pair.pool.stats()["tokens"])
            models.append(plain(pair))
            pair.learn(0.03)
            await pair.publish()
            published.append(pair.version)
        models.append(plain(pair))
        return await asyncio.gather(*running), published

    seen, models = [int(pair.pool.stats()["tokens"])], []
    first = pair.version
    completions, published = pair.run(main, 120)
    assert all(len(c.token_C) == 400 and c.finish == "length" for c in completions)
    assert any(len(versions(c)) >= (1 if on_publish == "drain" else 3) for c in completions)
    for request, completion in zip(requests, completions, strict=True):
        assert set(versions(completion)) <= {first, *published}
        if on_publish == "drain":
            assert len(versions(completion)) == 1
        for version, model in zip([first, *published], models, strict=True):
            mine = completion.version_C == version
            gap = np.abs(completion.logprob_C - scores(model, request, completion))[mine]
            if gap.size and (on_publish != "continue" or version == versions(completion)[0]):
                assert gap.max() < 1e-4  # to the token: a neighbour's is off by far more
            if gap.size and on_publish == "continue" and version != versions(completion)[0]:
                assert gap.max() > 1e-3  # keys and values of the old weights were kept
    pair.publisher.on_publish = "resume"


def test_pause_stops_between_tokens_and_sleep_too(pair: Apart) -> None:
    request = ask("held", tokens(30), 200)
    whole = pair.run(lambda: pair.pool.generate(request))

    async def main() -> Completion:
        running = asyncio.create_task(pair.pool.generate(request))
        for stop, go in ((pair.pool.pause, pair.pool.resume), (pair.pool.sleep, pair.pool.wake)):
            seen = pair.pool.stats()["tokens"]
            while pair.pool.stats()["tokens"] < seen + 20:
                await asyncio.sleep(0.01)
            await stop()
            seen = pair.pool.stats()["tokens"]
            waiting = asyncio.create_task(pair.pool.generate(ask("new", tokens(4), 2)))
            await asyncio.sleep(0.2)
            assert pair.pool.stats()["tokens"] == seen
            assert not waiting.done()
            await go()
            await waiting
        return await running

    assert pair.run(main).token_C.tolist() == whole.token_C.tolist()


# ---------------------------------------------------------------------- engines that die or hang


def process(pair: Apart, slot: str) -> int:
    replica = pair.pool._members[slot].replica
    assert isinstance(replica, VllmReplica)
    return replica._processes[0]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_outlive_their_engine(blow: signal.Signals, pair: Apart) -> None:
    """Killed, and stopped (which shows only by its silence); another engine takes its place and gets the weights."""
    requests = [ask(f"outlive/{blow}/{i}.0", tokens(40, seed=i), 300) for i in range(6)]

    async def main() -> list[Completion]:
        before = pair.pool.stats()
        running = [asyncio.create_task(pair.pool.generate(r)) for r in requests]
        while pair.pool.stats()["tokens"] < before["tokens"] + 300:
            await asyncio.sleep(0.01)
        os.kill(process(pair, "0"), blow)
        completions = await asyncio.gather(*running)
        after = pair.pool.stats()
        assert after["fenced"] == before["fenced"] + 1
        assert after["continued"] > before["continued"]
        while "0/running" not in pair.pool.stats():
            await asyncio.sleep(0.1)
        return completions

    assert_sampled_by(plain(pair), pair, requests, pair.run(main, 120))
    pair.learn()
    pair.run(pair.publish)


def test_an_engine_that_is_killed_in_a_publish_leaves_it_to_the_other(pair: Apart) -> None:
    replica = pair.pool._members["1"].replica
    assert isinstance(replica, VllmReplica)
    load = replica.load

    async def dies(version: int) -> Any:
        os.kill(replica._processes[0], signal.SIGKILL)
        return await load(version)

    replica.load = dies  # type: ignore[method-assign]
    pair.learn()

    async def main() -> Completion:
        await pair.publish()
        completion = await pair.pool.generate(ask("after", tokens(20), 10))
        while "1/running" not in pair.pool.stats():
            await asyncio.sleep(0.1)
        return completion

    assert versions(pair.run(main, 120)) == [pair.version]


def test_an_engine_alone_that_dies_is_replaced_until_its_restarts_are_used_up(tmp_path: Path) -> None:
    apart = Apart(make_model(tmp_path / "model"), restarts=1, timeout=15.0)
    try:
        apart.run(apart.publish)
        apart.learn()
        apart.run(apart.publish)
        request = ask("alone", tokens(40), 400)

        async def main() -> Completion:
            running = asyncio.create_task(apart.pool.generate(request))
            while apart.pool.stats()["tokens"] < 100:
                await asyncio.sleep(0.01)
            os.kill(process(apart, "0"), signal.SIGKILL)
            return await running

        assert_sampled_by(plain(apart), apart, [request], [apart.run(main, 120)])

        async def again() -> Completion:
            os.kill(process(apart, "0"), signal.SIGKILL)
            return await apart.pool.generate(ask("more", tokens(40), 400))

        with pytest.raises(RolloutError, match=r"no rollout engine is left: rollout\.restarts=1 are used up"):
            apart.run(again, 60)
    finally:
        apart.close()


def test_engines_join_and_leave(pair: Apart) -> None:
    async def main() -> list[Completion]:
        running = [asyncio.create_task(pair.pool.generate(ask(f"more/{i}.0", tokens(20, i), 60))) for i in range(12)]
        slot = await pair.pool.add()
        late = [asyncio.create_task(pair.pool.generate(ask(f"late/{i}.0", tokens(20, i), 20))) for i in range(12)]
        done = await asyncio.gather(*running, *late)
        assert f"{slot}/running" in pair.pool.stats()
        await pair.pool.remove(slot)
        assert f"{slot}/running" not in pair.pool.stats()
        return done

    assert all(versions(c) == [pair.version] for c in pair.run(main, 120))


def test_nothing_is_left_when_engines_are_closed(tmp_path: Path) -> None:
    before, shared = set(_engines()), set(Path("/dev/shm").iterdir())
    apart = Apart(make_model(tmp_path / "model"))
    apart.run(apart.publish)
    assert set(_engines()) - before

    async def closing() -> BaseException | Completion:
        running = asyncio.create_task(apart.pool.generate(ask("closing", tokens(40), 400)))
        while apart.pool.stats()["tokens"] < 20:
            await asyncio.sleep(0.01)
        await apart.pool.close()
        return (await asyncio.gather(running, return_exceptions=True))[0]

    assert isinstance(apart.run(closing), RolloutError)
    apart.close()
    assert set(_engines()) - before == set()
    assert [p for p in set(Path("/dev/shm").iterdir()) - shared if p.name.startswith("treadle")] == []
