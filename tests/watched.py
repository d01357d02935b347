"""Rollout engines that keep a diary of what uses their rank's devices, training included, and fail when told to."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from treadle.config import key
from treadle.engines.torch.engine import TorchEngine
from treadle.rollout.embedded.config import Config as EmbeddedConfig
from treadle.rollout.embedded.engine import EmbeddedEngine
from treadle.rollout.embedded.runner import Runner
from treadle.rollout.replicas import Piece
from treadle.rollout.vllm.config import Config as VllmConfig
from treadle.rollout.vllm.engine import VllmEngine
from treadle.rollout.vllm.launch import Launch
from treadle.rollout.vllm.replica import VllmReplica
from treadle.types import TokenRequest

COMPUTES = ("quantities", "values", "step", "export", "save", "load")


class Diary:
    """Of one process: a line for each beginning and each end, in the order in which they were."""

    def __init__(self, directory: str, fault: str) -> None:
        self.path = Path(directory) / f"{os.getpid()}.diary"
        self.what, _, how = fault.partition(" ")
        self.how, _, self.at = how.partition(" ")
        self.seen: Counter[str] = Counter()

    def note(self, what: str, who: object) -> None:
        with self.path.open("a") as file:
            file.write(f"{what} {id(who)}\n")
        self.seen[what] += 1
        if what == self.what and self.seen[what] == int(self.at or 1):
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            if self.how == "raises":
                raise OSError("the disk is on fire")

    def watch(self, kind: type, name: str, said: str = "") -> None:
        """Note when a method of this class begins and ends, in this process."""
        method = getattr(kind, name)

        @wraps(method)
        def noted(itself: Any, *args: Any, **kwargs: Any) -> Any:
            self.note(said or name, itself)
            result = method(itself, *args, **kwargs)
            if isinstance(result, Iterator):
                return whole(itself, result)
            self.note(f"{said or name}.", itself)
            return result

        def whole(itself: Any, parts: Iterator[Any]) -> Iterator[Any]:
            yield from parts
            self.note(f"{said or name}.", itself)

        setattr(kind, name, noted)

    def watch_training(self) -> None:
        for name in COMPUTES:
            self.watch(TorchEngine, name, "compute")
        for name in ("offload", "onload"):
            self.watch(TorchEngine, name)


class Embedded(EmbeddedEngine):
    """Ours, watched. It is made when all roles of its rank are there."""

    class Config(EmbeddedConfig):
        name: str = key("this one", default="tests.watched:Embedded")  # type: ignore[assignment]
        diary: str = key("directory", default="")
        fault: str = key("`what how number`, as in `sleep dies 3`", default="")

    def __init__(self, model: Any, tokenizer: Any, config: Any, device: Any, **options: Any) -> None:
        super().__init__(model, tokenizer, config, device, **options)
        self._diary = Diary(config.diary, config.fault)
        self._diary.watch_training()
        for name in ("admit", "decode", "load"):
            self._diary.watch(Runner, name, "generate")
        self._diary.watch(Runner, "offload", "host")

    async def sleep(self) -> None:
        self._diary.note("sleep", self)
        await super().sleep()
        self._diary.note("sleep.", self)

    async def wake(self) -> None:
        self._diary.note("wake", self)
        if self._diary.how == "hangs" and self._diary.seen["wake"] == int(self._diary.at):
            await asyncio.sleep(600)
        await super().wake()


class _Replica(VllmReplica):
    diary: Diary

    async def sleep(self) -> None:
        self.diary.note("sleep", self)
        await super().sleep()
        self.diary.note("sleep.", self)

    async def wake(self) -> None:
        self.diary.note("wake", self)
        await super().wake()

    async def stream(self, request: TokenRequest, seed: int) -> AsyncIterator[Piece]:
        async for piece in super().stream(request, seed):
            self.diary.note("generate", self)
            yield piece

    async def load(self, version: int) -> Any:
        self.diary.note("generate", self)
        return await super().load(version)


class Vllm(VllmEngine):
    """vLLM, watched."""

    class Config(VllmConfig):
        name: str = key("this one", default="tests.watched:Vllm")  # type: ignore[assignment]
        diary: str = key("directory", default="")

    @staticmethod
    def replica(
        name: str, model: str, config: Any, *, dtype: str, context: int, threads: int | None, sleeps: bool
    ) -> VllmReplica:
        diary = Diary(config.diary, "")
        log = Path(config.diary) / f"{name}.log"
        replica = _Replica(name, Launch(model, dtype, context, config, log, sleeps=sleeps))
        replica.diary = diary
        diary.watch_training()
        return replica


def judge(directory: Path) -> list[Counter[str]]:
    """Of each process, how often each thing began. Fails where training and generation were there together."""
    found: list[Counter[str]] = []
    for path in sorted(directory.glob("*.diary")):
        awake, there, counts = True, set[str](), Counter[str]()
        for line in path.read_text().splitlines():
            what, who = line.split()
            counts[what] += 1
            if what.rstrip(".") == "compute":
                assert not awake
                assert there == {who}
            elif what == "onload":
                assert not awake
                assert not there
                there.add(who)
            elif what == "offload.":
                there.discard(who)
            elif what in ("wake", "generate"):
                assert not there
                awake = True
            elif what == "sleep.":
                awake = False
        found.append(counts)
    return found
