"""Back end `local`: all roles in this process, engines of vLLM in processes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from treadle.algorithms.base import Algorithm, Role
from treadle.controller.config import Place
from treadle.controller.device import LocalDevice, alone
from treadle.controller.local import LocalGroup
from treadle.engines.torch.config import Config as TorchConfig
from treadle.handles import Publisher, RewardFunction
from treadle.recipes.config import RLConfig
from treadle.recipes.measure import Speed
from treadle.runtime.parts import Frame, Parts, costs_of, engine_class, make_frame, whole
from treadle.weights.publish import PROBE, SHORT_PROBE, LocalPublisher, ShippingPublisher
from treadle.workers.models import CriticWorker, PolicyWorker, ReferenceWorker, RewardModelWorker


@asynccontextmanager
async def local_parts(
    config: RLConfig, algorithm: Algorithm, reward: RewardFunction | None, training: bool
) -> AsyncIterator[Parts]:
    """Build everything, cheap things first, and close it in reverse."""
    from treadle.engines.torch.model import check_vocabulary, end_tokens, find, has_score, load_model

    async with AsyncExitStack() as stack:
        generation = engine_class("rollout", config.rollout.name)
        generation.check(config.rollout)
        frame = await make_frame(config, reward, stack)
        device = LocalDevice(config.threads)
        stack.callback(device.close)

        def build() -> tuple[dict[Role, Any], Any, Any, Speed | None]:
            """The engine of each role, the reward model's, the model that generates, and what speeds are compared
            with."""
            engines: dict[Role, Any] = {"policy": _trainer(config, config.model, config.trainer, trainable=training)}
            if "reference" in algorithm.uses:
                model = config.reference.model or config.model
                engines["reference"] = _trainer(config, model, config.trainer, trainable=False)
            if "critic" in algorithm.uses:
                model = config.critic.model or config.model
                scores = has_score(model)
                engines["critic"] = _trainer(config, model, config.critic.trainer, scores=scores, head="value")
            judge = None
            if (model := config.reward_model.model) is not None:
                judge = _trainer(config, model, config.trainer, scores=True, head="value", trainable=False)
            for role, engine in engines.items():
                check_vocabulary(engines["policy"].model, engine.model, frame.tokenizer, role)
            # Where generation and training never overlap, they share the very same weights: a publish copies nothing.
            shared = config.max_staleness == 0
            generator = None
            if generation.in_process:
                generator = engines["policy"].model if shared else load_model(config.model, config.trainer.dtype)
            return engines, judge, generator, _speed(engines) if training else None

        engines, judge, generator, speed = await device.run(build)
        stack.enter_context(alone())
        workers = {
            "policy": lambda engine: PolicyWorker(engine, algorithm),
            "reference": ReferenceWorker,
            "critic": lambda engine: CriticWorker(engine, algorithm),
        }
        groups: dict[Role, Any] = {role: LocalGroup(workers[role](engine), device) for role, engine in engines.items()}
        if frame.reward_model is not None:
            frame.reward_model.serve(cast(Any, LocalGroup(RewardModelWorker(judge), device)))
        policy = engines["policy"].model
        if generation.in_process:
            owned = generator is not policy
            rollout = generation(generator, frame.tokenizer, config.rollout, device, owns_weights=owned)
            publish = _publisher(frame, groups["policy"], rollout, device, policy, generator)
        else:
            rollout = await generation.start(
                find(config.model),
                config.rollout,
                dtype=config.trainer.dtype,
                context=frame.context,
                vocabulary=policy.get_input_embeddings().weight.shape[0],
                decoder=frame.tokenizer,
                directory=Path(config.run.dir),
                overlaps=config.max_staleness > 0 or config.reward_model.model is not None,
            )
            stack.push_async_callback(groups["policy"].close)
            prober = frame.prober(groups["policy"], SHORT_PROBE)
            publish = ShippingPublisher(groups["policy"], rollout, prober, config.on_publish)
        stack.push_async_callback(rollout.close)

        yield Parts(
            frame=frame,
            ends=end_tokens(policy, frame.tokenizer),
            rollout=rollout,
            publish=publish,
            observers=groups,
            learners={role: groups[role] for role in algorithm.trains},
            export=partial(whole, lambda path: groups["policy"].write(path, config.model)),
            speed=speed,
        )


def _publisher(frame: Frame, policy: Any, rollout: Any, device: LocalDevice, trained: Any, generates: Any) -> Publisher:
    from treadle.engines.torch.model import own_tensors

    shared = generates is trained
    return LocalPublisher(
        rollout=rollout,
        device=device,
        prober=frame.prober(policy, PROBE),
        on_publish=frame.config.on_publish,
        sent=None if shared else lambda: own_tensors(trained),
        held=None if shared else lambda: generates.state_dict().items(),
    )


def _trainer(config: RLConfig, model: str, trainer: TorchConfig, scores: bool = False, **options: Any) -> Any:
    """A training engine over a model of its own."""
    from treadle.engines.torch.model import load_model

    engine = engine_class("engines", trainer.name)
    return engine(load_model(model, trainer.dtype, scores), trainer, total_steps=config.optimizer_steps, **options)


def _speed(engines: Mapping[Role, Any]) -> Speed:
    """The operations of each role's model, and the rate of this machine."""
    from treadle.engines.speed import matrix_rate

    policy = engines["policy"]
    here: dict[Place, str] = dict.fromkeys((*engines, "rollout"), "here")
    costs = costs_of({role: engine.model for role, engine in engines.items()})
    return Speed({"here": matrix_rate(policy.model.dtype, policy.device)}, here, costs)
