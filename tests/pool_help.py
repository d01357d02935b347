"""Generation engines that are nothing but a clock and a hash, for a pool to be tried on: they die, hang, send garbage.

A token is a function of the tokens before it and of the version that sampled it, so whoever reads a completion sees
whether a token was lost, came twice, or carries another version than the one that sampled it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from tests import virtual_clock
from treadle.errors import ReplicaLost, RolloutError, WeightSyncError
from treadle.handles import OnPublish
from treadle.rollout.pool import Pool
from treadle.rollout.remote import Asked, Heard, RemoteReplica, Serving
from treadle.rollout.replicas import Limits, Loaded, Piece, Replica
from treadle.types import Completion, SamplingParams, TokenRequest
from treadle.weights.shipment import MovedOn, Shipment
from treadle.weights.stream import Address, Sent

T = TypeVar("T")

VOCABULARY, CONTEXT = 1 << 20, 4096
_END, _CANCEL = Piece([], []), Piece([], [])  # an engine ends a stream and says nothing, or cancels it
TIMEOUT = 10.0  # of the pools here, virtual seconds
A_LITTLE = 0.1  # of a virtual second: commands and tokens of the fakes take longer
MODES: tuple[OnPublish, ...] = ("drain", "resume", "continue")
COMMANDS = ("expect", "received", "pause", "load", "resume")  # of a publish
FOREVER = 20_000.0  # virtual seconds after which a program counts as hung: a pool's watch keeps the clock going


def token(before: Sequence[int], version: int) -> int:
    """What an engine of this version samples after these tokens."""
    return zlib.crc32(repr((tuple(before), version)).encode()) % VOCABULARY


def logprob(sampled: int) -> float:
    return -(sampled % 97) / 64  # exact in float32


def manifest(version: int) -> dict[str, str]:
    return {"weight": f"float32[1] {version}"}


@dataclass
class World:
    """What the fakes of one test share: how they behave, and what was seen of them."""

    capacity: int = 2
    latency: float = 1.0  # seconds a token
    command: float = 0.25  # seconds a command
    chunk: int = 1  # tokens of a piece
    hops: int = 0  # rounds of the event loop that a piece is under way
    abort: float = 0.0  # seconds until an engine is rid of a request that was left
    reports: bool = False  # versions come with the last piece
    way: float | None = None  # seconds to and from an engine in another process; None: they are in this one
    made: list[Fake] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)  # engine, command
    wrong: list[str] = field(default_factory=list)  # what no pool may do
    seeds: dict[tuple[int, int], int] = field(default_factory=dict)  # noise, position → seed
    totals: dict[int, set[int]] = field(default_factory=dict)  # noise → tokens that were asked of it
    sent: dict[int, asyncio.Event] = field(default_factory=dict)  # shipments, by session
    prepare: Callable[[Fake], None] = lambda fake: None
    arrive: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)  # until others have left the engines' devices
    versions: dict[int, int] = field(default_factory=dict)  # of the shipments, by session

    def launch(self, name: str) -> Replica:
        fake = Fake(name, self)
        self.prepare(fake)
        self.made.append(fake)
        return fake if self.way is None else RemoteReplica(name, Far(fake), self.capacity, 1)

    @property
    def alive(self) -> list[Fake]:
        return [fake for fake in self.made if not fake.gone.is_set()]

    def commands(self, name: str) -> list[str]:
        return [what for who, what in self.log if who == name]


class Fake:
    """A `Replica`. It answers commands one after the other, as engines do."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world, self.capacity = name, world, world.capacity
        self.receivers = (f"{name}-0",)
        self.version: int | None = None
        self.inside = self.peak = 0
        self.gone, self.frozen = asyncio.Event(), False
        self.garbage: str | None = None  # what is wrong with what it sends
        self.tampered: str | None = None  # the step after which its weights are not those that were sent
        self.dies_in: set[str] = set()  # commands
        self.hangs_in: set[str] = set()
        self.raises_in: dict[str, Exception] = {}
        self.stubborn = False  # what hangs hangs on for a while when it is cancelled, and it starts though it was ended
        self._going = asyncio.Event()
        self._going.set()
        self._turn = asyncio.Lock()
        self._expected: Address | None = None
        self._loads: dict[str, int] = {}
        self._queues: set[asyncio.Queue[Piece | Exception]] = set()
        self.asleep = False

    # ------------------------------------------------------------------ what a test does to it

    def die(self) -> None:
        self.gone.set()
        for queue in self._queues:
            queue.put_nowait(self._lost())

    def freeze(self) -> None:
        """It answers nothing from here on."""
        self.frozen = True
        self._going.clear()

    # ------------------------------------------------------------------ Replica

    async def start(self) -> None:
        await self._do("start")

    async def stream(self, request: TokenRequest, seed: int) -> AsyncIterator[Piece]:
        self._judge(request, seed)
        if self.gone.is_set():
            raise self._lost()
        queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._queues.add(queue)
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        producer, finished = asyncio.ensure_future(self._produce(request, queue)), False
        try:
            while True:
                piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece is _END:
                    return
                if piece is _CANCEL:
                    raise asyncio.CancelledError
                finished = piece.finish is not None
                yield piece
                if finished:
                    return
        finally:
            producer.cancel()
            if self.world.abort and not finished and not self.gone.is_set():
                await asyncio.sleep(self.world.abort)
            self.inside -= 1
            self._queues.discard(queue)

    async def pause(self, keep_cache: bool) -> None:
        await self._do("pause", f"pause keep_cache={keep_cache}")
        self._going.clear()

    async def resume(self) -> None:
        await self._do("resume")
        if self.asleep:
            self.world.wrong.append(f"{self.name} was resumed asleep")
        if not self.frozen:
            self._going.set()

    async def expect(self, address: Address) -> None:
        await self._do("expect")
        if not address.staged and self._going.is_set():
            self.world.wrong.append(f"{self.name} was to take weights bucket by bucket while it generates")
        self._expected = address

    async def received(self) -> Sequence[Mapping[str, str]]:
        if self._expected is None:
            self.world.wrong.append(f"{self.name} was asked for weights that it was not told of")
        await self._do("received")
        await self._sent()
        return [self._arrived("received")]

    async def load(self, version: int) -> Loaded:
        if self._going.is_set() and not self.frozen and not self.gone.is_set():
            self.world.wrong.append(f"{self.name} was to load while it generates")
        if self.asleep:
            self.world.wrong.append(f"{self.name} was to load asleep")
        await self._do("load")
        assert self._expected is not None
        await self._sent()
        arrived = self._arrived("load")
        self.version = self.world.versions[self._expected.session]
        if self.version != version:
            self.world.wrong.append(f"{self.name} was sent {self.version} and told that it is {version}")
        self._expected = None
        return Loaded([arrived], load=1.0, readback=2.0, digest=3.0)

    async def sleep(self) -> None:
        await self._do("sleep")
        self.asleep = True
        self._going.clear()

    async def wake(self) -> None:
        await self._do("wake")
        self.asleep = False

    def stats(self) -> Mapping[str, float]:
        return {"running": self.inside}

    async def close(self) -> None:
        self.world.log.append((self.name, "close"))
        if "close" in self.raises_in:
            raise self.raises_in["close"]
        if "close" in self.hangs_in:
            await asyncio.get_running_loop().create_future()
        self.die()

    # ------------------------------------------------------------------ help

    def _lost(self) -> ReplicaLost:
        return ReplicaLost(f"rollout engine {self.name} died")

    async def _do(self, command: str, said: str = "") -> None:
        self.world.log.append((self.name, said or command))
        async with self._turn:
            if command in self.hangs_in or self.frozen:
                await self._hang()
            await asyncio.sleep(self.world.command)
        if command == "start" and self.stubborn:
            self.gone.clear()
        if command in self.dies_in:
            self.die()
        if self.gone.is_set():
            raise self._lost()
        if command in self.raises_in:
            raise self.raises_in[command]

    async def _hang(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            if self.stubborn:
                await asyncio.sleep(5 * TIMEOUT)

    async def _sent(self) -> None:
        assert self._expected is not None
        await self.world.sent[self._expected.session].wait()

    def _arrived(self, step: str) -> dict[str, str]:
        assert self._expected is not None
        version = self.world.versions[self._expected.session]
        return manifest(version if self.tampered != step else -1)

    def _judge(self, request: TokenRequest, seed: int) -> None:
        """What no pool may ask."""
        wrong = self.world.wrong
        if self.world.seeds.setdefault((request.noise, request.position), seed) != seed:
            wrong.append(f"{request.id} at {request.position} has got two seeds")
        if self.version is None and not self.gone.is_set():
            wrong.append(f"{request.id} came to {self.name}, which has no weights")
        total, known = request.position + request.params.max_tokens, self.world.totals.setdefault(request.noise, set())
        if request.position == 0:
            known.add(total)
        if total not in known or request.params.max_tokens < 1:
            wrong.append(f"{request.id} at {request.position} asks for {request.params.max_tokens} tokens")
        if self.inside > self.capacity and not self.gone.is_set():
            wrong.append(f"{request.id} is one more than {self.name} serves together")

    async def _produce(self, request: TokenRequest, queue: asyncio.Queue[Piece | Exception]) -> None:
        tokens, versions = list(request.token_ids), list[int]()
        while True:
            await self._step()
            sampled: list[int] = []
            finish = None
            while len(sampled) < self.world.chunk and finish is None:
                assert self.version is not None
                sampled.append(token(tokens, self.version))
                tokens.append(sampled[-1])
                versions.append(self.version)
                if sampled[-1] in request.params.stop_token_ids:
                    finish = "stop"
                elif len(versions) == request.params.max_tokens and self.garbage not in ("too many", "empty"):
                    finish = "length"
            for _ in range(self.world.hops):
                await asyncio.sleep(0)
            told = list(versions) if finish is not None and self.world.reports else None
            queue.put_nowait(self._spoilt(Piece(sampled, [logprob(t) for t in sampled], finish, told)))
            if finish is not None:
                return

    async def _step(self) -> None:
        """The time that a token takes. A pause lets nobody finish; who goes on begins again."""
        while True:
            await self._going.wait()
            await asyncio.sleep(self.world.latency)
            if self._going.is_set():
                return

    def _spoilt(self, piece: Piece) -> Piece:
        kind, tokens, logprobs = self.garbage, list(piece.tokens), list(piece.logprobs)
        if kind == "nan":
            return replace(piece, logprobs=[float("nan")] * len(tokens))
        if kind == "outside":
            return replace(piece, tokens=[VOCABULARY, *tokens[1:]])
        if kind == "unequal":
            return replace(piece, logprobs=[*logprobs, 0.0])
        if kind == "too many":
            return replace(piece, finish=None)
        if kind == "early":
            return replace(piece, finish="abort")
        if kind == "empty":
            return Piece([], [])
        return {"silent end": _END, "cancelled": _CANCEL}.get(kind or "", piece)


class Far:
    """The handle of a fake in another process, as the controller has it: calls take their time there and back."""

    def __init__(self, fake: Fake) -> None:
        self.serving = Serving(fake)
        self.fake = fake

    async def start(self, name: str) -> None:
        await self._there(self.fake.start)

    async def submit(self, asked: Sequence[Asked]) -> None:
        await self._there(partial(_told, self.serving.submit, asked))

    async def drop(self, number: int) -> None:
        await self._there(partial(self.serving.drop, number))

    async def poll(self) -> tuple[list[Heard], Mapping[str, float]]:
        return await self._there(self.serving.poll)

    async def pause(self, keep_cache: bool) -> int:
        return await self._there(partial(self.serving.pause, keep_cache))

    async def resume(self) -> None:
        await self._there(self.fake.resume)

    async def expect(self, address: Address) -> None:
        await self._there(partial(self.fake.expect, address))

    async def received(self) -> Sequence[Mapping[str, str]]:
        return await self._there(self.fake.received)

    async def load(self, version: int) -> Loaded:
        return await self._there(partial(self.fake.load, version))

    async def sleep(self) -> None:
        await self._there(self.fake.sleep)

    async def arrive(self) -> None:
        await self._there(self.fake.world.arrive)

    async def wake(self) -> None:
        await self._there(self.fake.wake)

    async def end(self) -> None:
        await self._there(self.serving.close)

    async def _there(self, call: Callable[[], Awaitable[T]]) -> T:
        assert self.fake.world.way is not None
        await asyncio.sleep(self.fake.world.way)
        try:
            return await call()
        finally:
            await asyncio.sleep(self.fake.world.way)


async def _told(call: Callable[[T], None], what: T) -> None:
    call(what)


def request(name: str, tokens: int = 8, **changes: Any) -> TokenRequest:
    """`name`: of the sample; its prompt and its noise follow from it."""
    known = {"stop_token_ids": changes.pop("stop_token_ids", ())}
    number = zlib.crc32(name.encode())
    params = SamplingParams(max_tokens=tokens, **known)
    return replace(TokenRequest(name, (number % VOCABULARY, 7), params, noise=number), **changes)


def check(asked: TokenRequest, got: Completion) -> None:
    """Every token is the one that its version samples there, none is missing and none is there twice."""
    before = list(asked.token_ids)
    for sampled, version, said in zip(got.token_C, got.version_C, got.logprob_C, strict=True):
        assert sampled == token(before, int(version)), f"{asked.id}: token {len(before)} is not version {version}'s"
        assert said == logprob(int(sampled))
        before.append(int(sampled))
    stopped = int(got.token_C[-1]) in asked.params.stop_token_ids
    assert got.finish == ("stop" if stopped else "length")
    assert stopped or len(got.token_C) == asked.params.max_tokens
    assert not {int(t) for t in got.token_C[:-1]} & set(asked.params.stop_token_ids)


class Publisher:
    """Ships versions to a pool, as the real one does, with nothing in them."""

    def __init__(self, world: World, pool: Pool) -> None:
        self.world, self.pool = world, pool
        self.version: int | None = None
        self.asked: list[tuple[str, ...]] = []  # who was to be supplied
        self._busy = asyncio.Lock()
        self.moved_on = False  # the policy has no longer what was published
        self.staged = True  # whether supplies are
        pool.supply = self.supply

    def shipment(self, version: int, receivers: tuple[str, ...], staged: bool = True, sent: bool = True) -> Shipment:
        session = len(self.world.versions)
        self.world.versions[session], self.world.sent[session] = version, asyncio.Event()
        address = Address("fake", "", session, receivers, 1, staged, delta=False, keep=False, timeout=TIMEOUT)
        shipment = Shipment(address, version)
        if sent:
            self.send(shipment)
        return shipment

    def send(self, shipment: Shipment) -> None:
        self.world.sent[shipment.address.session].set()
        shipment.sent.set_result(Sent(manifest(shipment.version), 1, 1, None, 0.0, 0.0, 0.0))

    async def __call__(
        self, version: int, on_publish: OnPublish = "resume", staged: bool = True
    ) -> Mapping[str, float]:
        async with self._busy:
            shipment = self.shipment(version, self.pool.receivers(), staged)
            costs = await self.pool.load(shipment, version, on_publish)
            self.version = version
        return costs

    async def supply(self, receivers: tuple[str, ...]) -> bool:
        async with self._busy:
            self.asked.append(receivers)
            if self.version is None or self.moved_on:
                return False
            try:
                await self.pool.feed(self.shipment(self.version, receivers, self.staged))
            except MovedOn:
                return False
            self.pool.proved(receivers)
        return True


@dataclass
class Scene:
    """One pool of fakes, open."""

    world: World
    pool: Pool
    publish: Publisher

    def at(self, slot: str) -> Fake:
        """The engine that is there now."""
        name = self.pool._members[slot].replica.name
        return next(fake for fake in self.world.made if fake.name == name)

    def ask(self, asked: TokenRequest) -> asyncio.Task[Completion]:
        return asyncio.ensure_future(self.pool.generate(asked))

    def settled(self) -> None:
        """Nothing leaks: after all has ended no place is taken, and nobody waits."""
        assert not len(self.pool._waiting)
        assert self.pool._running == 0
        for member in self.pool._members.values():
            assert (member.load.running, member.load.tokens, member.served) == (0, 0, set())
        for fake in self.world.made:
            assert fake.inside == 0 or fake.gone.is_set()
            assert fake.peak <= fake.capacity + 1  # a place is kept for a probe
        assert self.world.wrong == []


Main = Callable[[Scene], Coroutine[Any, Any, T]]


def play(
    main: Main[T],
    world: World | None = None,
    *,
    replicas: int = 2,
    restarts: int = 3,
    version: int | None = 0,
    kind: Callable[..., Pool] = Pool,
) -> T:
    """Run a program on an open pool that holds a version (None: no weights yet), and see that nothing is left of it."""
    there = world or World()

    async def whole() -> T:
        complaints: list[Mapping[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        limits = Limits(replicas, VOCABULARY, CONTEXT, TIMEOUT, start_timeout=50.0, restarts=restarts)
        pool = kind(there.launch, limits, None)
        scene = Scene(there, pool, Publisher(there, pool))
        try:
            async with asyncio.timeout(FOREVER):
                await pool.open()
                if version is not None:
                    await scene.publish(version)
                return await main(scene)
        finally:
            await pool.close()
            await turns()
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert left == []
            assert complaints == []
            assert there.wrong == []

    return virtual_clock.run(whole())


async def turns(count: int = 20) -> None:
    """Let the event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


def now() -> float:
    return asyncio.get_running_loop().time()


async def outcome(work: Awaitable[T]) -> T | RolloutError | WeightSyncError:
    """What comes of it: a result, or the error that a user reads."""
    try:
        return await work
    except (RolloutError, WeightSyncError) as error:
        return error


async def all_of(scene: Scene, asked: Sequence[TokenRequest]) -> list[Completion]:
    """What they get, seen to be right."""
    found = await asyncio.gather(*(scene.pool.generate(one) for one in asked))
    for one, got in zip(asked, found, strict=True):
        check(one, got)
    return found


def samples(count: int, tokens: int = 8, group: str = "", **changes: Any) -> list[TokenRequest]:
    return [request(f"{group or 'r'}.{i}", tokens, prefix=group, **changes) for i in range(count)]


def died(scene: Scene) -> int:
    return int(scene.pool.stats()["fenced"])
