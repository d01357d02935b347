"""One vLLM engine: requests streamed in and out of a process of its own, weights loaded into it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.errors import ReplicaLost, RolloutError, WeightSyncError
from treadle.rollout.replicas import Loaded, Piece
from treadle.rollout.vllm.launch import STARTING
from treadle.types import SamplingParams, TokenRequest

if TYPE_CHECKING:
    from treadle.rollout.vllm.launch import Launch
    from treadle.weights.digest import Manifest
    from treadle.weights.stream import Address

T = TypeVar("T")
_LOOK = 0.25  # seconds between two looks whether an engine that owes an answer is alive
_POLL = 0.002  # seconds between two questions whether weights have arrived


class VllmReplica:
    """A `Replica` of the pool. Everything that its engine's death can raise becomes `ReplicaLost`."""

    def __init__(self, name: str, launch: Launch) -> None:
        self.name = name
        self.capacity = launch.config.max_sequences
        processes = launch.config.tensor_parallel * launch.config.data_parallel
        self.receivers = tuple(f"{name}-{rank}" for rank in range(processes))
        self._launch = launch
        self._engine: Any = None
        self._processes: list[int] = []
        self._closed = False
        self._before: set[int] | None = None  # engines of this process when it began to start
        self._numbers = itertools.count()
        self._statistics = _Statistics()
        self._salt = "0"  # requests of different versions never share cached keys and values

    async def start(self) -> None:
        await asyncio.to_thread(self._make)
        await self._call("treadle_open", self.name)
        await self._try()

    async def _try(self) -> None:
        """Run the model once: what its kernels refuse shows only then."""
        request = TokenRequest("start", (0,), SamplingParams(max_tokens=2), noise=0)
        try:
            async for _ in self.stream(request, 0):
                pass
        except (ReplicaLost, RolloutError) as error:
            raise self._launch.failed(error) from error

    def _make(self) -> None:
        with STARTING:
            self._before = set(_engines())
            # Kept nowhere but here: a thread's frames may outlive it, and with them what it returned.
            if self._closed:  # while it waited for its turn
                return
            self._engine = self._launch.start(self._statistics.made)
            self._processes = self._started()
            self._before = None
        if self._closed:  # while it started
            self._end()

    def _started(self) -> list[int]:
        """Processes that were started for it; while it starts, no other engine does."""
        return self._processes if self._before is None else [pid for pid in _engines() if pid not in self._before]

    async def stream(self, request: TokenRequest, seed: int) -> AsyncIterator[Piece]:
        """Tokens as they are sampled. Leaving the iteration ends the request."""
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as Drawn

        wanted = request.params
        params = Drawn(
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            max_tokens=wanted.max_tokens,
            stop_token_ids=list(wanted.stop_token_ids),
            ignore_eos=True,  # what ends an answer is said by the request alone
            seed=seed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = tokens_input(list(request.token_ids), cache_salt=self._salt)
        answers = self._alive.generate(prompt, params, f"{request.id}/{next(self._numbers)}", priority=request.priority)
        try:
            async for answer in answers:
                (output,) = answer.outputs
                tokens = list(output.token_ids)
                logprobs = [found[token].logprob for token, found in zip(tokens, output.logprobs or (), strict=True)]
                versions = None
                if output.weight_versions is not None:
                    versions = [_number(s.version) for s in output.weight_versions for _ in range(s.start, s.end)]
                yield Piece(tokens, logprobs, output.finish_reason, versions)
        except Exception as error:
            raise self._meaning(error, request.id) from error
        finally:
            await answers.aclose()

    # ------------------------------------------------------------------ weights

    async def expect(self, address: Address) -> None:
        """Begin to receive a publish."""
        await self._call("treadle_expect", asdict(address))

    async def received(self) -> list[Manifest]:
        """Wait until all weights have arrived; what each process got."""
        while True:
            found = await self._results("treadle_received")
            if all(result["manifest"] is not None for result in found):
                return [result["manifest"] for result in found]
            await asyncio.sleep(_POLL)

    async def load(self, version: int) -> Loaded:
        """Load what was expected, read it back, and forget what was cached. The engine must be paused."""
        found = await self._results("treadle_load", version)
        await self._safely(self._alive.reset_prefix_cache())  # what is in use stays: the salt keeps it from others
        await self._safely(self._alive.update_weight_version(str(version)))
        self._salt = str(version)
        slowest = {name: max(result[name] for result in found) for name in ("load", "readback", "digest")}
        return Loaded([result["manifest"] for result in found], **slowest)

    # ------------------------------------------------------------------ state

    async def pause(self, keep_cache: bool) -> None:
        """Stop between two steps; what is in flight stays, and its keys and values if `keep_cache`."""
        await self._safely(self._alive.pause_generation(mode="keep", clear_cache=not keep_cache))

    async def resume(self) -> None:
        await self._safely(self._alive.resume_generation())

    async def sleep(self) -> None:
        """Give the devices' memory back: weights go to the host, the cache is dropped; requests stay."""
        await self._safely(self._alive.sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        await self._safely(self._alive.wake_up())

    def stats(self) -> Mapping[str, float]:
        return self._statistics.figures()

    async def close(self) -> None:
        """End the engine's processes, whatever state they are in."""
        await asyncio.to_thread(self._end)
        await asyncio.sleep(0)  # its tasks, cancelled by that, end; they and it refer to each other
        gc.collect()  # else it would go with the interpreter, and complain

    def _end(self) -> None:
        self._closed = True
        # A stopped process answers no request to end, and a thread that waits for one would wait for ever.
        for pid in self._started():
            _signal(pid, signal.SIGKILL)
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown(timeout=0)
        multiprocessing.active_children()  # which buries the dead

    # ------------------------------------------------------------------ help

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """What each of the engine's processes answers."""
        if self._launch.config.data_parallel == 1:
            return await self._safely(self._alive.collective_rpc(method, args=args))
        # vLLM would give the answers of the first of its parts alone (0.32).
        core = self._alive.engine_core
        asked = (
            core._call_utility_async("collective_rpc", method, None, args, None, engine=e) for e in core.core_engines
        )
        return [answer for part in await self._safely(asyncio.gather(*asked)) for answer in part]

    async def _results(self, method: str, *args: Any) -> list[dict[str, Any]]:
        found = await self._call(method, *args)
        for result in found:
            if "error" in result:
                raise WeightSyncError(f"rollout engine {self.name}: {result['error']}")
        return found

    async def _safely(self, call: Awaitable[T]) -> T:
        """What a command gives. vLLM leaves those that wait for an engine that died waiting (0.32)."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=_LOOK))[0]:
                if self._engine is None or self._engine.errored:
                    raise ReplicaLost(self._died)
            return task.result()
        except ReplicaLost:
            raise
        except Exception as error:
            raise self._meaning(error) from error
        finally:
            task.cancel()

    @property
    def _alive(self) -> Any:
        """vLLM's engine; another task may have given it up meanwhile."""
        if self._engine is None:
            raise ReplicaLost(self._died)
        return self._engine

    @property
    def _died(self) -> str:
        return f"rollout engine {self.name} died; its log: {self._launch.log}"

    def _meaning(self, error: Exception, sample: str = "") -> Exception:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError) or self._engine is None or self._engine.errored:
            return ReplicaLost(self._died)
        return RolloutError(f"rollout engine {self.name} refused {sample or 'a command'}: {error}")


class _Statistics:
    """What vLLM's scheduler reports, kept for `stats`."""

    def __init__(self) -> None:
        self._queue = self._running = self._tokens = self._preempted = self._asked = self._hit = 0
        self._since = time.monotonic()
        self._counted = 0

    def made(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """A logger in vLLM's sense that reports to this."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        keep = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...
            def log_engine_initialized(self) -> None: ...
            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                keep.record(scheduler_stats, iteration_stats)

        return Logger(vllm_config, engine_index)

    def record(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self._queue, self._running = scheduler.num_waiting_reqs, scheduler.num_running_reqs
            self._asked += scheduler.prefix_cache_stats.queries
            self._hit += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self._tokens += iteration.num_generation_tokens
            self._preempted += iteration.num_preempted_reqs

    def figures(self) -> dict[str, float]:
        """tokens_per_second: since the last call."""
        now = time.monotonic()
        rate = (self._tokens - self._counted) / max(now - self._since, 1e-9)
        self._since, self._counted = now, self._tokens
        return {
            "queue": self._queue,
            "running": self._running,
            "tokens_per_second": rate,
            "prefix_hits": self._hit / self._asked if self._asked else 0.0,
            "preemptions": self._preempted,
        }


def _number(version: str) -> int:
    """vLLM calls its weights "default" until they have a version."""
    return int(version) if version.isdigit() else -1


def _engines() -> list[int]:
    """Processes of this one's engines, and theirs: what `multiprocessing` spawned, but for its own helper."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if "spawn_main" in command or command.startswith("VLLM::"):
                found.append(child.pid)
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
