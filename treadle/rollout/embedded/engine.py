"""A rollout engine in this process: continuous batching over a Hugging Face causal LM, token ids in and out.

Each prompt or decode pass is one call on the device, so that other roles get their turn between two of them. One task
drives the passes; it is started when there is something to do and ends when there is nothing.

Requests are admitted by (priority, arrival). An engine waits for the event loop to be quiet before it admits, so
requests that are made together start together: the same requests give the same bits, run after run. (In plain PyTorch
the last bits of a log-prob do depend on which rows share a pass; with the native kernels they do not.)
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle.errors import RolloutError, WeightSyncError
from treadle.rollout.embedded.choice import choose
from treadle.rollout.embedded.config import Config
from treadle.rollout.embedded.generation import Generation, Heard
from treadle.rollout.embedded.runner import Runner, Sampled
from treadle.rollout.requests import Decoder, check

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.handles import Device, OnPublish, Shipment, Weights
    from treadle.types import Completion, TokenRequest

CAPACITY = 1 << 20
"""Requests wait in the engine itself: which of them share a pass, and so their last bits, is as in one process."""
_QUIET_ROUNDS = 8  # rounds of the event loop without a new request; a chain of awaits takes one round a link
_PASS_TOKENS = 2048  # prompt tokens in one pass: bounds its memory, and how long others wait for the device
_LOAD_PRIORITY = 0


class EmbeddedEngine:
    """`handles.RolloutHandle` over `model`, in which `treadle.attention` is installed.

    owns_weights=True: the model is the engine's own; `load` copies new weights into it.
    owns_weights=False: it is the very module that the trainer trains; `load(None, version)` copies nothing. That is
    right only where nothing is in flight while the weights change (the runtime shares at `max_staleness = 0` alone), or
    tokens sampled under new weights would carry the version before.
    """

    in_process = True

    @staticmethod
    def check(config: Config) -> None:
        """It can run anywhere."""

    @staticmethod
    def size(config: Config) -> tuple[int, int]:
        """Of one in a process of its own: requests that it takes, and processes that take weights."""
        return CAPACITY, 1

    def __init__(
        self,
        model: Any,
        tokenizer: Decoder | None,
        config: Config,
        device: Device,
        *,
        owns_weights: bool,
        places: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """`places`: where new weights go, by name, if they are not sent by the model's own names; asked at each load,
        as sleeping may have moved them."""
        self._runner = Runner(model, choose(config.kernels, model))
        self._decoder = tokenizer  # for stop strings only
        self._max_rows = config.max_sequences
        self._device = device
        self._owns_weights, self._places = owns_weights, places
        self._version = 0
        self._waiting: list[Generation] = []  # in order of rank
        self._rows: list[Generation] = []  # they have a place in the cache
        self._arrived = 0
        self._tokens = 0
        self._paused = self._asleep = self._draining = self._closed = False
        self._half_loaded = False
        self._turn = asyncio.Lock()  # held over a pass, and by whoever changes what passes rely on
        self._publishing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ RolloutHandle

    async def generate(self, request: TokenRequest, heard: Heard | None = None) -> Completion:
        """Sample until a stop token, a stop string or `max_tokens`. Cancelling this frees its row.

        `heard` is told of each token as it is sampled. Stop strings are looked for in what this request samples, the
        completing token included. Raises `RolloutError` for a request that cannot be served, and whatever a pass raised
        while it was waiting.
        """
        self._usable()
        check(request, self._runner.vocabulary, self._runner.context, self._decoder)
        generation = Generation(request, self._arrived, asyncio.get_running_loop().create_future(), heard)
        self._arrived += 1
        self._enqueue(generation)
        self._start()
        return await generation.done

    async def load(
        self, weights: Weights | Shipment | None, version: int, on_publish: OnPublish
    ) -> Mapping[str, float]:
        """Take new weights and stamp `version`; prompts computed before are forgotten. In flight, by `on_publish`:

        - "drain": they finish first, new ones wait;
        - "resume": they stop, keep their tokens, and go on from them under the new weights, all recomputed;
        - "continue": they go on with the keys and values that they have.

        Raises `WeightSyncError` for tensors that do not fit. The model may then hold some of them, so what is in flight
        fails with the same error, and nothing is generated until a whole load has succeeded.
        """
        if weights is not None and not isinstance(weights, Iterable):
            raise WeightSyncError(f"version {version}: an engine in this process takes tensors, not a shipment")
        if self._owns_weights and weights is None:
            raise WeightSyncError(f"version {version}: this engine has its own copy of the weights, and was sent none")
        if not self._owns_weights and weights is not None:
            raise WeightSyncError(f"version {version}: weights were sent, but the engine shares the trainer's")
        async with self._publishing:
            try:
                if on_publish == "drain":
                    await self._drain()
                async with self._turn:
                    if on_publish != "continue":
                        self._preempt()
                    self._runner.prefixes.clear()
                    if weights is None:
                        self._runner.refresh()
                    else:
                        await self._copy(weights)
                    self._version = version
            finally:
                self._draining = False
                self._start()
        return {}

    async def pause(self) -> None:
        """Stop between two tokens. Returns when no pass is running; rows, caches and requests are kept."""
        self._paused = True
        async with self._turn:
            pass

    async def resume(self) -> None:
        self._paused = False
        self._start()

    async def sleep(self) -> None:
        """Free the caches, and take weights of its own to the host's memory. What is in flight keeps its tokens and,
        like new requests, waits for `wake`."""
        async with self._turn:
            self._asleep = True
            self._preempt()
            self._runner.forget()
            if self._owns_weights:
                await self._device.run(self._runner.offload, _LOAD_PRIORITY)

    async def wake(self) -> None:
        async with self._turn:
            if self._asleep and self._owns_weights:
                await self._device.run(self._runner.onload, _LOAD_PRIORITY)
            self._asleep = False
        self._start()

    def stats(self) -> Mapping[str, float]:
        """queue, running: requests now · tokens: sampled so far · version: of the weights · cache_bytes: of keys and
        values now · native_kernels, own_decoder: 1 where the compiled kernels, and the engine's own forward pass, are
        used · prefix_hits: prompts shared instead of computed · and of decode steps and prompt passes so far: how many,
        their tokens (a prompt counts again after a preemption), seconds, and operations of linear layers."""
        work = self._runner.work
        return {
            "queue": sum(not g.done.done() for g in self._waiting),
            "running": sum(not g.done.done() for g in self._rows),
            "tokens": self._tokens,
            "version": self._version,
            "cache_bytes": self._runner.cache_bytes,
            "native_kernels": int(self._runner.kernels.name == "native"),
            "own_decoder": int(self._runner.decoder is not None),
            **asdict(work),
        }

    async def close(self) -> None:
        """End. Requests that are still in flight get a `RolloutError`."""
        self._closed = True
        async with self._turn:
            self._fail(RolloutError("the rollout engine was closed while this request was in flight"))
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    # ------------------------------------------------------------------ the task that drives the passes

    def _start(self) -> None:
        if not self._held() and (self._waiting or self._rows) and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="treadle-rollout")

    async def _serve(self) -> None:
        try:
            while await self._pass():
                pass
        except asyncio.CancelledError:
            for generation in (*self._rows, *self._waiting):
                generation.done.cancel()
            raise
        except Exception as error:  # carried, whatever it is, to everyone who waits
            self._fail(error)

    async def _pass(self) -> bool:
        """One pass over the model; False when there is nothing to do or the engine is held."""
        await self._settle()
        async with self._turn:
            if self._held():
                return False
            self._sweep()
            new = self._admissible()
            if not new and not self._rows:
                return False
            rows = new or self._rows
            work: Callable[[], Sampled] = (
                partial(self._runner.admit, new, self._rows) if new else partial(self._runner.decode, rows)
            )
            sampled = await self._device.run(work, min(g.rank for g in rows)[0])
            if new:
                admitted = set(new)
                self._waiting = [g for g in self._waiting if g not in admitted]
                self._rows += new
            for generation, (token, logprob) in zip(rows, sampled, strict=True):
                if not generation.done.done():
                    generation.add(token, logprob, self._version, self._decoder)
                    self._tokens += 1
            if any(not g.done.done() for g in (*self._rows, *self._waiting)):
                return True
            self._sweep()
            return False

    async def _settle(self) -> None:
        """Let the event loop turn until requests stop coming, so that what is asked together is admitted together."""
        quiet, seen = 0, self._arrived
        while quiet < _QUIET_ROUNDS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if seen == self._arrived else 0
            seen = self._arrived

    def _sweep(self) -> None:
        """Forget what is done."""
        self._rows = [g for g in self._rows if not g.done.done()]
        self._waiting = [g for g in self._waiting if not g.done.done()]
        if self._runner.prefixes:
            alive = {g.key for g in (*self._rows, *self._waiting)}
            self._runner.prefixes = {k: p for k, p in self._runner.prefixes.items() if k in alive}

    def _admissible(self) -> list[Generation]:
        """The next to get rows, as many as there is room for and as one pass should compute."""
        new: list[Generation] = []
        cost = 0
        for generation in self._waiting:
            if len(self._rows) + len(new) == self._max_rows:
                break
            if self._draining and not generation.token_C:
                continue
            cost += self._runner.cost(generation, new)
            if new and cost > _PASS_TOKENS:
                break
            new.append(generation)
        return new

    # ------------------------------------------------------------------ help

    def _held(self) -> bool:
        return self._paused or self._asleep or self._closed or self._half_loaded

    def _usable(self) -> None:
        if self._closed:
            raise RolloutError("the rollout engine is closed")
        if self._half_loaded:
            raise WeightSyncError("the last load failed and left weights of two versions mixed; load all of them again")

    def _enqueue(self, generation: Generation) -> None:
        bisect.insort(self._waiting, generation, key=lambda g: g.rank)

    def _preempt(self) -> None:
        """Take the rows of everyone, their tokens kept."""
        for generation in self._rows:
            if not generation.done.done():
                self._enqueue(generation)
        self._rows.clear()
        self._runner.leave()

    async def _drain(self) -> None:
        """Wait until all that have begun are done, while none begins."""
        async with self._turn:
            self._draining = True
            begun = [g.done for g in (*self._rows, *self._waiting) if g.token_C and not g.done.done()]
        if begun and not self._owns_weights:
            raise RolloutError(
                f"{len(begun)} requests are in flight on weights that the trainer has already changed, so they cannot "
                "finish on the old ones; use on_publish: resume or continue, or give the engine its own copy"
            )
        if begun and self._held():
            raise RolloutError(f"{len(begun)} requests are in flight in a held engine: resume or wake it to drain it")
        if begun:
            await asyncio.wait(begun)

    async def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        try:
            await self._device.run(partial(self._runner.load, weights, self._places), _LOAD_PRIORITY)
        except BaseException as error:
            self._half_loaded = True
            self._fail(error if isinstance(error, Exception) else WeightSyncError("a load was cancelled half way"))
            raise
        self._half_loaded = False

    def _fail(self, error: Exception) -> None:
        """Give the error to everyone who waits, and start afresh."""
        for generation in (*self._rows, *self._waiting):
            if not generation.done.done():
                generation.done.set_exception(error)
        self._rows.clear()
        self._waiting.clear()
        self._runner.forget()


Engine = EmbeddedEngine  # what `rollout: {name: embedded}` stands for
