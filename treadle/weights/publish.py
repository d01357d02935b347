"""Publishing: the policy's weights reach the rollout engines, and every engine proves that it uses them.

Every publish is attested before anything sampled under it may train:

1. *bytes*: what an engine holds equals what the trainer sent, tensor by tensor (nothing to compare where both use the
   same tensors);
2. *behaviour*: each engine samples a probe, and the policy must score its tokens as the engine did, and closer than the
   policy of the publish before would have, wherever the two differ by more than rounding. The probe is always the same
   request, and longer than a block of cached keys and values, so a cache that outlived a load shows, as do a tied head
   left old or an adapter that was never applied.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from treadle.batch import Batch
from treadle.errors import ReplicaLost, WeightSyncError
from treadle.types import Group, Kind, Max, Mean, Prompt, Request, Sample, SamplingParams, Statistics, Trajectory
from treadle.weights.shipment import MovedOn, Shipment
from treadle.weights.stream import Address, Sent

if TYPE_CHECKING:
    from treadle.handles import Agent, Device, Generator, ModelHandle, OnPublish, RolloutHandle, Weights
    from treadle.weights.config import WeightsConfig

T = TypeVar("T")
U = TypeVar("U")

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Nats that a probe token's log-prob may differ by, for trainer and engine cut their matrix products differently."""
ROUNDING = 8.0
"""A change of this many times the gaps seen so far is more than rounding."""
PROBE_TOKENS = 33
"""Length of a probe's prompt: more than a block of keys and values that engines cache (16 or 32 tokens)."""
PROBE = SamplingParams(temperature=2.0, max_tokens=2)
"""How a probe is answered: drawn, for the likeliest token of a sure model has a log-prob of 0 under any weights."""
SHORT_PROBE = replace(PROBE, max_tokens=1)
"""The same of an engine whose layers are read back one by one: a second step would use the same ones."""
_LOOKS_LIKE = "A stale cache, an old tied head or a weight that was not loaded looks like this"


@dataclass
class Prober:
    """Has engines prove by their answers that they generate with the policy's weights."""

    policy: ModelHandle
    probe: Prompt
    agent: Agent  # answers the probe in a few tokens
    tolerance: float
    _before: tuple[list[int], np.ndarray] | None = field(default=None, init=False)  # at the version before this one
    _now: tuple[int, list[int], np.ndarray] | None = field(default=None, init=False)
    _answer: Trajectory | None = field(default=None, init=False)  # that was scored last
    _gap: float = field(default=1e-6, init=False)  # the largest seen; at first some float32 rounding of a log-prob

    async def __call__(self, version: int, engines: Mapping[str, Generator], moved: bool = False) -> float:
        """The largest difference on the probe, in nats. Raises `WeightSyncError` naming the engine and the symptom, and
        `ReplicaLost` where every engine died over it. `moved`: the policy may have learned since that version; then it
        is not asked again, and `MovedOn` is raised where what it said then does not tell."""
        asked = (self.agent(Request(self.probe, Kind.EVALUATION), "probe.0", engine) for engine in engines.values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        gaps = []
        for name, answer in zip(engines, answers, strict=True):
            if isinstance(answer, ReplicaLost):
                continue  # its weights were verified to the last layer, and others prove the publish
            if isinstance(answer, BaseException):
                raise answer
            if moved and (self._now is None or self._now[:2] != (version, _sampled(answer[0]))):
                raise MovedOn(f"what the policy of version {version} would say is not known any more")
            gaps.append(await self._judged(version, name, answer[0]))
        if not gaps:
            raise ReplicaLost(f"version {version}: no rollout engine is left to prove it")
        return max(gaps)

    async def _judged(self, version: int, name: str, answer: Trajectory) -> float:
        sampled = answer.version_T >= 0
        tokens, engine_C = _sampled(answer), answer.logprob_T[sampled]
        if (stamped := set(answer.version_T[sampled].tolist())) != {version}:
            raise WeightSyncError(
                f"version {version} was published, but the probe's tokens of {name} carry {sorted(stamped)}"
            )
        policy_C = await self._policy(version, tokens, answer)
        gap = float(np.abs(engine_C - policy_C).max())
        if not gap <= self.tolerance:  # NaN must not pass
            raise WeightSyncError(
                f"version {version} did not reach {name}: trainer and engine differ by {gap:.3g} nats on a "
                f"probe (at most {self.tolerance:g} at this precision). {_LOOKS_LIKE}"
            )
        if self._before is not None and self._before[0] == tokens:
            change = float(np.abs(self._before[1] - policy_C).max())
            behind = float(np.abs(self._before[1] - engine_C).max())
            if behind < gap and change > ROUNDING * max(behind, self._gap):
                raise WeightSyncError(
                    f"version {version} did not reach {name}: on a probe it answers as the version before "
                    f"({behind:.3g} nats off), not as the trainer ({gap:.3g} nats off). {_LOOKS_LIKE}"
                )
        self._gap = max(self._gap, gap)
        return gap

    async def foresee(self, version: int) -> None:
        """Ask the policy already, while engines load: its noise fixed, a probe is nearly always answered as before."""
        if self._answer is not None:
            await self._policy(version, _sampled(self._answer), self._answer)

    async def _policy(self, version: int, tokens: list[int], answer: Trajectory) -> np.ndarray:
        """What the policy says of these tokens; it is asked once for all engines that answer alike."""
        if self._now is not None and self._now[:2] == (version, tokens):
            return self._now[2]
        whole = answer if answer.temperature else replace(answer, temperature=1.0)  # as greedy answers are scored
        batch = Batch.pack([Group(0, self.probe, (Sample("probe", Kind.TRAIN, (whole,)),))])
        policy_C = (await self.policy.annotate(batch))["old_logprob_T"][batch.mask_T].numpy()
        if self._now is not None and self._now[0] != version:
            self._before = self._now[1:]
        self._now, self._answer = (version, tokens, policy_C), answer
        return policy_C


@dataclass
class LocalPublisher:
    """Publishes inside one process: by copy, or by stamping a version where trainer and engine share tensors."""

    rollout: RolloutHandle
    device: Device
    prober: Prober
    on_publish: OnPublish
    sent: Callable[[], Weights] | None  # None: shared, nothing is copied
    held: Callable[[], Weights] | None

    async def __call__(self, version: int) -> Statistics:
        await self.rollout.load(self.sent() if self.sent else None, version, self.on_publish)
        if self.sent is not None and self.held is not None:
            sent, held = self.sent, self.held
            await self.device.run(lambda: equal(sent(), held(), version), 0)
        return {"publish/probe_gap": Max(await self.prober(version, {"the rollout engine": self.rollout}))}


class SendingHandle(Protocol):
    """A policy that sends its weights."""

    async def publish(self, address: Address) -> Sent: ...
    async def rendezvous(self) -> str:
        """host:port at which it can be met, free until now."""
        ...


class PoolHandle(Protocol):
    """Engines in other processes, which come and go."""

    supply: Callable[[tuple[str, ...]], Awaitable[bool]] | None
    weights: WeightsConfig
    place: str  # the directory of transports that need one
    attempts: int  # publishes of one version, where every engine dies over it

    def receivers(self) -> tuple[str, ...]: ...
    def each(self) -> Mapping[str, Generator]: ...
    async def load(self, weights: Shipment, version: int, on_publish: OnPublish) -> Mapping[str, float]: ...
    async def feed(self, shipment: Shipment) -> None: ...
    def proved(self, receivers: tuple[str, ...]) -> None: ...
    async def someone(self) -> None: ...


@dataclass
class ShippingPublisher:
    """Publishes to engines in other processes. Weights go from the policy's processes to theirs, not through here."""

    policy: SendingHandle
    rollout: PoolHandle
    prober: Prober
    on_publish: OnPublish
    _sessions: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _holding: tuple[str, ...] = field(default=(), init=False)  # receivers of the last publish, which all had it
    _published: tuple[int, Mapping[str, str]] | None = field(default=None, init=False)
    _ports: tuple[tuple[str, ...], str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.rollout.supply = self.supply

    async def __call__(self, version: int) -> Statistics:
        started = time.perf_counter()
        for attempt in itertools.count(1):
            await self.rollout.someone()
            try:
                async with self._busy:
                    sent, costs = await self._publish(version)
                loaded = time.perf_counter()
                gap = await self.prober(version, self.rollout.each())
                break
            except ReplicaLost:  # every one of them died over it
                if attempt >= self.rollout.attempts:
                    raise
        ended = time.perf_counter()
        seconds = {**costs, "assembly": sent.assembly, "wire": sent.wire, "probe": ended - loaded}
        found = {f"publish/{name}": Mean(value) for name, value in seconds.items()}
        if sent.unchanged is not None:
            found["publish/unchanged"] = Mean(sent.unchanged, sent.elements)
        return {
            "publish/probe_gap": Max(gap),
            "publish/seconds": Mean(ended - started),
            "publish/megabytes": Mean(sent.sent_bytes / 1e6),
            **found,
        }

    async def supply(self, receivers: tuple[str, ...]) -> bool:
        """Give engines that joined the weights of the last publish, if the policy still has them."""
        async with self._busy:
            if self._published is None:
                return False
            version, manifest = self._published
            shipment = Shipment(await self._address(receivers, delta=False), version, expected=manifest)
            self._holding = ()
            try:
                await _both(self._send(shipment), self.rollout.feed(shipment))
                engines = {n: e for n, e in self.rollout.each().items() if f"{n}-0" in receivers}
                await self.prober(version, engines, moved=True)
            except MovedOn:
                return False
            except WeightSyncError:
                if not shipment.sent.done():  # the policy was busy learning for too long: it has moved on
                    return False
                raise
            self.rollout.proved(receivers)
            return True

    async def _publish(self, version: int) -> tuple[Sent, Mapping[str, float]]:
        receivers = self.rollout.receivers()
        delta = self.rollout.weights.delta and receivers == self._holding
        shipment = Shipment(await self._address(receivers, delta), version)
        self._holding = ()
        sent, costs = await _both(self._foreseeing(shipment), self.rollout.load(shipment, version, self.on_publish))
        self._holding, self._published = receivers, (version, sent.manifest)
        return sent, costs

    async def _foreseeing(self, shipment: Shipment) -> Sent:
        sent = await self._send(shipment)
        await self.prober.foresee(shipment.version)
        return sent

    async def _send(self, shipment: Shipment) -> Sent:
        sent = await self.policy.publish(shipment.address)
        shipment.sent.set_result(sent)
        return sent

    async def _address(self, receivers: tuple[str, ...], delta: bool) -> Address:
        weights = self.rollout.weights
        return Address(
            transport=weights.transport,
            place=await self._port(receivers) if weights.transport == "broadcast" else self.rollout.place,
            session=next(self._sessions),
            receivers=receivers,
            bucket_bytes=weights.bucket_mb * 1_000_000,
            staged=weights.staged,
            delta=delta,
            keep=weights.delta,
            timeout=weights.timeout,
        )

    async def _port(self, receivers: tuple[str, ...]) -> str:
        """host:port of the group of these receivers: the same as long as they stay the same and all goes well. After a
        publish that failed, nobody knows which end still has the old group."""
        if self._ports is None or self._ports[0] != receivers or self._holding != receivers:
            self._ports = (receivers, await self.policy.rendezvous())
        return self._ports[1]


def _sampled(answer: Trajectory) -> list[int]:
    return answer.token_T[answer.version_T >= 0].tolist()


async def _both(one: Awaitable[T], other: Awaitable[U]) -> tuple[T, U]:
    """Both results; the first that fails ends the other one."""
    first, second = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        await asyncio.wait([first, second], return_when=asyncio.FIRST_EXCEPTION)
        for task in (second, first):  # what the receivers say tells more than that nobody took a bucket
            if task.done():
                task.result()
        return await first, await second
    finally:
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


def equal(sent: Weights, held: Weights, version: int) -> None:
    """Raise `WeightSyncError` naming the first tensor that did not arrive bit for bit."""
    import torch

    there = dict(held)
    for name, tensor in sent:
        if name not in there:
            raise WeightSyncError(f"version {version}: '{name}' was published but the rollout engine does not hold it")
        if there[name].dtype != tensor.dtype or not torch.equal(there[name], tensor):
            raise WeightSyncError(f"version {version}: '{name}' in the rollout engine differs from the trainer's")


def probe_tokens(text: Sequence[int], context: int) -> tuple[int, ...]:
    """A probe's prompt: these tokens, repeated until it is long enough, or as long as a context allows."""
    length = max(min(PROBE_TOKENS, context - PROBE.max_tokens), 1)
    return tuple(itertools.islice(itertools.cycle(text), length))
