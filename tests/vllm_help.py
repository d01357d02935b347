"""A trainer and real vLLM engines, each in a process of its own; the loop that drives them has a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import transformers

from treadle.agents.single_turn import SingleTurn
from treadle.algorithms.grpo import GRPO
from treadle.controller.device import LocalDevice
from treadle.controller.local import LocalGroup
from treadle.engines.torch.config import Config as TorchConfig
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.model import load_model
from treadle.handles import OnPublish
from treadle.rollout.vllm.config import Config
from treadle.rollout.vllm.engine import VllmEngine
from treadle.types import Completion, Prompt, SamplingParams, Statistics, TokenRequest, noise_key
from treadle.weights.publish import SHORT_PROBE, Prober, ShippingPublisher, probe_tokens
from treadle.workers.models import PolicyWorker

T = TypeVar("T")
CONTEXT = 512
VOCABULARY = 320
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


def make_model(path: Path, name: str = "Llama", **changes: Any) -> Path:
    """A random model, spread enough that every weight matters, as a directory."""
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **ARCHITECTURES.get(name, {}), **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(path)
    return path


class Apart:
    """`trainer` in this process, `pool` of vLLM engines in others, and what publishes from one to the other."""

    def __init__(
        self,
        model: Path,
        *,
        dtype: str = "float32",
        tolerance: float = 1e-3,
        extension: str = "treadle.rollout.vllm.worker.WorkerExtension",
        decoder: Any = None,
        on_publish: OnPublish = "resume",
        **config: Any,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.device = LocalDevice(threads=2)
        self.trainer = TorchEngine(
            load_model(str(model), dtype), TorchConfig(dtype=cast(Any, dtype), learning_rate=1e-2), total_steps=10
        )
        self.policy = LocalGroup(PolicyWorker(self.trainer, GRPO()), self.device)
        self.pool = self.run(
            lambda: VllmEngine.start(
                str(model),
                Config(**{"kv_cache_gb": 0.1, "threads": 1, **config}),
                dtype=dtype,
                context=CONTEXT,
                vocabulary=self.trainer.model.get_input_embeddings().weight.shape[0],
                decoder=decoder,
                directory=model,
                extension=extension,
            ),
            180,
        )
        prober = Prober(
            policy=cast(Any, self.policy),
            probe=Prompt("probe", 0, (), probe_tokens((5, 6, 7, 8, 9), CONTEXT)),
            agent=SingleTurn(_Text(), SHORT_PROBE, 0),
            tolerance=tolerance,
        )
        self.publisher = ShippingPublisher(cast(Any, self.policy), cast(Any, self.pool), prober, on_publish)
        self.version = -1

    def run(self, work: Callable[[], Awaitable[T]], timeout: float = 60) -> T:
        """The result of a coroutine, on the engines' loop."""

        async def main() -> T:
            return await asyncio.wait_for(work(), timeout)

        return asyncio.run_coroutine_threadsafe(main(), self._loop).result()

    async def publish(self) -> Statistics:
        self.version += 1
        return await self.publisher(self.version)

    def learn(self, size: float = 0.02) -> None:
        """Stands for an optimizer step: every weight moves."""
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                parameter.add_(size * torch.randn_like(parameter))

    def close(self) -> None:
        self.run(self.pool.close)
        self.run(self.policy.close)
        self.device.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Text:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""


def ask(
    name: str, prompt: Sequence[int], max_tokens: int = 16, *, temperature: float = 1.0, priority: int = 1, **more: Any
) -> TokenRequest:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, **more)
    return TokenRequest(
        id=name,
        token_ids=tuple(prompt),
        params=params,
        noise=noise_key(0, name),
        prefix=name.partition(".")[0],
        priority=priority,
    )


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, VOCABULARY, count).tolist())


def scores(model: Any, request: TokenRequest, completion: Completion) -> np.ndarray:
    """Log-probs of what was sampled by one plain forward pass of a Hugging Face model; float32 [C]."""
    ids = torch.tensor([[*request.token_ids, *completion.token_C.tolist()]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(request.token_ids) - 1 : -1].float()
    logprobs = (logits / (request.params.temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(-1, torch.from_numpy(completion.token_C)[:, None])[:, 0].numpy()
