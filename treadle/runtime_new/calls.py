"""The composition root: from a configuration to live handles, and from there to the loop. It alone knows everything."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from treadle.agents.single_turn import SingleTurn
from treadle.algorithms.base import Algorithm, AlgorithmConfig, Role
from treadle.config import dump, plugin_class
from treadle.config import plain as plain_config
from treadle.config.yaml_text import from_file
from treadle.controller.device import LocalDevice
from treadle.controller.local import LocalGroup
from treadle.data.config import evaluation_source, train_source
from treadle.data.source import prompts
from treadle.engines.torch.config import Config as TorchConfig
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
from treadle.metrics import Registry
from treadle.recipes.collect import Sampler
from treadle.recipes.config import EvaluationConfig, RLConfig, SamplingConfig, load_config
from treadle.recipes.evaluate import answer
from treadle.recipes.measure import Speed, measure_evaluation
from treadle.recipes.rl import train as run_loop
from treadle.recipes.system import System
from treadle.rewards.scorer import function_name, make_scorer
from treadle.runs import environment
from treadle.runs.checkpoints import Checkpoints
from treadle.runs.directory import RunDirectory
from treadle.runs.metrics import plain
from treadle.runs.recorder import Recorder
from treadle.runs.trackers.base import Tracker
from treadle.runs.trackers.tracking import Tracking, make_trackers
from treadle.types import Prompt
from treadle.weights.publish import (
    PROBE,
    PROBE_TOKENS,
    SHORT_PROBE,
    TOLERANCE,
    LocalPublisher,
    PoolHandle,
    Prober,
    SendingHandle,
    ShippingPublisher,
    probe_tokens,
)
from treadle.workers.models import CriticWorker, PolicyWorker, ReferenceWorker

if TYPE_CHECKING:
    from treadle.engines.torch.engine import TorchEngine

T = TypeVar("T")
logger = logging.getLogger(__name__)
Settings = RLConfig | Mapping[str, Any] | str | Path


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
    resolved = _resolve(config, overrides, algorithm, reward)
    if not RunDirectory(Path(resolved.run.dir)).finished:
        resolved.data.check()
    return _run(_train(resolved, algorithm, reward))


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
        run = RunDirectory.existing(Path(target))
        settings = from_file(run.config)
        settings.pop("algorithm", None)  # a class of a notebook cannot be found again, nor is it needed
        if run.finished:
            settings["model"] = str(run.model)
        else:
            found = Checkpoints.newest(run.checkpoints)
            if found is None:
                raise RunError(f"{run.path} has neither a final model nor a checkpoint yet; let it train on")
            checkpoint = found[1]
        resolved = _resolve(settings, overrides, None, reward)
    else:
        resolved = _resolve(config, overrides, None, reward).model_copy(update={"model": str(target)})
    return _run(_evaluate(resolved, checkpoint, reward))


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
                prompts=parts.source,
                held_out=parts.held_out,
                agent=parts.agent(config.sampling),
                evaluator=parts.agent(config.evaluation),
                scorer=parts.scorer,
                rollout=parts.rollout,
                publish=parts.publisher(),
                observers=parts.observers,
                learners=parts.learners,
                record=record,
                speed=parts.speed,
            )
            end = await run_loop(config, system)
            await parts.device.run(partial(parts.export, directory.model))
            record.finish({"data_ended": end.data_ended, "model": str(directory.model)})
            return directory.read_summary() or {}


def _concrete(config: RLConfig) -> RLConfig:
    """With `dtype: auto` settled: a run keeps the precision that it began with."""
    from treadle.engines.torch.model import fastest_dtype

    def settled(trainer: TorchConfig) -> TorchConfig:
        return trainer.model_copy(update={"dtype": fastest_dtype()}) if trainer.dtype == "auto" else trainer

    critic = config.critic.model_copy(update={"trainer": settled(config.critic.trainer)})
    return config.model_copy(update={"trainer": settled(config.trainer), "critic": critic})


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
        if not parts.held_out:
            raise ConfigError("data.evaluation is null, so there is nothing to evaluate on; name a source of prompts")
        if checkpoint is not None:
            await parts.learners["policy"].load(checkpoint / "policy")
        await parts.publisher()(0)
        sample = Sampler(parts.agent(config.evaluation), parts.scorer, parts.rollout, config.failure_budget)
        return plain(measure_evaluation(await answer(parts.held_out, config.evaluation, sample, "evaluation")))


# ---------------------------------------------------------------------- the parts


@dataclass
class _Parts:
    """Live objects of one process, back end `local`."""

    config: RLConfig
    device: LocalDevice
    tokenizer: Any
    source: PromptSource
    held_out: list[Prompt]
    scorer: Scorer
    policy: TorchEngine
    rollout: RolloutHandle
    pool: PoolHandle | None  # the same, where its engines are in other processes and have their own weights
    rollout_model: Any  # None: those
    context: int  # tokens of a prompt and its answer that are served
    sender: SendingHandle
    observers: dict[Role, ModelHandle]
    learners: dict[Role, TrainedHandle]
    speed: Speed | None

    def agent(self, drawn: SamplingConfig | EvaluationConfig) -> SingleTurn:
        from treadle.engines.torch.model import end_tokens

        ends = end_tokens(self.policy.model, self.tokenizer)
        params = drawn.params(self.config.sampling.max_tokens, self.config.sampling.stop, ends)
        return SingleTurn(self.tokenizer, params, self.config.seed)

    def publisher(self) -> Publisher:
        from treadle.engines.torch.model import own_tensors

        text = tuple(self.tokenizer.encode("The quick brown fox"))
        prober = Prober(
            policy=self.observers["policy"],
            probe=Prompt("probe", 0, (), probe_tokens(text, self.context)),
            agent=SingleTurn(self.tokenizer, SHORT_PROBE if self.pool else PROBE, self.config.seed),
            tolerance=TOLERANCE[self.policy.config.dtype],
        )
        if self.pool is not None:
            return ShippingPublisher(self.sender, self.pool, prober, self.config.on_publish)
        shared = self.rollout_model is self.policy.model
        return LocalPublisher(
            rollout=self.rollout,
            device=self.device,
            prober=prober,
            on_publish=self.config.on_publish,
            sent=None if shared else lambda: own_tensors(self.policy.model),
            held=None if shared else lambda: self.rollout_model.state_dict().items(),
        )

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory, whole or not at all."""
        from treadle.engines.torch.model import save_pretrained

        aside = path.with_name(path.name + ".partial")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            save_pretrained(self.policy.model, aside, self.tokenizer)
            if path.exists():
                shutil.rmtree(path)
            aside.rename(path)
        except Exception as error:  # native code reports a full disk by errors of its own
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(
                f"{path}: the trained model could not be written: {error}. Make room or move what is in the way; the "
                "same command then goes on from the last checkpoint"
            ) from error


@asynccontextmanager
async def _parts(
    config: RLConfig, algorithm: Algorithm, reward: RewardFunction | None, training: bool
) -> AsyncIterator[_Parts]:
    """Build everything, cheap things first, and close it in reverse."""
    from treadle.engines.torch.model import check_vocabulary, context_length, find, load_model, load_tokenizer

    async with AsyncExitStack() as stack:
        generation = _engine("rollout", config.rollout.name)
        generation.check(config.rollout)
        tokenizer, context = load_tokenizer(config.model), context_length(config.model)
        data = config.data.model_copy(update={"max_prompt_tokens": _room(config, context)})
        longest = max(data.max_prompt_tokens + config.sampling.max_tokens, PROBE_TOKENS + PROBE.max_tokens)
        served = longest if context is None else min(longest, context)  # tokens of a prompt and its answer
        source = train_source(data, tokenizer, config.seed)
        held_out = evaluation_source(data, tokenizer)
        given = {} if reward is None else {function_name(reward): reward}
        scorer = await stack.enter_async_context(make_scorer(config.reward, given))
        device = LocalDevice(config.threads)
        stack.callback(device.close)

        def build() -> tuple[dict[Role, Any], Any, Speed | None]:
            """The engine of each role, the model that generates, and what speeds are compared with."""
            engines: dict[Role, Any] = {"policy": _trainer(config, config.model, config.trainer, trainable=training)}
            if "reference" in algorithm.uses:
                model = config.reference.model or config.model
                engines["reference"] = _trainer(config, model, config.trainer, trainable=False)
            if "critic" in algorithm.uses:
                model = config.critic.model or config.model
                engines["critic"] = _trainer(config, model, config.critic.trainer, head="value")
            for role, engine in engines.items():
                check_vocabulary(engines["policy"].model, engine.model, tokenizer, role)
            # Where generation and training never overlap, they share the very same weights: a publish copies nothing.
            shared = config.max_staleness == 0
            generator = None
            if generation.in_process:
                generator = engines["policy"].model if shared else load_model(config.model, config.trainer.dtype)
            return engines, generator, _speed(engines) if training else None

        engines, generator, speed = await device.run(build)
        workers = {
            "policy": lambda engine: PolicyWorker(engine, algorithm),
            "reference": ReferenceWorker,
            "critic": lambda engine: CriticWorker(engine, algorithm),
        }
        groups: dict[Role, Any] = {role: LocalGroup(workers[role](engine), device) for role, engine in engines.items()}
        policy = engines["policy"].model
        if generation.in_process:
            rollout = generation(generator, tokenizer, config.rollout, device, owns_weights=generator is not policy)
        else:
            rollout = await generation.start(
                find(config.model),
                config.rollout,
                dtype=config.trainer.dtype,
                context=served,
                vocabulary=policy.get_input_embeddings().weight.shape[0],
                decoder=tokenizer,
                directory=Path(config.run.dir),
            )
            stack.push_async_callback(groups["policy"].close)
        stack.push_async_callback(rollout.close)
        yield _Parts(
            config=config,
            device=device,
            tokenizer=tokenizer,
            source=source,
            held_out=[] if held_out is None else prompts(held_out),
            scorer=scorer,
            policy=engines["policy"],
            rollout=rollout,
            pool=None if generation.in_process else rollout,
            rollout_model=generator,
            context=served,
            sender=groups["policy"],
            observers=groups,
            learners={role: groups[role] for role in algorithm.trains},
            speed=speed,
        )


def _trainer(config: RLConfig, model: str, trainer: TorchConfig, **options: Any) -> Any:
    """A training engine over a model of its own."""
    from treadle.engines.torch.model import load_model

    engine = _engine("engines", trainer.name)
    return engine(load_model(model, trainer.dtype), trainer, total_steps=config.optimizer_steps, **options)


def _speed(engines: Mapping[Role, Any]) -> Speed | None:
    """The operations of each role's model, and the rate of this machine; None where a model's are not known."""
    from treadle.engines.speed import cost_of, matrix_rate

    costs: dict[Role, Cost] = {}
    for role, engine in engines.items():
        if (cost := cost_of(engine.model)) is None:
            return None
        costs[role] = replace(cost, logits=0.0) if role == "critic" else cost
    policy = engines["policy"]
    return Speed(matrix_rate(policy.model.dtype, policy.device), costs)


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


def _engine(kind: Literal["engines", "rollout"], name: str) -> Any:
    """The class that a name stands for: a module of ours, or `my.module:Class`."""
    if ":" in name:
        return plugin_class(name, f"treadle.{kind}")
    return import_module(f"treadle.{kind}.{name}.engine").Engine


# ---------------------------------------------------------------------- calling from anywhere


def _resolve(
    config: Settings, overrides: Sequence[str], algorithm: Algorithm | None, reward: RewardFunction | None
) -> RLConfig:
    """The whole configuration, in which what was given from Python has its name and its place."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides is a list of texts, as [{overrides!r}]")
    functions = {} if reward is None else {"functions": {_name_of(reward): 1.0}}
    path = Path(config) if isinstance(config, str | Path) else None
    base: dict[str, Any] = {}
    if isinstance(config, RLConfig):
        base = plain_config(config)
    elif isinstance(config, Mapping):
        base = dict(config)
    if functions and isinstance(base.get("reward", {}), Mapping):
        base["reward"] = functions | base.get("reward", {})
    resolved = load_config(path, overrides, base)
    sections = {name: getattr(resolved, name) for name in RLConfig.model_fields}
    sections["reward"] = resolved.reward.model_copy(update=functions)
    if algorithm is not None:
        sections["algorithm"] = _named(algorithm, overrides)
    return load_config(None, base=sections)  # the rules between sections once more


def _name_of(reward: RewardFunction) -> str:
    if not callable(reward):
        raise ConfigError(f"reward={reward!r:.80} is not a function; name one in the configuration, or give a callable")
    return function_name(reward)


def _named(algorithm: Algorithm, overrides: Sequence[str]) -> AlgorithmConfig:
    """The configuration of an algorithm given from Python, under the class's name."""
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm={algorithm!r:.80} is not an Algorithm; give an instance, as MyAlgorithm()")
    if not isinstance(vars(algorithm).get("config"), AlgorithmConfig):
        raise ConfigError(f"{type(algorithm).__name__}.__init__ must call super().__init__(config)")
    kind = type(algorithm)
    if kind.joined() is not kind:
        raise ConfigError(
            f"{kind.__qualname__} is half an algorithm; give {kind.__qualname__}.joined()(), with a usual other half, "
            f"or {kind.__qualname__}.joined(OtherHalf)()"
        )
    if any(override.startswith("algorithm.") for override in overrides):
        raise ConfigError("algorithm was given from Python as an object; change its configuration there")
    unknown = (algorithm.uses | algorithm.before_advantages | algorithm.before_loss) - set(get_args(Role))
    missing = (algorithm.before_advantages | algorithm.before_loss) - algorithm.uses - {"policy"}
    if unknown or missing:
        raise ConfigError(
            f"{type(algorithm).__name__}: no roles are {sorted(unknown)}, and {sorted(missing)} are looked at but not "
            f"in `uses`; allowed: {', '.join(get_args(Role))}"
        )
    # A joined class is known by its halves.
    name = algorithm.config.name if "halves" in vars(kind) else f"{kind.__module__}:{kind.__qualname__}"
    return algorithm.config.model_copy(update={"name": name})


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, also from a notebook, whose thread has an event loop that is already running."""
    if not _inside_a_loop():
        return asyncio.run(main)
    outcome: Future[T] = Future()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def told() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        return await main

    def elsewhere() -> None:
        try:
            outcome.set_result(asyncio.run(told()))
        except BaseException as error:  # carried to the caller
            outcome.set_exception(error)

    thread = threading.Thread(target=elsewhere, name="treadle")
    thread.start()
    try:
        return outcome.result()
    except KeyboardInterrupt:  # the notebook's stop button: end as Ctrl-C does, books balanced
        loop, task = begun.result()
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
