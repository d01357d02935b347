"""vLLM as the rollout engine: a pool of its asynchronous engines, each in a process of its own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.errors import ConfigError
from treadle.rollout.pool import Pool
from treadle.rollout.replicas import Limits
from treadle.rollout.vllm.launch import EXTENSION, Launch, check_installed, on_cpu
from treadle.rollout.vllm.replica import VllmReplica
from treadle.weights.place import new_place

if TYPE_CHECKING:
    from treadle.rollout.requests import Decoder
    from treadle.rollout.vllm.config import Config
    from treadle.weights.config import WeightsConfig


class VllmEngine(Pool):
    """`handles.RolloutHandle`; takes weights as shipments."""

    in_process = False
    weights: WeightsConfig
    place: str
    attempts: int
    _logs: Path

    @staticmethod
    def check(config: Config) -> None:
        """Raises `ConfigError` where this cannot run at all: before anything is loaded."""
        check_installed()
        if config.weights.transport == "cuda_ipc" and on_cpu():
            raise ConfigError("rollout.weights.transport=cuda_ipc needs a GPU; use shared_memory")

    @classmethod
    async def start(
        cls,
        model: str,
        config: Config,
        *,
        dtype: str,
        context: int,
        vocabulary: int,
        decoder: Decoder | None,
        directory: Path,
        extension: str = EXTENSION,
        overlaps: bool = True,
    ) -> VllmEngine:
        """Running engines over the model of a directory, which serve once they have had a publish.

        `context`: tokens of the longest prompt and answer together; `directory`: of the run; `overlaps`: models may
        compute while they do. Raises what is wrong with the model or the machine as one `ModelError` or `RolloutError`,
        everything that was started ended.
        """
        logs = _logs()
        launch = Launch(model, dtype, context, config, logs / "vllm.log", extension, overlaps=overlaps)
        limits = Limits(
            replicas=config.replicas,
            vocabulary=vocabulary,
            context=context,
            timeout=config.timeout,
            start_timeout=config.start_timeout,
            restarts=config.restarts,
        )
        pool = cls(lambda name: VllmReplica(name, launch), limits, decoder)
        pool._logs = logs
        pool.weights, pool.place = config.weights, new_place(config.weights, directory)
        pool.attempts = config.restarts + 1
        try:
            await pool.open()
        except BaseException:
            await Pool.close(pool)  # the log stays, for the error names it
            raise
        return pool

    @staticmethod
    def replica(
        name: str, model: str, config: Config, *, dtype: str, context: int, threads: int | None, sleeps: bool
    ) -> VllmReplica:
        """One engine, for a pool that is kept in another process. Its log stays. `threads`: where its own say none;
        `sleeps`: others use its device, too."""
        config = config.model_copy(update={"threads": config.threads or threads})
        return VllmReplica(name, Launch(model, dtype, context, config, _logs() / "vllm.log", EXTENSION, sleeps))

    @staticmethod
    def size(config: Config) -> tuple[int, int]:
        """Of one replica: requests that it serves together, and processes that take weights."""
        return config.max_sequences, config.tensor_parallel * config.data_parallel

    async def close(self) -> None:
        await super().close()
        if self.stats()["fenced"] == 0:  # else errors and warnings have named the log
            shutil.rmtree(self._logs, ignore_errors=True)


def _logs() -> Path:
    return Path(tempfile.mkdtemp(prefix="treadle-vllm-"))


Engine = VllmEngine  # what `rollout: {name: vllm}` stands for
