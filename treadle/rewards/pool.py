"""Worker processes for synchronous reward functions.

They are started afresh (never forked, which copies locks and GPU state; never by `multiprocessing`, which runs an
unguarded script again), one call at a time each. A call that hangs costs its worker, which is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from treadle.config.environment import child_environment
from treadle.errors import ConfigError, RewardError
from treadle.rewards.values import NotAReward
from treadle.rewards.worker import pack

if TYPE_CHECKING:
    from treadle.handles import RewardFunction
    from treadle.types import Reward, Trajectory

_HOME = str(Path(__file__).parents[2])  # where the package itself is found
_START_S = 120.0  # for a worker to import what the functions need
_CLOSE_S = 1.0


class CallFailed(Exception):
    """A call raised, ran out of time or lost its worker; it may be tried again."""


class Pool:
    """Up to `size` workers, started when there is work for them, so that the first calls start them side by side."""

    def __init__(self, functions: Mapping[str, RewardFunction], size: int, timeout_s: float) -> None:
        try:
            loadable = cloudpickle.dumps(dict(functions))  # what `__main__` defines goes by value
        except Exception as error:  # whatever the pickling of a user's object raises
            raise ConfigError(
                f"the reward {', '.join(functions)} cannot be sent to a worker process: {error}; "
                "make it `async def` to run it in this process, or open what cannot be sent inside the function"
            ) from error
        here = os.getcwd()
        self._setup = pickle.dumps(([p or here for p in sys.path], loadable))
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []

    async def call(self, name: str, trajectory: Trajectory) -> Reward:
        """Raises CallFailed, or NotAReward for what the function returned."""
        try:
            request = cloudpickle.dumps((name, trajectory))
        except Exception as error:  # whatever the pickling of a user's object raises
            raise RewardError(
                f"prompt {trajectory.prompt.id!r} cannot be sent to a reward worker: {error}; "
                "its answer and metadata must be plain data"
            ) from error
        async with self._slots:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._setup)
            try:
                async with asyncio.timeout(self._timeout_s):
                    kind, content = await worker.ask(request)
            except TimeoutError:
                await worker.kill()
                raise CallFailed(f"it ran past reward.timeout_s={self._timeout_s:g}") from None
            except BaseException:  # it died, or this call was cancelled in the middle
                await worker.kill()
                raise
            self._idle.append(worker)
        if kind == "raised":
            raise CallFailed(f"it raised\n{content}")
        if kind == "wrong":
            raise NotAReward(content)
        return content

    async def close(self) -> None:
        """End the workers. Calls in flight must have ended, or been cancelled (which ends their worker)."""
        workers, self._idle = self._idle, []
        await asyncio.gather(*(worker.close() for worker in workers))


def _signal_name(number: int) -> str:
    """Most real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._asked = 0

    @staticmethod
    async def start(setup: bytes) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-X", "faulthandler", "-m", "treadle.rewards.worker"),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is the controller's to handle
            env=child_environment(PYTHONPATH=_HOME, PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1"),
        )
        worker = _Worker(process)
        try:
            async with asyncio.timeout(_START_S):
                kind, content = await worker.ask(setup)
        except TimeoutError:
            await worker.kill()
            raise RewardError(f"a reward worker took more than {_START_S:g} s to import the reward functions") from None
        except BaseException:
            await worker.kill()
            raise
        if kind == "raised":
            await worker.kill()
            raise RewardError(f"a reward worker cannot load the reward functions:\n{content}")
        return worker

    async def ask(self, request: bytes) -> tuple[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(pack(request))
            await process.stdin.drain()
            length = int.from_bytes(await process.stdout.readexactly(8), "little")
            answer = await process.stdout.readexactly(length)
        except (ConnectionError, asyncio.IncompleteReadError):
            code = await process.wait()
            how = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
            raise CallFailed(f"its worker process died ({how})") from None
        try:
            number, kind, content = pickle.loads(answer)
        except Exception as error:  # of bytes that are no pickle, anything
            raise CallFailed("its answer cannot be read: does it write to files that it did not open?") from error
        if number != self._asked:
            raise CallFailed("its worker process gave the answer to another call: does the function fork?")
        self._asked += 1
        return kind, content

    async def kill(self) -> None:
        """End it and whatever it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended this moment
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # something that left its process group holds the pipe
            async with asyncio.timeout(_CLOSE_S):
                await self._ended()

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._ended()
        except TimeoutError:  # a function left threads that do not end
            await self.kill()

    async def _ended(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        assert self._process.stdout is not None
        await self._process.stdout.read()  # to its end, at which asyncio closes its side of the pipe
