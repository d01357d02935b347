"""Publishing on the real engines: sound ones pass, sabotaged ones are caught at that publish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from treadle.agents.single_turn import SingleTurn
from treadle.algorithms.grpo import GRPO
from treadle.controller.device import LocalDevice
from treadle.controller.local import LocalGroup
from treadle.engines.torch.config import Config as TorchConfig
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.model import load_model, load_tokenizer
from treadle.errors import RolloutError, WeightSyncError
from treadle.handles import ModelHandle
from treadle.rollout.embedded.config import Config as EmbeddedConfig
from treadle.rollout.embedded.engine import EmbeddedEngine
from treadle.types import Prompt, SamplingParams
from treadle.weights.publish import LocalPublisher, Prober
from treadle.workers.models import PolicyWorker

Weights = Iterator[tuple[str, torch.Tensor]]


class Pair:
    """A trainer and a rollout engine with its own copy of the weights (or, `shared`, the same)."""

    def __init__(self, path: Path, shared: bool = False) -> None:
        self.device = LocalDevice(threads=1)
        config = TorchConfig(dtype="float32", learning_rate=1e-2)
        self.trainer = TorchEngine(load_model(str(path), "float32"), config, total_steps=10)
        self.model: Any = self.trainer.model if shared else load_model(str(path), "float32")
        tokenizer = load_tokenizer(str(path))
        self.rollout = EmbeddedEngine(self.model, tokenizer, EmbeddedConfig(), self.device, owns_weights=not shared)
        self.publisher = LocalPublisher(
            rollout=self.rollout,
            device=self.device,
            prober=Prober(
                policy=cast(ModelHandle, LocalGroup(PolicyWorker(self.trainer, GRPO()), self.device)),
                probe=Prompt("probe", 0, (), (1, 2, 3)),
                agent=SingleTurn(tokenizer, SamplingParams(temperature=0.0, max_tokens=4), seed=0),
                tolerance=1e-3,
            ),
            on_publish="resume",
            sent=None if shared else self.trainer.export,
            held=None if shared else lambda: self.model.state_dict().items(),
        )

    def learn(self, size: float = 0.02) -> None:
        """Stand for an optimizer step: every weight moves."""
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                parameter.add_(size * torch.randn_like(parameter))

    def run(self, main: Callable[[], Any]) -> Any:
        async def closing() -> Any:
            try:
                return await main()
            finally:
                await self.rollout.close()

        try:
            return asyncio.run(closing())
        finally:
            self.device.close()


@pytest.mark.parametrize("shared", [False, True])
def test_sound_publishes_raise_no_alarm(shared: bool, tiny_model: Path) -> None:
    pair = Pair(tiny_model, shared)

    async def main() -> list[float]:
        gaps = []
        for version in range(20):
            gaps.append((await pair.publisher(version))["publish/probe_gap"].value)
            pair.learn()
        return gaps

    assert max(pair.run(main)) < 1e-4


def tampered(weights: Any, at: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    for number, (name, tensor) in enumerate(weights):
        yield name, change(tensor.clone()) if number == at else tensor


def flip(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] += 1e-6
    return tensor


@pytest.mark.parametrize("at", [0, 3, 18])
def test_one_changed_bit_on_the_way_is_named(at: int, tiny_model: Path) -> None:
    pair = Pair(tiny_model)
    names = [name for name, _ in pair.trainer.export()]
    load = pair.rollout.load

    async def tampering(weights: Any, version: int, on_publish: Any) -> None:
        await load(tampered(weights, at, flip), version, on_publish)

    pair.publisher.rollout.load = tampering  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=names[at]):
        pair.run(lambda: pair.publisher(1))


def test_a_tensor_that_was_never_sent_is_named(tiny_model: Path) -> None:
    pair = Pair(tiny_model)
    *_, last = (name for name, _ in pair.trainer.export())
    pair.publisher.sent = lambda: (item for item in pair.trainer.export() if item[0] != last)
    with pytest.raises(WeightSyncError, match=last):
        pair.run(lambda: pair.publisher(1))


def test_an_engine_that_did_not_load_is_caught_by_its_behaviour(tiny_model: Path) -> None:
    pair = Pair(tiny_model)
    pair.learn()
    pair.publisher.held = pair.trainer.export  # the bytes claim to be there

    async def pretended(weights: Any, version: int, on_publish: Any) -> None:
        pair.rollout._version = version

    pair.publisher.rollout.load = pretended  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="nats on a probe"):
        pair.run(lambda: pair.publisher(1))


@pytest.mark.parametrize("size", [5e-6, 5e-5])
def test_even_a_small_step_that_did_not_arrive_is_caught(size: float, tiny_model: Path) -> None:
    """Weights that stay one small step behind look like slow learning; the tolerance alone would let them pass."""
    pair = Pair(tiny_model)
    load = pair.rollout.load
    old = {name: tensor.clone() for name, tensor in pair.trainer.export()}

    async def behind(weights: Any, version: int, on_publish: Any) -> None:
        await load(old.items(), version, on_publish)

    pair.publisher.held = pair.trainer.export  # the bytes claim to be there
    pair.publisher.rollout.load = behind  # type: ignore[method-assign]

    async def main() -> None:
        await pair.publisher(0)
        pair.learn(size)
        with pytest.raises(WeightSyncError, match="as the version before"):
            await pair.publisher(1)

    pair.run(main)


def test_an_engine_that_keeps_the_old_version_is_caught(tiny_model: Path) -> None:
    pair = Pair(tiny_model, shared=True)

    async def forgotten(weights: Any, version: int, on_publish: Any) -> None: ...

    pair.publisher.rollout.load = forgotten  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"version 1 .*carry \[0\]"):
        pair.run(lambda: pair.publisher(1))


def test_weights_that_are_not_numbers_do_not_pass(tiny_model: Path) -> None:
    pair = Pair(tiny_model, shared=True)
    with torch.no_grad():
        pair.trainer.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RolloutError, match="not finite"):
        pair.run(lambda: pair.publisher(1))
