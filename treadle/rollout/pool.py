"""A pool of generation engines behind one `RolloutHandle`: requests find a replica, and outlive it.

    generate ──► waiting, by priority ──► router ──► replica 0 ──► tokens, one by one
                      ▲                         └──► replica 1 ──► …
                      └── died, hung: what it was serving goes on elsewhere, from the tokens it has

Tokens are kept here, as they come. A replica that does not answer in time, or dies, is *fenced*: it is ended, counted,
and another one started in its place. The seed of a continuation follows from the sample's noise and its position alone.
A replica gets no more requests than it serves together; the others wait here, so that priorities hold.

Whatever gives every replica weights, takes its memory or ends it holds one lock, so that it happens by turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Literal, TypeVar

from treadle.errors import ReplicaLost, RolloutError, WeightSyncError
from treadle.rollout.progress import Progress, Queue, seed
from treadle.rollout.replicas import Limits, Loaded, Member, Replica, within
from treadle.rollout.requests import Decoder, check
from treadle.rollout.router import Router
from treadle.types import Completion, TokenRequest
from treadle.weights.shipment import MovedOn, Shipment

if TYPE_CHECKING:
    from treadle.handles import Generator, OnPublish, Weights
    from treadle.handles import Shipment as AnyShipment

T = TypeVar("T")
logger = logging.getLogger(__name__)
_SETTLE = 64  # rounds of the event loop in which tokens that a paused engine has sent reach those who wait for them
_LOOKS = 8  # times that hung replicas are looked for in the time that they are given


class Pool:
    """`handles.RolloutHandle` over replicas that `launch(name)` makes."""

    def __init__(self, launch: Callable[[str], Replica], limits: Limits, decoder: Decoder | None) -> None:
        self._launch, self._limits, self._decoder = launch, limits, decoder
        self._members: dict[str, Member] = {}  # by slot
        self._waiting = Queue()
        self._router = Router()
        self._arrived = self._made = self._tokens = self._fenced = self._continued = 0
        self._running = 0  # requests that some replica serves, those that it is still rid of included
        self._restarts = limits.restarts
        self._version: int | None = None
        self._gate: Literal["open", "drain", "shut"] = "open"
        self._paused = self._asleep = self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing, self._changed = asyncio.Lock(), asyncio.Event()
        self._last_error: Exception | None = None
        self.supply: Callable[[tuple[str, ...]], Awaitable[bool]] | None = None
        """Sends a replica that joined the weights of the pool's version; False where they cannot be had any more, so
        that it gets those of the next publish. The publisher sets it."""

    async def open(self) -> None:
        """Start the replicas. Raises what the first one that does not start raises."""
        for slot in range(self._limits.replicas):
            self._launched(str(slot))
        starts = (self._started(member) for member in self._members.values())
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error
        self._own(self._watch())

    # ------------------------------------------------------------------ RolloutHandle

    async def generate(self, request: TokenRequest) -> Completion:
        """Sample until a stop token, a stop string or `max_tokens`; on another replica if the first one dies."""
        return await self._generate(request, None)

    async def load(
        self, weights: Weights | AnyShipment | None, version: int, on_publish: OnPublish
    ) -> Mapping[str, float]:
        """Take a shipment on every replica, verify it, swap, and stamp `version`. In flight, by `on_publish`:

        - "drain": they finish first, new ones wait;
        - "resume": they stop, keep their tokens, and go on under the new weights with keys and values recomputed;
        - "continue": they go on with the keys and values that they have.

        Returns seconds: "pause" (that nothing was generated), "load", "readback", "digest". Raises `WeightSyncError`
        where a tensor is not what was sent, and `ReplicaLost` where no replica is left that took them.
        """
        if not isinstance(weights, Shipment):
            raise WeightSyncError(f"version {version}: engines in processes of their own take weights as a shipment")
        assert weights.version == version
        async with self._publishing:
            self._usable()
            targets = [m for m in self._living() if m.replica.receivers[0] in weights.address.receivers]
            await self._receive(targets, weights)
            async with self._awake(version):
                return await self._swap(targets, weights, on_publish)

    async def pause(self) -> None:
        """Stop between two tokens; requests, keys and values are kept."""
        self._paused = True
        await self._halt(self._living(), keep_cache=True)

    async def resume(self) -> None:
        self._paused = False
        await self._go()

    async def sleep(self) -> None:
        """Free the devices' memory. What is in flight keeps its tokens and, like new requests, waits for `wake`."""
        async with self._publishing:
            await self._sleep()

    async def wake(self) -> None:
        async with self._publishing:
            await self._wake()

    def stats(self) -> Mapping[str, float]:
        """waiting: requests that no replica serves yet · tokens: sampled so far · version · fenced: replicas that died
        or hung · continued: requests that went on elsewhere · and of each replica: "<slot>/running", "<slot>/queue",
        "<slot>/tokens_per_second", "<slot>/prefix_hits" (share of prompt tokens), "<slot>/preemptions"."""
        version = -1 if self._version is None else self._version
        found = {"waiting": len(self._waiting), "tokens": self._tokens, "version": version}
        found |= {"fenced": self._fenced, "continued": self._continued}
        for slot, member in self._members.items():
            if member.state == "ready":
                found |= {f"{slot}/{name}": value for name, value in member.replica.stats().items()}
        return found

    async def close(self) -> None:
        """End every replica. Requests that are still in flight get a `RolloutError`."""
        self._closed = True
        self._waiting.fail(RolloutError("the rollout engine was closed while this request was in flight"))
        members = list(self._members.values())
        tasks = [*self._tasks, *(task for m in members for task in m.served)]
        for member in members:
            self._lose(member)
        for task in tasks:
            task.cancel()
        self._changed.set()
        if tasks:
            await asyncio.wait(tasks, timeout=self._limits.timeout)
        await asyncio.gather(*(self._end(member) for member in members))

    # ------------------------------------------------------------------ replicas come and go

    def receivers(self) -> tuple[str, ...]:
        """The processes that a publish goes to."""
        return tuple(name for m in self._living() for name in m.replica.receivers)

    def each(self) -> Mapping[str, Generator]:
        """Every replica that has weights, on its own: a publish is proved by each of them."""
        return {m.replica.name: _One(self, m) for m in self._members.values() if m.state in ("unproved", "ready")}

    async def add(self) -> str:
        """Start one more replica; it serves as soon as it has weights. Returns its slot."""
        self._usable()
        slot = str(max((int(s) for s in self._members), default=-1) + 1)
        member = self._launched(slot)
        try:
            await self._started(member)
            await self._join(member)
        except BaseException:
            member.leaving = True
            self._fence(member, ReplicaLost(f"rollout engine {member.replica.name} could not be added"))
            raise
        return slot

    async def remove(self, slot: str) -> None:
        """Let a replica finish what it serves, and end it. Until then it gets the weights of publishes."""
        member = self._members.get(slot)
        if member is None:
            raise RolloutError(f"there is no rollout engine {slot} to remove; there are: {', '.join(self._members)}")
        member.leaving = True
        while member.load.running or any(progress.only is member for progress in self._waiting):
            await self._change()
        async with self._publishing:
            if member.state != "gone":
                self._lose(member)
                await self._replace(member)

    async def someone(self) -> None:
        """Wait until a replica can take weights. Raises `RolloutError` when none ever will."""
        while not self.receivers():
            self._usable()
            if not self._members:
                raise self._none_left()
            await self._change()

    async def feed(self, shipment: Shipment) -> None:
        """Give one replica, which has no weights yet, those of the pool's version. Raises `MovedOn` where that is no
        longer what it needs."""
        async with self._publishing:
            empty = [m for m in self._living() if m.state == "empty"]
            members = [m for m in empty if m.replica.receivers == shipment.address.receivers]
            if not members or self._asleep or shipment.version != self._version:
                raise MovedOn(f"nobody needs version {shipment.version} of the weights any more")
            await self._receive(members, shipment)
            async with self._awake(shipment.version):
                found = await self._install(members, shipment, keep_cache=False)
                if not self._held():
                    await self._each(found, lambda m: m.replica.resume(), "resume")
            for member in found:
                if member.state != "gone":
                    member.state, member.seen = "unproved", _now()

    def proved(self, receivers: tuple[str, ...]) -> None:
        """Engines that joined have proved that they use the weights which they were fed: from here on they serve."""
        for member in self._members.values():
            if member.state == "unproved" and member.replica.receivers == receivers:
                self._ready(member)
        self._changed.set()
        self._admit()

    def _launched(self, slot: str) -> Member:
        self._made += 1
        self._members[slot] = member = Member(self._launch(f"{slot}-{self._made}"), slot)
        return member

    async def _started(self, member: Member) -> None:
        name, limit = member.replica.name, self._limits.start_timeout
        turns = sum(m.state == "starting" for m in self._members.values())  # engines of one machine start in turn
        try:
            await within(member.replica.start(), limit * turns)
        except TimeoutError:
            raise RolloutError(f"rollout engine {name} did not start in rollout.start_timeout, {limit:g} s") from None
        if self._asleep:
            async with self._publishing:
                if self._asleep and member.state != "gone":
                    await self._ask(member, member.replica.sleep(), "sleep")
        if member.state == "gone":
            await self._end(member)  # what it started since
            raise ReplicaLost(f"rollout engine {name} was ended while it started")
        member.state = "empty"
        self._changed.set()

    async def _join(self, member: Member) -> None:
        """The weights of now, if they can still be had; else those of the next publish."""
        if self._version is not None and self.supply is not None and member.state == "empty" and not self._asleep:
            await self.supply(member.replica.receivers)

    async def _joined(self, member: Member) -> None:
        try:
            await self._join(member)
        except Exception as error:  # whatever it is: it cannot serve
            self._fence(member, error)

    def _ready(self, member: Member) -> None:
        if member.state != "gone":
            member.state, member.seen = "ready", _now()

    def _lose(self, member: Member) -> None:
        """It serves nothing from here on."""
        member.state = "gone"
        for task in member.served:
            task.cancel()
        self._waiting.fail(ReplicaLost(f"rollout engine {member.replica.name} is gone"), member)

    def _fence(self, member: Member, error: Exception) -> None:
        """Give a replica up: its requests go on elsewhere, another one takes its place."""
        if member.state == "gone":
            return
        logger.warning("%s; its %d requests go on elsewhere", error, member.load.running)
        self._last_error = error
        self._fenced += 1
        self._lose(member)
        self._own(self._replace(member))

    async def _replace(self, member: Member) -> None:
        await self._end(member)
        if self._members.get(member.slot) is not member or self._closed:
            return
        if member.leaving or self._restarts == 0:
            del self._members[member.slot]
            self._changed.set()
            self._admit()
            return
        self._restarts -= 1
        fresh = self._launched(member.slot)
        try:
            await self._started(fresh)
        except Exception as error:  # whatever starting an engine can raise
            self._fence(fresh, error)
        else:
            await self._joined(fresh)

    async def _end(self, member: Member) -> None:
        try:
            await within(member.replica.close(), self._limits.timeout)
        except Exception as error:  # it is given up all the same
            logger.warning("rollout engine %s did not end: %r", member.replica.name, error)
        member.ended.set()

    async def _watch(self) -> None:
        """Fence replicas that have work and give no sign of life."""
        while True:
            await asyncio.sleep(self._limits.timeout / _LOOKS)
            if self._held():
                continue
            for member in [m for m in self._living() if m.load.running]:
                if (silent := _now() - member.seen) > self._limits.timeout:
                    name = member.replica.name
                    self._fence(member, ReplicaLost(f"rollout engine {name} gave no token for {silent:.0f} s"))

    # ------------------------------------------------------------------ requests

    async def _generate(self, request: TokenRequest, only: Member | None) -> Completion:
        check(request, self._limits.vocabulary, self._limits.context, self._decoder)
        progress = Progress(request, self._arrived, self._limits.vocabulary, only)
        self._arrived += 1
        while progress.finish is None:
            member = await self._place(progress)
            try:
                await self._serve(progress, member)
            except ReplicaLost:
                if only is not None:
                    raise
                self._continued += 1
        return progress.completion

    async def _serve(self, progress: Progress, member: Member) -> None:
        """Go on with a request on this replica; raises `ReplicaLost` when that ends before the request does."""
        task = asyncio.ensure_future(self._stream(progress, member))
        member.served.add(task)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            task.add_done_callback(lambda task: self._over(progress, member, task))
            raise
        if (error := self._over(progress, member, task)) is not None:
            raise error
        if task.cancelled():  # by whoever gave the replica up, or else by the engine
            kind = ReplicaLost if member.state == "gone" else RolloutError
            raise kind(f"rollout engine {member.replica.name} dropped sample '{progress.request.id}'")

    def _over(self, progress: Progress, member: Member, task: asyncio.Task[None]) -> BaseException | None:
        """The replica is rid of a request. Returns what went wrong."""
        member.served.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ReplicaLost):
            self._fence(member, error)
        self._leave(progress, member)
        return error

    async def _stream(self, progress: Progress, member: Member) -> None:
        if member.state == "gone":  # since it was chosen
            raise ReplicaLost(f"rollout engine {member.replica.name} is gone")
        progress.continues()
        rest = progress.rest()
        pieces = member.replica.stream(rest, seed(rest))
        async with aclosing(pieces):  # type: ignore[type-var]
            async for piece in pieces:
                if piece.tokens:
                    member.seen = _now()
                assert self._version is not None
                self._tokens += progress.take(piece, self._version, self._decoder)
                if progress.finish is not None:
                    return
        raise RolloutError(f"sample '{progress.request.id}': the engine ended it before its time, and gave no reason")

    async def _place(self, progress: Progress) -> Member:
        """Wait for a replica with room."""
        self._usable()
        if progress.only is not None and progress.only.state == "gone":
            raise ReplicaLost(f"rollout engine {progress.only.replica.name} is gone")
        place = self._waiting.join(progress)
        self._admit()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._leave(progress, place.result())
            raise
        finally:
            self._waiting.leave(progress)
            self._changed.set()

    def _admit(self) -> None:
        """Place whoever waits, in order, as there is room."""
        if not self._members:
            self._waiting.fail(self._none_left())
        if self._held():
            return
        ready = {m.slot: m for m in self._members.values() if m.state == "ready" and not m.leaving}
        for progress in self._waiting:
            if self._gate == "drain" and not progress.token_C:
                continue
            request, only = progress.request, progress.only
            if only is not None:  # a place beside the others is kept for it: a publish waits for no long answer
                chosen = only if only.state in ("unproved", "ready") else None
            else:
                slot = self._router.choose(request.id, request.prefix, [m.load for m in ready.values()])
                chosen = ready[slot] if slot is not None else None
                if chosen is not None:
                    self._router.placed(request.id, request.prefix, chosen.slot)
            if chosen is not None:
                self._take(progress, chosen)
                self._waiting.place(progress, chosen)

    def _take(self, progress: Progress, member: Member) -> None:
        if member.load.running == 0:
            member.seen = _now()
        self._running += 1
        member.load.running += 1
        member.load.tokens += progress.cost

    def _leave(self, progress: Progress, member: Member) -> None:
        self._running -= 1
        member.load.running -= 1
        member.load.tokens -= progress.cost
        self._changed.set()
        self._admit()

    # ------------------------------------------------------------------ publishing

    async def _receive(self, targets: list[Member], shipment: Shipment) -> None:
        """What is staged arrives, and is verified, while generation goes on."""
        address = shipment.address
        if not address.staged:
            return
        await self._each(targets, lambda m: m.replica.expect(address), "take an address")
        found = await self._each(targets, lambda m: m.replica.received(), "receive weights", shipment)
        for member, manifests in found.items():
            await shipment.verify(member.replica.name, manifests)

    async def _install(self, targets: list[Member], shipment: Shipment, keep_cache: bool) -> dict[Member, Loaded]:
        """Stop, load, verify. What those that are left then did; raises `ReplicaLost` where none is."""
        address, version = shipment.address, shipment.version
        await self._halt(targets, keep_cache)
        if not address.staged:
            await self._each(targets, lambda m: m.replica.expect(address), "take an address")
        found = await self._each(targets, lambda m: m.replica.load(version), "load weights", shipment)
        for member, loaded in found.items():
            await shipment.verify(member.replica.name, loaded.manifests)
        left = {m: loaded for m, loaded in found.items() if m.state != "gone"}  # some may have died since
        if not left:
            told = f"version {version}: no rollout engine took it. The last one: {self._last_error}"
            raise ReplicaLost(told) from self._last_error
        return left

    async def _swap(self, targets: list[Member], shipment: Shipment, on_publish: OnPublish) -> Mapping[str, float]:
        """Stop, load, verify, go on. If it fails nothing is generated until a whole load has succeeded."""
        before, version = self._gate, shipment.version
        if on_publish == "drain" and before == "open":  # shut: the weights that they began with are lost
            await self._drain()
        started = _now()
        self._gate = "shut"
        try:
            found = await self._install(targets, shipment, on_publish == "continue")
        except ReplicaLost:
            self._gate = before  # nobody is left who may hold some of it
            self._admit()
            raise
        self._version = version
        for member in [m for m in self._members.values() if m.state == "ready" and m not in found]:
            self._fence(member, ReplicaLost(f"rollout engine {member.replica.name} did not take version {version}"))
        for member in found:
            self._ready(member)
        self._gate = "open"
        await self._go()
        return {
            "pause": _now() - started,
            "load": max(loaded.load for loaded in found.values()),
            "readback": max(loaded.readback for loaded in found.values()),
            "digest": max(loaded.digest for loaded in found.values()),
        }

    async def _drain(self) -> None:
        """Wait until all that have begun are done, while none begins. What has nobody left to go on with is not waited
        for."""
        if self._paused and self._running:
            raise RolloutError("requests are in flight in a paused engine: resume it to drain it")
        self._gate = "drain"
        self._admit()
        try:
            while self._running:
                await self._change()
        except BaseException:
            self._gate = "open"
            self._admit()
            raise

    @asynccontextmanager
    async def _awake(self, version: int) -> AsyncIterator[None]:
        """The time in which they load: they must not sleep."""
        self._usable()
        if self._asleep:
            raise WeightSyncError(f"version {version}: the rollout engines sleep; wake them before they load")
        yield

    async def _sleep(self) -> None:
        if not self._asleep:
            self._asleep = True
            await self._halt(self._living(), keep_cache=False)
            await self._each(self._living(), lambda m: m.replica.sleep(), "sleep")
            for member in [m for m in self._members.values() if m.state == "gone"]:
                await member.ended.wait()  # until then it may have memory

    async def _wake(self) -> None:
        if self._asleep:
            await self._each(self._living(), lambda m: m.replica.wake(), "wake")
            self._asleep = False
            await self._go()
            for member in self._living():
                self._own(self._joined(member))

    async def _halt(self, members: list[Member], keep_cache: bool) -> None:
        """Stop between two tokens. What they sent before arrives before this returns: it gets its version by that."""
        await self._each(members, lambda m: m.replica.pause(keep_cache), "pause")
        for _ in range(_SETTLE):
            await asyncio.sleep(0)

    async def _go(self) -> None:
        if not self._held():
            ready = [m for m in self._living() if m.state == "ready"]  # an empty one may be about to load
            self._seen()
            await self._each(ready, lambda m: m.replica.resume(), "resume")
            self._seen()
            self._admit()

    def _seen(self) -> None:
        """Their time without a token begins now."""
        for member in self._living():
            member.seen = _now()

    def _held(self) -> bool:
        return self._paused or self._asleep or self._gate == "shut"

    # ------------------------------------------------------------------ help

    def _living(self) -> list[Member]:
        return [m for m in self._members.values() if m.state in ("empty", "unproved", "ready")]

    async def _ask(self, member: Member, call: Awaitable[T], what: str, of: Shipment | None = None) -> T:
        """The replica's answer, within the time limit; a replica that gives none is fenced. The limit of what needs
        weights is that of their shipment, and begins when all were sent."""
        limit, since = (self._limits.timeout, None) if of is None else (of.address.timeout, of.sent)
        try:
            return await within(call, limit, since)
        except TimeoutError:
            error = ReplicaLost(f"rollout engine {member.replica.name} did not {what} within its time limit")
            self._fence(member, error)
            raise error from None
        except ReplicaLost as error:
            self._fence(member, error)
            raise

    async def _each(
        self, members: Iterable[Member], call: Callable[[Member], Awaitable[T]], what: str, of: Shipment | None = None
    ) -> dict[Member, T]:
        """The answers of those that are there and answer; the others are fenced. Other errors are raised."""
        there = [m for m in members if m.state != "gone"]
        answers = await asyncio.gather(*(self._ask(m, call(m), what, of) for m in there), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaLost):
                raise answer
        return {m: a for m, a in zip(there, answers, strict=True) if not isinstance(a, BaseException)}

    async def _change(self) -> None:
        """Until a request or a replica came or went."""
        self._changed.clear()
        await self._changed.wait()

    def _usable(self) -> None:
        if self._closed:
            raise RolloutError("the rollout engine is closed")

    def _none_left(self) -> RolloutError:
        died = f"rollout.restarts={self._limits.restarts} are used up. The last one: {self._last_error}"
        error = RolloutError(f"no rollout engine is left: {died if self._last_error else 'all were removed'}")
        error.__cause__ = self._last_error
        return error

    def _own(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _One:
    """One replica of a pool."""

    def __init__(self, pool: Pool, member: Member) -> None:
        self._pool, self._member = pool, member

    async def generate(self, request: TokenRequest) -> Completion:
        return await self._pool._generate(request, self._member)


def _now() -> float:
    return asyncio.get_running_loop().time()
