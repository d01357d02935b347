"""Configuration of prompts, and the way from it to a source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from treadle.config import Config, key, plugin, plugin_class
from treadle.data.rendering import Renderer
from treadle.data.source import Order, SourceConfig

if TYPE_CHECKING:
    from treadle.data.rendering import Tokenizer
    from treadle.handles import PromptSource

FOLDER = "treadle.data"
_BY_ENDING = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}


class _OrPath:
    """Annotates a source: `path.parquet` is short for `{name: parquet, path: path.parquet}`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_from_path, handler(source))

    def __get_pydantic_json_schema__(self, source: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        path = {"type": "string", "pattern": rf"\.({'|'.join(_BY_ENDING.values())})$"}
        return {"anyOf": [handler(source), path]}


def _from_path(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name = _BY_ENDING.get(Path(value).suffix)
    if name is None:
        raise ValueError(
            f"{value!r} does not end in {', '.join(_BY_ENDING)}, so what it holds is not known: give a section, e.g. "
            "{name: hf, path: …}"
        )
    return {"name": name, "path": value}


Source = Annotated[SourceConfig, plugin(FOLDER), _OrPath()]


class WeightedSource(Config):
    """A source that is mixed with others."""

    weight: float = key("its share of the prompts, relative to the other weights", default=1.0, gt=0, le=1e9)
    source: Source = key("where they come from, e.g. {name: parquet, path: …}")


class DataConfig(Config):
    """Where prompts come from and how they become tokens."""

    train: Source = key("source of training prompts: {name: jsonl, path: …}, or a path that ends in .jsonl, …")
    evaluation: Source | None = key("source of held-out prompts, read once and in order; null: none", default=None)
    shuffle: bool = key("training prompts in an order drawn anew for each epoch", default=True)
    epochs: int | None = key("passes over the training prompts; null: without end", default=None, ge=1, le=1 << 20)
    chat: bool = key("render prompts through the tokenizer's chat template", default=True)
    max_prompt_tokens: int = key("longer prompts are kept out and counted", default=1024, ge=1, le=1 << 24)

    def check(self) -> None:
        """Look whether the data are there, before anything heavy is loaded. Raises DataError or ConfigError."""
        for source in (self.train, self.evaluation):
            if source is not None:
                source.check()


def train_source(config: DataConfig, tokenizer: Tokenizer, seed: int) -> PromptSource:
    """Training prompts in the order that `seed` fixes. Raises ConfigError or DataError."""
    return make_source(config.train, _renderer(config, tokenizer), Order(seed, config.shuffle, config.epochs))


def evaluation_source(config: DataConfig, tokenizer: Tokenizer) -> PromptSource | None:
    """Held-out prompts, once and in the data's own order; None where there are none configured."""
    return None if config.evaluation is None else make_source(config.evaluation, _renderer(config, tokenizer), Order())


def make_source(config: SourceConfig, renderer: Renderer, order: Order) -> PromptSource:
    """The source that `config` describes."""
    return plugin_class(config.name, FOLDER)(config, renderer, order)


def _renderer(config: DataConfig, tokenizer: Tokenizer) -> Renderer:
    return Renderer(tokenizer, chat=config.chat, max_tokens=config.max_prompt_tokens)
