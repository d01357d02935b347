"""The configuration of an RL run: its root, and the rules between its sections.

Sections that belong to a part (an algorithm, an engine, a data source) are defined beside that part.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import StringConstraints, model_validator

from treadle.algorithms.base import AlgorithmConfig
from treadle.config import Config, key, load, plugin
from treadle.controller.config import ControllerConfig
from treadle.data.config import DataConfig
from treadle.engines.torch.config import Config as TorchConfig
from treadle.handles import OnPublish
from treadle.rewards.config import MODEL, RewardConfig
from treadle.rollout.config import RolloutConfig
from treadle.runs.config import RunConfig
from treadle.types import SamplingParams

if TYPE_CHECKING:
    from treadle.recipes.collect import FailureBudget

Algorithm = Annotated[AlgorithmConfig, plugin("treadle.algorithms", default="grpo")]
Rollout = Annotated[RolloutConfig, plugin("treadle.rollout", default="embedded")]


class SamplingConfig(Config):
    """How training samples are drawn. The trainer applies the same temperature, so its log-probs are of the
    distribution that sampled; top-k and top-p, which it could not know, exist only in `evaluation`."""

    temperature: float = key("divides the logits", default=1.0, ge=0.01, le=100)
    max_tokens: int = key("tokens of one answer at most, in training and in evaluation", default=64, ge=1, le=2**24)
    stop: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = key(
        "texts that end an answer, beside the model's end token", default=()
    )

    def params(self, max_tokens: int, stop: tuple[str, ...], end_tokens: tuple[int, ...]) -> SamplingParams:
        return SamplingParams(self.temperature, max_tokens=max_tokens, stop=stop, stop_token_ids=end_tokens)


class EvaluationConfig(Config):
    """Held-out prompts are answered before the first step, after the last, and every so often between."""

    every: int = key("steps between evaluations; 0: only before and after training", default=0, ge=0, le=2**31)
    samples: int = key("sampled answers to each prompt", default=4, ge=1, le=2**16)
    greedy: bool = key("answer each prompt once greedily, too", default=True)
    temperature: float = key("of the sampled answers", default=1.0, ge=0.01, le=100)
    top_k: int = key("sample among so many most likely tokens; 0: all", default=0, ge=0, le=2**31)
    top_p: float = key("sample among the most likely tokens of this total probability", default=1.0, gt=0, le=1)

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def params(self, max_tokens: int, stop: tuple[str, ...], end_tokens: tuple[int, ...]) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, max_tokens, end_tokens, stop)


class ModelConfig(Config):
    """A role's own model."""

    model: str | None = key("directory or name; null: the policy's initial model", default=None)


class CriticTrainerConfig(TorchConfig):
    learning_rate: float = key("peak learning rate", default=1e-5, ge=0, le=1e3)


class CriticConfig(ModelConfig):
    """The critic's model and how it learns."""

    trainer: CriticTrainerConfig = key("how the critic is trained", default=CriticTrainerConfig)


class RewardModelConfig(Config):
    """A model that scores whole conversations, which it reads through its own tokenizer and chat template."""

    model: str | None = key(
        "directory or name of a Hugging Face …ForSequenceClassification with one score; null: none", default=None
    )


class RLConfig(Config):
    """Reinforcement learning of one model."""

    model: str = key("the policy: directory or name of a Hugging Face causal LM")
    seed: int = key(
        "of prompt order and sampling noise; the same seed gives the same run", default=0, ge=0, le=2**32 - 1
    )
    steps: int = key("training steps", ge=1, le=2**31)
    prompts_per_step: int = key("groups that one step trains on", default=8, ge=1, le=2**20)
    max_staleness: int = key(
        "versions that a trained token may be behind: 0 is synchronous, 1 one-step-off, k bounded",
        default=0,
        ge=0,
        le=2**20,
    )
    on_publish: OnPublish = key(
        "what generations in flight do when weights arrive: drain, resume, continue", default="resume"
    )
    max_filtered_groups: int = key(
        "groups in a row that filters may drop before the run stops", default=256, ge=0, le=2**31
    )
    threads: int | None = key("CPU threads of the compute; null: torch decides", default=None, ge=1, le=1024)
    run: RunConfig = key("where the run is recorded")
    data: DataConfig = key("prompts")
    reward: RewardConfig = key("what answers earn")
    algorithm: Algorithm = key("objective and advantages", default={"name": "grpo"})
    sampling: SamplingConfig = key("how training samples are drawn", default=SamplingConfig)
    evaluation: EvaluationConfig = key("how held-out prompts are answered", default=EvaluationConfig)
    rollout: Rollout = key("the engine that generates", default={"name": "embedded"})
    trainer: TorchConfig = key("the engine that trains the policy", default=TorchConfig)
    reference: ModelConfig = key("the frozen policy that a KL term compares with", default=ModelConfig)
    critic: CriticConfig = key("the model that predicts returns, for algorithms with a critic", default=CriticConfig)
    reward_model: RewardModelConfig = key("the model behind `reward: model`", default=RewardModelConfig)
    controller: ControllerConfig = key("where the roles work", default=ControllerConfig)

    @model_validator(mode="after")
    def _rules(self) -> RLConfig:
        self.algorithm.check_run(self.steps)
        minibatches, prompts = self.algorithm.minibatches, self.prompts_per_step
        if minibatches > prompts:
            raise ValueError(
                f"algorithm.minibatches={minibatches} is more than the {prompts} groups of a step, and groups are not "
                f"split; 1 to {prompts} are possible, or raise prompts_per_step"
            )
        if (MODEL in self.reward.functions) != (self.reward_model.model is not None):
            raise ValueError(
                "reward.functions and reward_model.model belong together: with reward_model.model set its score is the "
                "function `model` (`reward: model`, or a weight beside other functions), and without it there is none"
            )
        return self

    @property
    def failure_budget(self) -> FailureBudget:
        """How many of the latest samples, as many as a step has, may fail."""
        from treadle.recipes.collect import FailureBudget

        return FailureBudget(self.reward.max_failed, self.prompts_per_step * self.algorithm.group_size)

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run: what a decaying learning rate decays over."""
        return self.steps * self.algorithm.minibatches * self.algorithm.epochs


def load_config(path: Path | None, overrides: Sequence[str] = (), base: dict[str, Any] | None = None) -> RLConfig:
    """The resolved configuration, or `ConfigError` naming every mistake in it."""
    return load(RLConfig, path, overrides, base)
