"""From a configuration to a run: `train` and `evaluate`."""

from treadle.runtime.calls import evaluate, train

__all__ = ["evaluate", "train"]
