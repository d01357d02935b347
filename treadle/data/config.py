"""Configuration of prompts, and the way from it to a source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from treadle.config import Config, key, plugin, plugin_class
from treadle.data.rendering import Renderer
from treadle.data.source import Order, SourceConfig

if TYPE_CHECKING:
    from treadle.data.rendering import Tokenizer
    from treadle.handles import PromptSource

FOLDER = "treadle.data"


class DataConfig(Config):
    """Where prompts come from and how they become tokens."""

    train: Annotated[SourceConfig, plugin(FOLDER)] = key("source of training prompts, e.g. {name: jsonl, path: …}")
    evaluation: Annotated[SourceConfig, plugin(FOLDER)] | None = key(
        "source of held-out prompts, read once and in order; null: none", default=None
    )
    shuffle: bool = key("training prompts in an order drawn anew for each epoch", default=True)
    epochs: int | None = key("passes over the training prompts; null: without end", default=None, ge=1, le=1 << 20)
    chat: bool = key("render prompts through the tokenizer's chat template", default=True)
    max_prompt_tokens: int = key("longer prompts are kept out and counted", default=1024, ge=1, le=1 << 24)


def train_source(config: DataConfig, tokenizer: Tokenizer, seed: int) -> PromptSource:
    """Training prompts in the order that `seed` fixes. Raises ConfigError or DataError."""
    return _source(config, config.train, tokenizer, Order(seed, config.shuffle, config.epochs))


def evaluation_source(config: DataConfig, tokenizer: Tokenizer) -> PromptSource | None:
    """Held-out prompts, once and in the data's own order; None where there are none configured."""
    return None if config.evaluation is None else _source(config, config.evaluation, tokenizer, Order())


def _source(config: DataConfig, source: SourceConfig, tokenizer: Tokenizer, order: Order) -> PromptSource:
    renderer = Renderer(tokenizer, chat=config.chat, max_tokens=config.max_prompt_tokens)
    return plugin_class(source.name, FOLDER)(source, renderer, order)
