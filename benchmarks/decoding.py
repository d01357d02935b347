"""Tokens per second of the embedded engine against transformers `generate` and the bare matrix products.

    python -m benchmarks.decoding [MODEL] --rows 64 --rows 16      same lengths, prompts in groups of 8
    python -m benchmarks.decoding [MODEL] --rows 16 --ragged       lengths of 8 to 512, arriving over time
    python -m benchmarks.decoding --architecture Qwen3             a random model of that architecture

The contenders take turns, round by round, so that whatever else the machine does hits all alike; the ratios are medians
of the rounds' ratios. Every contender samples at temperature 1 in the model's own type, and no answer stops early.
*Products* are the matrix products of the decode steps alone, as torch runs them on the joined weights of each layer:
what a step could not be faster than without another product (experts, which are no linear layers, are not counted).

Ragged, `generate` takes as many sequences as there are rows, in order of arrival and without waiting for it, and runs
until the longest is done; tokens count that were asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from treadle.attention import install
from treadle.controller.device import LocalDevice, alone
from treadle.native import library
from treadle.rollout.embedded.config import Config
from treadle.rollout.embedded.engine import EmbeddedEngine
from treadle.types import SamplingParams, TokenRequest, noise_key

GROUP = 8
SHAPE = {  # of random models: small, but not so small that the Python between two products is all there is
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 1}
SPECIAL: dict[str, dict[str, Any]] = {"Qwen3": {"head_dim": 64}, "Qwen3Moe": {"head_dim": 64, **EXPERTS}}


@dataclass(frozen=True)
class Ask:
    """One sequence: its prompt, the tokens it samples, when it arrives."""

    group: int
    prompt: tuple[int, ...]
    new: int
    after: float  # seconds

    def request(self, name: str) -> TokenRequest:
        return TokenRequest(
            name, self.prompt, SamplingParams(max_tokens=self.new), noise_key(0, name), prefix=str(self.group)
        )


def even(rows: int, prompt: int, new: int, vocabulary: int) -> list[Ask]:
    """Groups of one prompt each, all at once."""
    prompts = [_prompt(seed, prompt, vocabulary) for seed in range(-(-rows // GROUP))]
    return [Ask(i // GROUP, prompts[i // GROUP], new, 0.0) for i in range(rows)]


def ragged(rows: int, prompt: int, vocabulary: int) -> list[Ask]:
    """Three times as many as there are rows, 8 to 512 tokens each, most of them short; one arrives every 50 ms."""
    spread = torch.rand(3 * rows, generator=torch.Generator().manual_seed(7)).tolist()
    lengths = [round(8 * 64**x) for x in spread]
    return [
        Ask(i // GROUP, _prompt(i // GROUP, prompt + i // GROUP % 9, vocabulary), length, 0.05 * i)
        for i, length in enumerate(lengths)
    ]


def _prompt(seed: int, length: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


class Ours:
    """The embedded engine as the runtime drives it: requests one by one, every pass on the device's thread."""

    def __init__(self, model: Any, rows: int, kernels: Any, device: LocalDevice) -> None:
        install(model)
        self.engine = EmbeddedEngine(
            model, None, Config(max_sequences=rows, kernels=kernels), device, owns_weights=True
        )

    def __call__(self, asks: Sequence[Ask]) -> None:
        async def one(name: str, ask: Ask) -> None:
            await asyncio.sleep(ask.after)
            completion = await self.engine.generate(ask.request(name))
            assert len(completion.token_C) == ask.new

        async def main() -> None:
            await asyncio.gather(*[one(str(i), ask) for i, ask in enumerate(asks)])

        asyncio.run(main())


def generate(model: Any, asks: Sequence[Ask], rows: int) -> None:
    """Static batches of `rows`, padded on the left."""
    for begin in range(0, len(asks), rows):
        batch = asks[begin : begin + rows]
        width, new = max(len(a.prompt) for a in batch), max(a.new for a in batch)
        ids = torch.tensor([(0,) * (width - len(a.prompt)) + a.prompt for a in batch])
        mask = torch.tensor([(0,) * (width - len(a.prompt)) + (1,) * len(a.prompt) for a in batch])
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "temperature": 1.0, "top_k": 0}
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, top_p=1.0, **settings)
        assert out.shape == (len(batch), width + new)


class Products:
    """The linear layers of one decode step, those of one input joined."""

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        names = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
        joined: dict[str, list[torch.Tensor]] = {}
        for name, linear in names.items():
            last = name.rpartition(".")[2]
            together = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gu", "up_proj": "gu"}
            joined.setdefault(name.removesuffix(last) + together.get(last, last), []).append(linear.weight.detach())
        self.weights = [torch.cat(parts) for parts in joined.values()] + [head.weight.detach()]

    def __call__(self, rows: int, steps: int) -> None:
        inputs = {
            size: torch.randn(rows, size).to(self.weights[0].dtype) for size in {w.shape[1] for w in self.weights}
        }
        for _ in range(steps):
            for weight in self.weights:
                F.linear(inputs[weight.shape[1]], weight)


def load(model: str, architecture: str | None, dtype: torch.dtype) -> Any:
    if architecture is None:
        return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    config = getattr(transformers, f"{architecture}Config")(**{**SHAPE, **SPECIAL.get(architecture, {})})
    torch.manual_seed(0)
    return getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()


def available() -> list[str]:
    return ["torch", "native"] if library.built() else ["torch"]


def there(device: LocalDevice, call: Callable[[], None]) -> None:
    """On the thread that the engine computes on: its team of threads should be the only one."""
    asyncio.run(device.run(call))


def seconds(call: Callable[..., None], *arguments: Any) -> float:
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


@click.command()
@click.argument("model", default="models/smollm2")
@click.option("--architecture", help="a random model of this architecture instead, such as Qwen2")
@click.option("--rows", multiple=True, type=click.IntRange(min=1), default=(64, 32, 16, 5, 1), show_default=True)
@click.option("--new", default=128, show_default=True, help="tokens that each sequence samples")
@click.option("--prompt", default=50, show_default=True, help="tokens of a prompt")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--kernels", multiple=True, type=click.Choice(["torch", "native"]), help="[default: those there are]")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--ragged", "is_ragged", is_flag=True, help="lengths of 8 to 512 tokens, arriving over time")
def main(
    model: str,
    architecture: str | None,
    rows: tuple[int, ...],
    new: int,
    prompt: int,
    dtype: str,
    kernels: tuple[str, ...],
    rounds: int,
    is_ragged: bool,
) -> None:
    """Measure decoding. MODEL is a Hugging Face model directory."""
    transformers.logging.set_verbosity_error()
    theirs = load(model, architecture, getattr(torch, dtype))
    hooked, bare = load(model, architecture, getattr(torch, dtype)), Products(theirs)
    vocabulary = theirs.config.vocab_size
    device = LocalDevice(torch.get_num_threads())
    with alone():
        for count in rows:
            asks = ragged(count, prompt, vocabulary) if is_ragged else even(count, prompt, new, vocabulary)
            tokens = sum(a.new for a in asks)
            ours = {name: Ours(hooked, count, name, device) for name in kernels or available()}
            contenders: dict[str, Callable[[list[Ask]], float]] = {
                **{f"treadle, {name} kernels": partial(seconds, engine) for name, engine in ours.items()},
                "generate": lambda asks, count=count: seconds(there, device, partial(generate, theirs, asks, count)),
                "products": lambda asks, count=count: (
                    seconds(there, device, partial(bare, count, 3)) / 3 * sum(a.new for a in asks) / count
                ),
            }
            for run in contenders.values():  # warm up
                run([Ask(a.group, a.prompt, 3, 0.0) for a in asks[:count]])
            times = [{name: run(asks) for name, run in contenders.items()} for _ in range(rounds)]
            shape = "ragged" if is_ragged else f"{new} tokens each"
            print(f"\n{architecture or Path(model).name}, {dtype}, {count} rows, {shape}, {rounds} rounds")
            print(f"{'':24}{'tokens/s':>9}{'× generate':>12}{'of products':>13}")
            for name in contenders:
                speed = tokens / median(t[name] for t in times)
                ratio, share = (median(t[other] / t[name] for t in times) for other in ("generate", "products"))
                print(f"{name:24}{speed:9.1f}{ratio:12.2f}{share:13.0%}", flush=True)
    device.close()


if __name__ == "__main__":
    main()
