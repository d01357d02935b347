"""What tests of prompt sources share: a renderer without a model, sources by configuration, a restart, groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treadle.config import load
from treadle.data.config import DataConfig, make_source
from treadle.data.rendering import Renderer
from treadle.data.source import Order
from treadle.handles import PromptSource
from treadle.types import Ended, Group, Kind, Prompt, Reward, Sample, Trajectory


class Bytes:
    """A tokenizer whose tokens are bytes, and whose chat template is as plain."""

    chat_template = "plain"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in conversation)


def renderer(max_tokens: int = 1000) -> Renderer:
    return Renderer(Bytes(), chat=True, max_tokens=max_tokens)


def source(train: str, order: Order | None = None, max_tokens: int = 1000, overrides: Sequence[str] = ()) -> Any:
    """The source that `train=…` configures."""
    config = load(DataConfig, None, [f"train={train}", *overrides]).train
    config.check()
    return make_source(config, renderer(max_tokens), order or Order())


def after_restart(old: PromptSource, new: PromptSource) -> PromptSource:
    """`new`, at the place of `old`, by way of a checkpoint."""
    new.restore(json.loads(json.dumps(old.state())))
    return new


def take(prompts: PromptSource, count: int) -> list[Prompt]:
    found = [prompts.next() for _ in range(count)]
    return [prompt for prompt in found if prompt is not None]


def group(prompt: Prompt, *rewards: float, failed: int = 0) -> Group:
    """A group of samples with these rewards, and some that failed."""

    def sample(number: int, reward: float | None) -> Sample:
        empty = np.empty(0)
        trajectory = Trajectory(
            prompt, empty, empty, empty, empty, (), Ended.TERMINATED, reward=None if reward is None else Reward(reward)
        )
        return Sample(f"{prompt.index}.{number}", Kind.TRAIN, (trajectory,), "broken" if reward is None else None)

    values = [*rewards, *[None] * failed]
    return Group(prompt.index, prompt, tuple(sample(i, value) for i, value in enumerate(values)))


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
