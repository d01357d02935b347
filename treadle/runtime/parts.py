"""What every run has, wherever its roles work."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from treadle.agents.single_turn import SingleTurn
from treadle.algorithms.base import Role
from treadle.config import plugin_class
from treadle.data.config import evaluation_source, train_source
from treadle.data.source import prompts
from treadle.errors import ConfigError, RunError
from treadle.handles import (
    Cost,
    ModelHandle,
    PromptSource,
    Publisher,
    RewardFunction,
    RolloutHandle,
    Scorer,
    TrainedHandle,
)
from treadle.recipes.config import EvaluationConfig, RLConfig, SamplingConfig
from treadle.recipes.measure import Speed
from treadle.rewards.model import ModelReward
from treadle.rewards.scorer import function_name, make_scorer
from treadle.types import Prompt, SamplingParams
from treadle.weights.publish import PROBE, PROBE_TOKENS, TOLERANCE, Prober, probe_tokens


@dataclass(frozen=True)
class Frame:
    """What there is before a model is loaded."""

    config: RLConfig
    tokenizer: Any
    context: int  # tokens of a prompt and its answer that are served
    source: PromptSource
    held_out: list[Prompt]
    scorer: Scorer
    reward_model: ModelReward | None  # which waits for the role to `serve`

    def prober(self, policy: ModelHandle, answered: SamplingParams) -> Prober:
        text = tuple(self.tokenizer.encode("The quick brown fox"))
        return Prober(
            policy=policy,
            probe=Prompt("probe", 0, (), probe_tokens(text, self.context)),
            agent=SingleTurn(self.tokenizer, answered, self.config.seed),
            tolerance=TOLERANCE[self.config.trainer.dtype],
        )


@dataclass(frozen=True)
class Parts:
    """Live roles."""

    frame: Frame
    ends: tuple[int, ...]  # tokens that end an answer
    rollout: RolloutHandle
    publish: Publisher
    observers: Mapping[Role, ModelHandle]
    learners: Mapping[Role, TrainedHandle]
    export: Callable[[Path], Any]  # writes the policy as a Hugging Face directory; a coroutine function
    speed: Speed | None

    def agent(self, drawn: SamplingConfig | EvaluationConfig) -> SingleTurn:
        sampling = self.frame.config.sampling
        params = drawn.params(sampling.max_tokens, sampling.stop, self.ends)
        return SingleTurn(self.frame.tokenizer, params, self.frame.config.seed)


async def make_frame(config: RLConfig, reward: RewardFunction | None, stack: AsyncExitStack) -> Frame:
    """Cheap things first; what must be closed is put on the stack."""
    from treadle.engines.torch.model import context_length, load_tokenizer, reach

    tokenizer, context = load_tokenizer(config.model), context_length(config.model)
    data = config.data.model_copy(update={"max_prompt_tokens": _room(config, context)})
    longest = max(data.max_prompt_tokens + config.sampling.max_tokens, PROBE_TOKENS + PROBE.max_tokens)
    source, held_out = train_source(data, tokenizer, config.seed), evaluation_source(data, tokenizer)
    given = {} if reward is None else {function_name(reward): reward}
    judge: ModelReward | None = None
    if (name := config.reward_model.model) is not None:
        judge = ModelReward(load_tokenizer(name), tokenizer, name, *reach(name))
    return Frame(
        config=config,
        tokenizer=tokenizer,
        context=longest if context is None else min(longest, context),
        source=source,
        held_out=[] if held_out is None else prompts(held_out),
        scorer=await stack.enter_async_context(make_scorer(config.reward, given, judge)),
        reward_model=judge,
    )


async def whole(write: Callable[[Path], Any], path: Path) -> None:
    """Write a directory aside, by a coroutine function, and put it in its place when it is whole."""
    aside = path.with_name(path.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        await write(aside)
        if path.exists():
            shutil.rmtree(path)
        aside.rename(path)
    except Exception as error:  # native code reports a full disk by errors of its own
        shutil.rmtree(aside, ignore_errors=True)
        raise RunError(
            f"{path}: the trained model could not be written: {error}. Make room or move what is in the way; the "
            "same command then goes on from the last checkpoint"
        ) from error


def engine_class(kind: Literal["engines", "rollout"], name: str) -> Any:
    """The class that a name stands for: a module of ours, or `my.module:Class`."""
    if ":" in name:
        return plugin_class(name, f"treadle.{kind}")
    return import_module(f"treadle.{kind}.{name}.engine").Engine


def costs_of(models: Mapping[Role, Any]) -> Mapping[Role, Cost] | None:
    """The operations of each role's model; None where those of one are not known."""
    from treadle.engines.speed import cost_of

    costs: dict[Role, Cost] = {}
    for role, model in models.items():
        if (cost := cost_of(model)) is None:
            return None
        costs[role] = replace(cost, logits=0.0) if role == "critic" else cost
    return costs


def _room(config: RLConfig, context: int | None) -> int:
    """Tokens that a prompt may have, so that an answer still fits the model's context."""
    if context is None:
        return config.data.max_prompt_tokens
    room = context - config.sampling.max_tokens
    if room < 1:
        raise ConfigError(
            f"sampling.max_tokens={config.sampling.max_tokens} leaves no room for a prompt in the {context} positions "
            f"of {config.model}; allowed: 1 to {context - 1}"
        )
    return min(room, config.data.max_prompt_tokens)
