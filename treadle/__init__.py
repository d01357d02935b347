"""treadle: reinforcement-learning post-training of language models.

`treadle.train(config, algorithm=…, reward=…)` is the whole command line's `train` from Python. Names are imported when
they are first used, so that `import treadle` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.algorithms.base import Algorithm, AlgorithmConfig
    from treadle.batch import Batch
    from treadle.errors import TreadleError
    from treadle.handles import Loss, Outputs, Term
    from treadle.metrics import Metric
    from treadle.runtime import evaluate, train
    from treadle.types import Completion, Group, Prompt, Request, Reward, Sample, SamplingParams, Trajectory

_HOME = {
    "Algorithm": "algorithms.base",
    "AlgorithmConfig": "algorithms.base",
    "Batch": "batch",
    "TreadleError": "errors",
    "Loss": "handles",
    "Outputs": "handles",
    "Term": "handles",
    "Metric": "metrics",
    "evaluate": "runtime",
    "train": "runtime",
    "Completion": "types",
    "Group": "types",
    "Prompt": "types",
    "Request": "types",
    "Reward": "types",
    "Sample": "types",
    "SamplingParams": "types",
    "Trajectory": "types",
}

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "Batch",
    "Completion",
    "Group",
    "Loss",
    "Metric",
    "Outputs",
    "Prompt",
    "Request",
    "Reward",
    "Sample",
    "SamplingParams",
    "Term",
    "Trajectory",
    "TreadleError",
    "evaluate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'treadle' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"treadle.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
