"""Back end `ray`: pools of processes on a Ray cluster. All that is particular to Ray is in this file.

A pool is a placement group with one bundle, and one actor (`Host`), for each rank. Arguments that are large, or that
several ranks get, go into Ray's object store once; tensors lie there as flat arrays that readers share instead of
copying them. Nobody may write into a tensor that came that way, and records are never changed in place.
"""

from __future__ import annotations

import asyncio
import socket
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from treadle.config import environment
from treadle.controller.config import ControllerConfig, PoolConfig
from treadle.controller.group import Group, Lost, Turn, Where, check, together
from treadle.controller.host import Factory, Host, Report, versions
from treadle.errors import ConfigError, WorkerError

_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_REACH = 5.0  # seconds in which the head of a cluster must take a connection
_SETTINGS = b"\x04"
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0\0\0\0\0"
"""How HTTP/2 begins, on which Ray speaks. Who understands it answers with its settings, too."""
_END = 5.0  # seconds that a process has to end by itself
_CALLS = 1 << 12  # at a time in one actor


class RayHost(Host):
    """A host in an actor of its own."""

    def __init__(self, rank: int, ranks: int, threads: int | None, offload: bool) -> None:
        flat_tensors()
        super().__init__(rank, ranks, threads, offload, ray.util.get_node_ip_address())


class RayLink:
    """The way to one actor."""

    def __init__(self, rank: int, actor: Any) -> None:
        self.rank, self.actor = rank, actor
        self.fate: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()
        self._sent = 0  # that compute

    def send(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], ordered: bool
    ) -> Awaitable[Any]:
        with _storing():
            called = self.actor.call.remote(self._sent if ordered else None, role, method, *args, **kwargs)
        self._sent += ordered  # a number that never arrives would be waited for, so it is taken once that is sure
        return _outcome(called)

    async def status(self) -> tuple[bool, str]:
        return await _outcome(self.actor.status.remote())

    def share(self, value: Any) -> Any:
        with _storing():
            return ray.put(value)


class RayBackend:
    """Pools of actors, from `open` to `close`."""

    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        self._started = False
        self._groups: list[PlacementGroup] = []
        self._links: dict[str, list[RayLink]] = {}
        self.reports: dict[str, list[Report]] = {}

    @classmethod
    async def open(cls, config: ControllerConfig, pools: Mapping[str, PoolConfig]) -> RayBackend:
        """Raises `ConfigError` for what the cluster does not have, `WorkerError` for processes that do not start; both
        say what to change. Nothing is left behind."""
        backend = cls(config)
        try:
            backend._connect()
            fits(pools, _nodes())
            for name, pool in pools.items():
                await backend._place(name, pool)
        except BaseException:
            await backend.close()
            raise
        return backend

    async def group(
        self,
        role: str,
        pool: str,
        worker: type,
        factory: Factory,
        attention: float = 0.0,
        turn: Turn = nullcontext,
    ) -> Group:
        """A worker on each rank of a pool, as one group."""
        links = self._pool(pool)
        await self._build(role, links, [factory] * len(links))
        return Group(role, worker, links, timeout=self._config.timeout, attention=attention, turn=turn)

    async def singles(self, role: str, pool: str, worker: type, factories: Sequence[Factory]) -> list[Group]:
        """A worker on each rank of a pool, each a group of its own."""
        links = self._pool(pool)
        await self._build(role, links, factories)
        return [Group(role, worker, [link], timeout=self._config.timeout) for link in links]

    async def close(self) -> None:
        """End all processes, whatever state they are in, and Ray if it was started here."""
        links = [link for links in self._links.values() for link in links]
        if ray.is_initialized():
            well = [link for link in links if not link.fate.done()]  # the others would not answer
            ended = [asyncio.ensure_future(_outcome(link.actor.close.remote())) for link in well]
            if ended:
                await asyncio.wait(ended, timeout=_END)
            for task in ended:
                task.cancel()
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
            for ending in (*(partial(ray.kill, link.actor) for link in links), *map(_removal, self._groups)):
                with suppress(RayError, RuntimeError, ValueError):  # one that is gone keeps nobody from the others
                    ending()
        self._links.clear()
        self._groups.clear()
        if self._started:
            ray.shutdown()
            self._started = False

    # ------------------------------------------------------------------ starting

    def _connect(self) -> None:
        if not ray.is_initialized():
            address = self._config.address
            if address not in (None, "auto"):
                _reach(address)
            try:
                with environment.changed(_ENVIRONMENT):
                    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
                    if address is None:
                        options["include_dashboard"] = False
                    ray.init(address or "local", **options)  # a name left out would join whatever runs here
            except (ConnectionError, RuntimeError, ValueError, RayError) as error:
                raise ConfigError(
                    f"controller.address={address}: this cluster cannot be joined: {error}; is it running, with "
                    "the same Ray, Python and token (RAY_AUTH_TOKEN) as here?"
                ) from error
            self._started = True
        flat_tensors()

    async def _place(self, name: str, pool: PoolConfig) -> None:
        """Start a process for each rank, compare their code with ours, and make them a process group."""
        group = placement_group([_bundle(pool)] * pool.ranks, strategy="PACK")
        self._groups.append(group)
        try:
            await asyncio.wait_for(group.ready(), self._config.start_timeout)
        except TimeoutError:
            raise WorkerError(
                f"controller.pools.{name}: no room for it within {self._config.start_timeout:g} s "
                "(controller.start_timeout); is the cluster in use by others? `ray status` shows it"
            ) from None
        threads = pool.threads or max(1, int(pool.cpus))
        options = {
            "num_cpus": pool.cpus,
            "num_gpus": pool.gpus,
            "resources": pool.resources,
            "max_concurrency": _CALLS,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}},
        }
        links = self._links[name] = []
        for rank in range(pool.ranks):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            actor = ray.remote(RayHost).options(scheduling_strategy=place, **options)
            links.append(RayLink(rank, actor.remote(rank, pool.ranks, threads, pool.offload)))
        self.reports[name] = await self._all(f"pool {name}", links, [link.actor.report.remote() for link in links])
        _same(name, self.reports[name])
        if pool.ranks > 1:
            meeting = [links[0].actor.rendezvous.remote()]
            (address,) = await self._all(f"pool {name}", links[:1], meeting)
            # The controller's limit comes first: it can say who is missing.
            entering = [link.actor.join.remote(address, 2 * self._config.timeout) for link in links]
            await self._all(f"pool {name}", links, entering)

    async def _build(self, role: str, links: Sequence[RayLink], factories: Sequence[Factory]) -> None:
        check(links)
        building = [link.actor.build.remote(role, f) for link, f in zip(links, factories, strict=True)]
        await self._all(role, links, building)

    async def _all(self, name: str, links: Sequence[RayLink], calls: Sequence[Any]) -> list[Any]:
        where = Where(f"start of {name}", len(links), limit="controller.start_timeout")
        return await together(where, links, [_outcome(call) for call in calls], self._config.start_timeout)

    def _pool(self, name: str) -> list[RayLink]:
        if name not in self._links:
            raise ConfigError(f"{name!r} is no pool of this cluster; there are: {', '.join(self._links) or 'none'}")
        return self._links[name]


def fits(pools: Mapping[str, PoolConfig], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises `ConfigError` naming the first pool that does not fit beside those before it on an empty cluster."""
    free = [dict(node) for node in nodes]
    for name, pool in pools.items():
        bundle = _bundle(pool)
        for rank in range(pool.ranks):
            room = next((n for n in free if all(n.get(k, 0) + 1e-6 >= v for k, v in bundle.items())), None)
            if room is None:
                has = " · ".join(sorted(map(_list, nodes))) or "no node"
                raise ConfigError(
                    f"controller.pools.{name}: there is room for {rank} of its {pool.ranks} ranks of {_list(bundle)} "
                    f"beside the pools before it; the cluster has {has}. Take fewer ranks, shares of a core "
                    "(cpus: 0.5), or a larger cluster"
                )
            for kind, amount in bundle.items():
                room[kind] -= amount


def flat_tensors() -> None:
    """Let tensors travel as arrays, which Ray lays out flat and readers share."""
    import torch

    ray.util.register_serializer(torch.Tensor, serializer=_array, deserializer=_tensor)


def _array(tensor: Any) -> tuple[Any, str]:
    import torch

    plain = tensor.detach().cpu().contiguous()
    half = plain.dtype == torch.bfloat16
    return (plain.view(torch.int16) if half else plain).numpy(), "bfloat16" if half else ""


def _tensor(told: tuple[Any, str]) -> Any:
    import torch

    array, kind = told
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if kind else tensor


def _bundle(pool: PoolConfig) -> dict[str, float]:
    wanted = {"CPU": pool.cpus, "GPU": pool.gpus, **pool.resources}
    return {kind: amount for kind, amount in wanted.items() if amount > 0}


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _removal(group: PlacementGroup) -> Callable[[], None]:
    return partial(remove_placement_group, group)


def _list(resources: Mapping[str, float]) -> str:
    shown = {k: v for k, v in resources.items() if not k.startswith(("node:", "memory", "object_store"))}
    return "{" + ", ".join(f"{kind}: {amount:g}" for kind, amount in sorted(shown.items())) + "}"


def _reach(address: str) -> None:
    """Raises `ConfigError` unless a head can be there: Ray itself would look for minutes."""
    host, _, port = address.rpartition(":")
    secret = environment.child_environment().get("RAY_USE_TLS", "0").lower() in ("1", "true")
    try:
        with socket.create_connection((host, int(port)), timeout=_REACH) as head:
            head.sendall(_GREETING)
            answer = b"" if secret else head.recv(9)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"controller.address={address}: nothing answers there ({error}); give host:port of `ray start --head`, or "
            "leave it out to start Ray on this machine"
        ) from error
    if not secret and answer[3:4] != _SETTINGS:
        raise ConfigError(
            f"controller.address={address}: what answers there is no Ray; give host:port of `ray start --head`, whose "
            "port is 6379 if nothing else was said"
        )


def _same(pool: str, reports: Sequence[Report]) -> None:
    ours = versions()
    for report in reports:
        for name in sorted(ours.keys() | report.versions.keys()):
            here, there = ours.get(name, "missing"), report.versions.get(name, "missing")
            if here != there:
                raise ConfigError(
                    f"controller.pools.{pool}: {report.host} ({report.address}) has {name} {there}, this process has "
                    f"{here}; install the same on all nodes"
                )


async def _outcome(reference: Any) -> Any:
    """What a call on an actor gives."""
    try:
        return await reference
    except RayTaskError as error:  # before its method or behind it: what came or went could not be read or written
        raise Lost(f"{type(error.cause).__name__}: {str(error.cause).partition(chr(10))[0]}") from error
    except RayError as error:
        raise Lost(_said(error)) from error


@contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise WorkerError(
            "Ray's object store is full, and so is the disk that it falls back on: give it more memory (ray start "
            f"--object-store-memory), free the disk, or make steps smaller; {_said(error)}"
        ) from error


def _said(error: Exception) -> str:
    """The lines of Ray's page about a death that tell something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in ("died", "killed", "detail", "memory", "node"))]
    return " ".join(telling or lines)[:400]
