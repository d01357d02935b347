"""Back end `ray`: the roles in pools of processes, this one holds none of the weights.

What is made in those processes is made by the functions at the end of this file, which travel there by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from treadle.algorithms.base import Algorithm, Role
from treadle.controller.config import Place, PoolConfig
from treadle.controller.host import Report, Seat
from treadle.controller.turns import Turns
from treadle.engines.torch.config import Config as TorchConfig
from treadle.errors import ConfigError, WorkerError
from treadle.handles import RewardFunction
from treadle.recipes.config import RLConfig
from treadle.recipes.measure import Speed
from treadle.rollout.pool import Pool
from treadle.rollout.remote import RemoteReplica
from treadle.rollout.replicas import Limits, Member
from treadle.runtime.parts import Frame, Parts, costs_of, engine_class, make_frame, whole
from treadle.types import Completion, TokenRequest
from treadle.weights.place import new_place
from treadle.weights.publish import PROBE, SHORT_PROBE, ShippingPublisher
from treadle.workers.gauge import Gauge
from treadle.workers.models import CriticWorker, PolicyWorker, ReferenceWorker, RewardModelWorker
from treadle.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from treadle.controller.ray import RayBackend
    from treadle.weights.config import WeightsConfig

_CLOSE = 10.0  # seconds
ATTENTION = 1 / 8192
"""What a token's looking at one token costs, in tokens, where it does not follow from the model's shapes."""


class ClusterPool(Pool):
    """`handles.RolloutHandle` over engines on a cluster, which may share their devices with training."""

    weights: WeightsConfig
    place: str
    turns: Turns
    attempts = 1

    def share(self) -> None:
        """From here on these devices change hands."""
        self.turns.open(self._sleep, self._wake, self._gave_up)

    def stats(self) -> Mapping[str, float]:
        """And how often the devices have changed hands, and the seconds that it took."""
        turns = {"turns": self.turns.count, "turn_seconds": self.turns.seconds} if self.turns.count else {}
        return {**super().stats(), **turns}

    async def close(self) -> None:
        await self.turns.close()
        await super().close()

    async def _generate(self, request: TokenRequest, only: Member | None) -> Completion:
        with self.turns.request():
            return await super()._generate(request, only)

    @asynccontextmanager
    async def _awake(self, version: int) -> AsyncIterator[None]:
        async with self.turns.generation(), super()._awake(version):
            yield

    def _gave_up(self, error: Exception) -> None:
        """Whoever waits for an answer is told so."""
        for member in self._living():
            self._fence(member, error)


@asynccontextmanager
async def cluster_parts(
    config: RLConfig, algorithm: Algorithm, reward: RewardFunction | None, training: bool
) -> AsyncIterator[Parts]:
    """Build everything, cheap things first, and close it in reverse."""
    from treadle.controller.ray import RayBackend
    from treadle.engines.speed import cost_of
    from treadle.engines.torch.model import end_tokens

    async with AsyncExitStack() as stack:
        engine_class("rollout", config.rollout.name).check(config.rollout)
        models = _models(config, algorithm)
        pools = _pools(config, [*models, "rollout"])
        frame = await make_frame(config, reward, stack)
        shapes = _shapes(config, models, frame.tokenizer)
        backend = await RayBackend.open(config.controller, pools)
        stack.push_async_callback(backend.close)
        _reachable(config, backend.reports)

        rates = await _rates(config, backend, models) if training else {}
        groups: dict[Place, Any] = {}
        turns = Turns()
        sharing = _sharing(config, models)
        for role, (worker, make) in _workers(config, algorithm, training).items():
            cost = cost_of(shapes[role])
            attention = ATTENTION if cost is None else cost.pair / cost.token
            pool = config.controller.pool_of(role)
            turn = partial(turns.compute, patient=role == "reward_model") if role in sharing else nullcontext
            groups[role] = await backend.group(role, pool, worker, make, attention, turn)
        # Closed behind the engines: a call that computes would wait for its turn, and there is none any more.
        stack.push_async_callback(_closed, groups["policy"])
        rollout = await _rollout(config, frame, backend, shapes["policy"], turns)
        stack.push_async_callback(rollout.close)
        if sharing:
            rollout.share()
        if frame.reward_model is not None:
            frame.reward_model.serve(groups["reward_model"])
        roles: tuple[Role, ...] = get_args(Role)
        observers: dict[Role, Any] = {role: groups[role] for role in roles if role in groups}
        costs = costs_of({role: shapes[role] for role in observers})
        places: dict[Place, str] = {place: config.controller.pool_of(place) for place in (*groups, "rollout")}
        answered = PROBE if _in_process(config) else SHORT_PROBE

        yield Parts(
            frame=frame,
            ends=end_tokens(shapes["policy"], frame.tokenizer),
            rollout=rollout,
            publish=ShippingPublisher(
                groups["policy"], rollout, frame.prober(groups["policy"], answered), config.on_publish
            ),
            observers=observers,
            learners={role: groups[role] for role in algorithm.trains},
            export=partial(whole, lambda path: groups["policy"].write(path.absolute(), config.model)),
            speed=Speed(rates, places, costs) if training else None,
        )


async def _rates(config: RLConfig, backend: RayBackend, models: Iterable[Place]) -> dict[str, float]:
    """Operations a second of matrix products on all ranks of each pool, measured while all others make some."""
    controller = config.controller
    computing = {controller.pool_of(role) for role in models}
    pools = dict.fromkeys(controller.pool_of(place) for place in (*models, "rollout"))
    make = partial(_gauge, config.trainer.dtype)
    gauges: dict[str, Any] = {pool: await backend.group("gauge", pool, Gauge, make) for pool in pools}
    found = await asyncio.gather(*(gauge.rate() for gauge in gauges.values()))
    # A rank of the rollout's own pool has a device for each process of its engine.
    _, devices = engine_class("rollout", config.rollout.name).size(config.rollout)
    return {
        pool: rate * controller.pool(pool).ranks * (1 if pool in computing else devices)
        for pool, rate in zip(gauges, found, strict=True)
    }


async def _closed(policy: Any) -> None:
    """Give back what publishing holds, if it still can: ranks that are out of step are ended a moment later, and the
    error that was raised before is the one to tell."""
    with suppress(WorkerError, TimeoutError):
        await asyncio.wait_for(policy.close(), _CLOSE)


async def _rollout(config: RLConfig, frame: Frame, backend: RayBackend, shape: Any, turns: Turns) -> ClusterPool:
    """A replica on each rank of its pool."""
    pool = config.controller.pool_of("rollout")
    make: Any = partial(_embedded, config) if _in_process(config) else partial(_apart, config, frame.context)
    ranks = config.controller.pool(pool).ranks
    handles = await backend.singles("rollout", pool, RolloutWorker, [make] * ranks)
    capacity, processes = engine_class("rollout", config.rollout.name).size(config.rollout)
    limits = Limits(
        replicas=ranks,
        vocabulary=shape.get_input_embeddings().weight.shape[0],
        context=frame.context,
        timeout=config.rollout.timeout,
        start_timeout=config.rollout.start_timeout,
        restarts=0,  # turns rely on it: an engine that starts later would come while training has the devices
    )

    def launch(name: str) -> RemoteReplica:
        return RemoteReplica(name, handles[int(name.partition("-")[0])], capacity, processes)  # type: ignore[arg-type]

    rollout = ClusterPool(launch, limits, frame.tokenizer)
    rollout.turns = turns
    rollout.weights, rollout.place = config.rollout.weights, new_place(config.rollout.weights, Path(config.run.dir))
    try:
        await rollout.open()
    except BaseException:
        await rollout.close()
        raise
    return rollout


# ---------------------------------------------------------------------- what is checked before anything starts


def _models(config: RLConfig, algorithm: Algorithm) -> dict[Place, str]:
    """The roles that hold a model, and which."""
    found: dict[Place, str] = {"policy": config.model}
    if "reference" in algorithm.uses:
        found["reference"] = config.reference.model or config.model
    if "critic" in algorithm.uses:
        found["critic"] = config.critic.model or config.model
    if config.reward_model.model is not None:
        found["reward_model"] = config.reward_model.model
    return found


def _shapes(config: RLConfig, models: Mapping[Place, str], tokenizer: Any) -> dict[Place, Any]:
    """The roles' models without weights. Raises `ModelError` for what would fail on the cluster."""
    from treadle.engines.torch.model import check_vocabulary, has_score, places
    from treadle.engines.torch.writing import skeleton

    shapes: dict[Place, Any] = {}
    for role, model in models.items():  # the policy's first
        scores = role == "reward_model" or (role == "critic" and has_score(model))  # a critic may begin as one
        shapes[role] = skeleton(model, scores)
        if role != "reward_model":  # which reads text
            check_vocabulary(shapes["policy"], shapes[role], tokenizer, role)
    if _in_process(config):
        places(shapes["policy"])
    return shapes


def _pools(config: RLConfig, roles: list[Place]) -> dict[str, PoolConfig]:
    """The pools in which these roles work, those of roles that this run lacks left out. Raises `ConfigError` for what
    does not go together there."""
    controller = config.controller
    if config.rollout.engines != 1:
        raise ConfigError(
            f"rollout.replicas={config.rollout.engines}: on a cluster each rank of its pool is one; set "
            f"controller.pools.{controller.pool_of('rollout')}.ranks"
        )
    if _sharing(config, roles) and config.rollout.weights.transport == "cuda_ipc":
        raise ConfigError(
            f"rollout.weights.transport=cuda_ipc: the engines of controller.pools.{controller.pool_of('rollout')} "
            "(offload=true) have left the device when weights come; use shared_memory"
        )
    if controller.pool_of("policy") == controller.pool_of("rollout") and not config.rollout.weights.staged:
        raise ConfigError(
            "rollout.weights.staged=false: policy and rollout work in one process by turns, and neither could wait for "
            "the other; leave it true, or give them pools of their own"
        )
    return {
        name: (pool := controller.pool(name)).model_copy(update={"threads": pool.threads or config.threads})
        for name in dict.fromkeys(map(controller.pool_of, roles))
    }


def _sharing(config: RLConfig, roles: Iterable[Place]) -> set[Place]:
    """Those of these roles that train, or look, on devices which they and the rollout engines use by turns."""
    controller = config.controller
    shared = controller.pool_of("rollout")
    return {r for r in roles if r != "rollout" and controller.pool_of(r) == shared and controller.pool(shared).offload}


def _reachable(config: RLConfig, reports: Mapping[str, list[Report]]) -> None:
    """Raises `ConfigError` where weights would have to leave a machine by its own memory."""
    policy = reports[config.controller.pool_of("policy")][0].host
    elsewhere = {r.host for r in reports[config.controller.pool_of("rollout")]} - {policy}
    if elsewhere and config.rollout.weights.transport in ("shared_memory", "cuda_ipc"):
        raise ConfigError(
            f"rollout.weights.transport={config.rollout.weights.transport} stays on one machine, but the policy works "
            f"on {policy} and the rollout on {', '.join(sorted(elsewhere))}; use broadcast, or files on a shared disk"
        )


def _in_process(config: RLConfig) -> bool:
    return engine_class("rollout", config.rollout.name).in_process


# ---------------------------------------------------------------------- made where they work


def _workers(config: RLConfig, algorithm: Algorithm, training: bool) -> dict[Place, tuple[type, Any]]:
    """Class and factory of each role's worker."""
    found: dict[Place, tuple[type, Any]] = {"policy": (PolicyWorker, partial(_policy, config, algorithm, training))}
    if "reference" in algorithm.uses:
        found["reference"] = (ReferenceWorker, partial(_reference, config))
    if "critic" in algorithm.uses:
        found["critic"] = (CriticWorker, partial(_critic, config, algorithm))
    if config.reward_model.model is not None:
        found["reward_model"] = (RewardModelWorker, partial(_reward_model, config, config.reward_model.model))
    return found


def _gauge(dtype: str, seat: Seat) -> Gauge:
    return Gauge(dtype, seat.ranks)


def _policy(config: RLConfig, algorithm: Algorithm, training: bool, seat: Seat) -> PolicyWorker:
    engine = _trainer(config, config.model, config.trainer, seat, trainable=training)
    return PolicyWorker(engine, algorithm, seat.ranks == 1, seat.rank, seat.address)


def _reference(config: RLConfig, seat: Seat) -> ReferenceWorker:
    model = config.reference.model or config.model
    return ReferenceWorker(_trainer(config, model, config.trainer, seat, trainable=False))


def _critic(config: RLConfig, algorithm: Algorithm, seat: Seat) -> CriticWorker:
    from treadle.engines.torch.model import has_score

    model = config.critic.model or config.model
    engine = _trainer(config, model, config.critic.trainer, seat, has_score(model), head="value")
    return CriticWorker(engine, algorithm, seat.ranks == 1)


def _reward_model(config: RLConfig, model: str, seat: Seat) -> RewardModelWorker:
    return RewardModelWorker(_trainer(config, model, config.trainer, seat, True, head="value", trainable=False))


def _trainer(
    config: RLConfig, model: str, trainer: TorchConfig, seat: Seat, scores: bool = False, **options: Any
) -> Any:
    """A training engine: whole on one rank, sharded over several."""
    from treadle.engines.torch.mesh import make_mesh
    from treadle.engines.torch.model import load_model, load_sharded

    engine = engine_class("engines", trainer.name)
    options["total_steps"] = config.optimizer_steps
    if seat.ranks == 1:
        return engine(load_model(model, trainer.dtype, scores), trainer, **options)
    mesh = make_mesh(seat.ranks, trainer.shard_ranks)
    return engine(load_sharded(model, trainer.dtype, mesh, scores), trainer, mesh=mesh, **options)


def _embedded(config: RLConfig, seat: Seat) -> RolloutWorker:
    """An engine in this very process, which shares its device with whoever else works here."""
    from treadle.engines.torch.model import checkpoint_tensors, load_model, load_tokenizer, places
    from treadle.rollout.embedded.replica import EmbeddedReplica

    model = load_model(config.model, config.trainer.dtype)
    engine = engine_class("rollout", config.rollout.name)(
        model,
        load_tokenizer(config.model),
        config.rollout,
        seat.device,
        owns_weights=True,
        places=partial(places, model),
    )
    return RolloutWorker(lambda name: EmbeddedReplica(name, engine, seat.device, lambda: checkpoint_tensors(model)))


def _apart(config: RLConfig, context: int, seat: Seat) -> RolloutWorker:
    """An engine in processes that this one starts."""
    from treadle.engines.torch.model import find

    make = engine_class("rollout", config.rollout.name).replica
    shared = config.controller.pool(config.controller.pool_of("rollout")).offload
    options = {"dtype": config.trainer.dtype, "context": context, "threads": seat.threads, "sleeps": shared}
    model = find(config.model)
    return RolloutWorker(lambda name: make(name, model, config.rollout, **options))
