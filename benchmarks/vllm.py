"""The vLLM engine on this machine: how fast it generates beside the embedded engine, and what a publish costs.

    python -m benchmarks.vllm generate [--rows 8 32 64] [--rounds 5] [--dtype float32]
    python -m benchmarks.vllm publish [--rounds 9]
    python -m benchmarks.vllm agree [--dtype bfloat16]

Both engines get the same requests (prompts of about 50 tokens in groups of 8, all tokens sampled) in alternating
rounds, each on all cores, the other one idle; the figures are medians. vLLM runs as it is fastest here: eager or
compiled, with and without the libraries that it recommends to preload (`--compiled`, LD_PRELOAD from outside).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from treadle.agents.single_turn import SingleTurn
from treadle.algorithms.grpo import GRPO
from treadle.controller.device import LocalDevice
from treadle.controller.local import LocalGroup
from treadle.engines.torch.config import Config as TorchConfig
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.model import load_model, load_tokenizer
from treadle.handles import Generator
from treadle.rollout.embedded.config import Config as EmbeddedConfig
from treadle.rollout.embedded.engine import EmbeddedEngine
from treadle.rollout.vllm.config import Config
from treadle.rollout.vllm.engine import VllmEngine
from treadle.types import Prompt, SamplingParams, TokenRequest, noise_key
from treadle.weights.publish import SHORT_PROBE, Prober, ShippingPublisher, probe_tokens
from treadle.workers.models import PolicyWorker

MODEL = "models/smollm2"
PROMPT, GROUP = 50, 8


class Pair:
    """Both engines over one model, and a policy that publishes to vLLM."""

    def __init__(self, dtype: str) -> None:
        self.device = LocalDevice()
        self.tokenizer = load_tokenizer(MODEL)
        self.dtype = dtype

    async def open(self, engine_args: dict[str, Any], weights: dict[str, Any]) -> None:
        config = TorchConfig(dtype=cast(Any, self.dtype))
        trainer = await self.device.run(lambda: TorchEngine(load_model(MODEL, self.dtype), config, total_steps=1))
        self.trainer = trainer
        policy = LocalGroup(PolicyWorker(trainer, GRPO()), self.device)
        self.embedded = EmbeddedEngine(trainer.model, self.tokenizer, EmbeddedConfig(), self.device, owns_weights=False)
        settings = Config(engine_args=engine_args, weights=cast(Any, weights))
        self.vllm = await VllmEngine.start(
            MODEL,
            settings,
            dtype=self.dtype,
            context=512,
            vocabulary=trainer.model.config.vocab_size,
            decoder=self.tokenizer,
            directory=Path("runs"),
            overlaps=False,
        )
        prober = Prober(
            policy=cast(Any, policy),
            probe=Prompt("probe", 0, (), probe_tokens(tuple(self.tokenizer.encode("The quick brown fox")), 512)),
            agent=SingleTurn(self.tokenizer, SHORT_PROBE, 0),
            tolerance=0.5,
        )
        self.publisher = ShippingPublisher(cast(Any, policy), cast(Any, self.vllm), prober, "resume")
        self.policy = policy
        await self.publisher(0)

    async def close(self) -> None:
        await self.vllm.close()
        await self.embedded.close()
        await self.policy.close()
        self.device.close()


def requests(rows: int, tokens: int, seed: int) -> list[TokenRequest]:
    make = torch.Generator().manual_seed(seed)
    found = []
    for row in range(rows):
        if row % GROUP == 0:
            prompt = tuple(torch.randint(100, 40000, (PROMPT,), generator=make).tolist())
        name = f"{seed}/{row // GROUP}.{row % GROUP}"
        params = SamplingParams(max_tokens=tokens)
        found.append(TokenRequest(name, prompt, params, noise_key(seed, name), prefix=name.partition(".")[0]))
    return found


async def rate(engine: Generator, rows: int, tokens: int, seed: int) -> float:
    """Tokens a second."""
    started = time.perf_counter()
    done = await asyncio.gather(*(engine.generate(request) for request in requests(rows, tokens, seed)))
    return sum(len(c.token_C) for c in done) / (time.perf_counter() - started)


async def generate(pair: Pair, options: argparse.Namespace) -> None:
    for rows in options.rows:
        found: dict[str, list[float]] = {"embedded": [], "vllm": []}
        for number in range(options.rounds + 1):  # the first warms up
            for name, engine in (("embedded", pair.embedded), ("vllm", pair.vllm)):
                found[name].append(await rate(engine, rows, options.tokens, number))
        ours, theirs = (statistics.median(found[name][1:]) for name in ("embedded", "vllm"))
        print(f"{rows:3} rows  embedded {ours:6.0f} tokens/s  vLLM {theirs:6.0f} tokens/s  ratio {ours / theirs:.2f}")


async def publish(pair: Pair, options: argparse.Namespace) -> None:
    found: list[dict[str, float]] = []
    for version in range(1, options.rounds + 2):
        with torch.no_grad():
            for parameter in pair.trainer.model.parameters():
                parameter.add_(1e-5 * torch.randn_like(parameter))
        found.append({name: value.value for name, value in (await pair.publisher(version)).items()})
    names = list(found[0])
    middle = {name: statistics.median(row[name] for row in found[1:]) for name in names}
    for name, value in middle.items():
        print(f"{name:22} {value:10.4f}")
    proof = middle["publish/readback"] + middle["publish/probe"]
    whole = middle["publish/seconds"]
    print(f"read back and probe: {proof / whole:.1%} of a publish; digests {middle['publish/digest']:.3f} s a side")


async def agree(pair: Pair, options: argparse.Namespace) -> None:
    """Log-probs of sampled tokens by vLLM against the trainer's model in float32, after 0, 1 and 20 more publishes."""
    version = 0
    for publishes in (0, 1, 20):
        while version < publishes:
            version += 1
            with torch.no_grad():
                for parameter in pair.trainer.model.parameters():
                    parameter.add_(1e-4 * torch.randn_like(parameter))
            await pair.publisher(version)
        exact = await pair.device.run(lambda: copy.deepcopy(pair.trainer.model).float())
        exact.set_attn_implementation("eager")
        for temperature in (0.6, 1.0, 1.3):
            gaps = []
            asked = [
                replace(r, params=SamplingParams(temperature, max_tokens=options.tokens))
                for r in requests(16, 0, version)
            ]
            done = await asyncio.gather(*(pair.vllm.generate(request) for request in asked))
            for request, completion in zip(asked, done, strict=True):
                ids = torch.tensor([[*request.token_ids, *completion.token_C.tolist()]])
                with torch.no_grad():
                    logits = exact(ids, use_cache=False).logits[0, PROMPT - 1 : -1] / temperature
                found = logits.log_softmax(-1).gather(-1, torch.from_numpy(completion.token_C)[:, None])[:, 0]
                gaps.append((found - torch.from_numpy(completion.logprob_C)).abs())
            gap = torch.cat(gaps)
            median, high, most = gap.quantile(torch.tensor([0.5, 0.99, 1.0])).tolist()
            print(
                f"{pair.dtype}, {publishes:2} publishes, temperature {temperature}: mean {gap.mean():.1e}, median "
                f"{median:.1e}, 99 % {high:.1e}, max {most:.1e} nats over {len(gap)} tokens"
            )


async def main(options: argparse.Namespace) -> None:
    work: Callable[[Pair, argparse.Namespace], Awaitable[None]] = {
        "generate": generate,
        "publish": publish,
        "agree": agree,
    }[options.what]
    pair = Pair(options.dtype)
    engine_args = {"enforce_eager": not options.compiled}
    await pair.open(
        engine_args, {"transport": options.transport, "staged": not options.unstaged, "delta": options.delta}
    )
    try:
        await work(pair, options)
    finally:
        await pair.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["generate", "publish", "agree"])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--transport", default="shared_memory")
    parser.add_argument("--unstaged", action="store_true")
    parser.add_argument("--delta", action="store_true")
    asyncio.run(main(parser.parse_args()))
