"""The composition root: from a configuration to live handles, and from there to the loop.

`parts.py` makes what every run has, `local.py` and `cluster.py` the roles: in this process, or on a Ray cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

from treadle.algorithms.base import Algorithm
from treadle.config import dump, plugin_class
from treadle.config.yaml_text import from_file
from treadle.engines.torch.config import Config as TorchConfig
from treadle.errors import ConfigError, RunError
from treadle.handles import RewardFunction
from treadle.metrics import Registry
from treadle.recipes.collect import Sampler
from treadle.recipes.config import RLConfig
from treadle.recipes.evaluate import answer
from treadle.recipes.measure import measure_evaluation
from treadle.recipes.rl import train as run_loop
from treadle.recipes.system import System
from treadle.runs import environment
from treadle.runs.checkpoints import Checkpoints
from treadle.runs.directory import RunDirectory
from treadle.runs.metrics import plain
from treadle.runs.recorder import Recorder
from treadle.runs.trackers.base import Tracker
from treadle.runs.trackers.tracking import Tracking, make_trackers
from treadle.runtime.local import local_parts
from treadle.runtime.parts import Parts
from treadle.runtime.resolve import Settings, resolve
from treadle.runtime.running import run

logger = logging.getLogger(__name__)


def train(
    config: Settings,
    *,
    overrides: Sequence[str] = (),
    algorithm: Algorithm | None = None,
    reward: RewardFunction | None = None,
) -> dict[str, Any]:
    """Train as `config` says (a file, a mapping, or a loaded configuration); returns what `summary.json` holds.

    `overrides` are those of the command line, as `steps=10`. `algorithm` and `reward` take the place of the configured
    ones; classes and functions of a notebook will do. The same call again goes on from the last checkpoint.
    """
    resolved = resolve(config, overrides, algorithm, reward)
    if not RunDirectory(Path(resolved.run.dir)).finished:
        resolved.data.check()
    return run(_train(resolved, algorithm, reward))


def evaluate(
    target: str | Path,
    *,
    config: Settings | None = None,
    overrides: Sequence[str] = (),
    reward: RewardFunction | None = None,
) -> dict[str, float | int | str | None]:
    """Answer the held-out prompts with a run's policy, or with the model in `target` as `config` says.

    A run is evaluated under its own configuration, changed by `overrides` (`evaluation.samples=16`): its final model,
    or its latest checkpoint if it has not ended. Returns metrics by name, as "evaluation/sampled".
    """
    checkpoint = None
    if config is None:
        if (Path(target) / "config.json").exists():
            raise ConfigError(f"{target} is a model; say under which configuration to evaluate it (--config FILE)")
        directory = RunDirectory.existing(Path(target))
        settings = from_file(directory.config)
        settings.pop("algorithm", None)  # a class of a notebook cannot be found again, nor is it needed
        if directory.finished:
            settings["model"] = str(directory.model)
        else:
            found = Checkpoints.newest(directory.checkpoints)
            if found is None:
                raise RunError(f"{directory.path} has neither a final model nor a checkpoint yet; let it train on")
            checkpoint = found[1]
        resolved = resolve(settings, overrides, None, reward)
    else:
        resolved = resolve(config, overrides, None, reward).model_copy(update={"model": str(target)})
    return run(_evaluate(resolved, checkpoint, reward))


# ---------------------------------------------------------------------- what the two do


async def _train(config: RLConfig, algorithm: Algorithm | None, reward: RewardFunction | None) -> dict[str, Any]:
    trackers = make_trackers(config.run.told)
    chosen = algorithm or plugin_class(config.algorithm.name, "treadle.algorithms")(config.algorithm)
    chosen.max_tokens = config.sampling.max_tokens
    metrics = Registry(chosen.metrics, type(chosen))
    config, path = _concrete(config), Path(config.run.dir)
    if (summary := _finished(path, config, trackers)) is not None:
        logger.warning("%s has done its %d steps; a larger `steps` trains on", path, summary["steps"])
        return summary
    # The parts first: a mistake that shows here leaves no run directory behind.
    async with _parts(config, chosen, reward, training=True) as parts:
        with (
            RunDirectory.open(path, dump(config)) as directory,
            Recorder(directory, config.run, config.steps, metrics=metrics, trackers=trackers) as record,
        ):
            environment.record(directory)
            system = System(
                algorithm=chosen,
                prompts=parts.frame.source,
                held_out=parts.frame.held_out,
                agent=parts.agent(config.sampling),
                evaluator=parts.agent(config.evaluation),
                scorer=parts.frame.scorer,
                rollout=parts.rollout,
                publish=parts.publish,
                observers=parts.observers,
                learners=parts.learners,
                record=record,
                speed=parts.speed,
            )
            end = await run_loop(config, system)
            await parts.export(directory.model)
            record.finish({"data_ended": end.data_ended, "model": str(directory.model)})
            return directory.read_summary() or {}


def _parts(
    config: RLConfig, algorithm: Algorithm, reward: RewardFunction | None, training: bool
) -> AbstractAsyncContextManager[Parts]:
    """Everything that lives, closed in reverse at the end."""
    if config.controller.backend == "local":
        return local_parts(config, algorithm, reward, training)
    from treadle.runtime.cluster import cluster_parts

    return cluster_parts(config, algorithm, reward, training)


def _concrete(config: RLConfig) -> RLConfig:
    """With `dtype: auto` settled: a run keeps the precision that it began with."""
    from treadle.engines.torch.model import fastest_dtype

    def settled(trainer: TorchConfig, role: Literal["policy", "critic"]) -> TorchConfig:
        if trainer.dtype != "auto":
            return trainer
        gpus = config.controller.backend == "ray" and config.controller.pool(config.controller.pool_of(role)).gpus > 0
        return trainer.model_copy(update={"dtype": "bfloat16" if gpus else fastest_dtype()})

    critic = config.critic.model_copy(update={"trainer": settled(config.critic.trainer, "critic")})
    return config.model_copy(update={"trainer": settled(config.trainer, "policy"), "critic": critic})


def _finished(path: Path, config: RLConfig, trackers: Sequence[Tracker]) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do, but perhaps to tell."""
    if not RunDirectory(path).finished:
        return None
    with RunDirectory.open(path, dump(config)) as directory:
        summary = directory.read_summary() or {}
        if not summary["data_ended"] and summary["steps"] < config.steps:
            return None
        Tracking(directory, trackers, logger.warning).tell_all()
        return summary


async def _evaluate(config: RLConfig, checkpoint: Path | None, reward: RewardFunction | None) -> dict[str, Any]:
    async with _parts(_concrete(config), Algorithm(), reward, training=checkpoint is not None) as parts:
        if not parts.frame.held_out:
            raise ConfigError("data.evaluation is null, so there is nothing to evaluate on; name a source of prompts")
        if checkpoint is not None:
            await parts.learners["policy"].load(checkpoint / "policy")
        await parts.publish(0)
        sample = Sampler(parts.agent(config.evaluation), parts.frame.scorer, parts.rollout, config.failure_budget)
        return plain(measure_evaluation(await answer(parts.frame.held_out, config.evaluation, sample, "evaluation")))
