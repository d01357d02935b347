"""MLflow: a tracking server, or a database such as `sqlite:///mlflow.db`.

A run that is continued goes on in the same MLflow run. That is append-only: what was told of a step before a crash
stays, and the step done again is not told again. A run that begins anew, for want of a checkpoint, is a new MLflow run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from treadle.config import key
from treadle.config.yaml_text import to_line
from treadle.runs.trackers.base import Outcome, Run, Tracker, TrackerConfig

T = TypeVar("T")


class MlflowConfig(TrackerConfig):
    name: str = key("module of treadle.runs.trackers, or my.module:Class", default="mlflow")
    uri: str | None = key("server or database; null: MLflow's default", default=None, min_length=1)
    experiment: str = key("MLflow experiment", default="treadle", min_length=1)


class Mlflow(Tracker):
    Config = MlflowConfig
    config: MlflowConfig
    requires = ("mlflow",)

    def open(self, run: Run, known: str | None) -> str | None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self.config.uri)
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._id = known
            return known
        experiment = self._client.get_experiment_by_name(self.config.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self.config.experiment)
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        params = [Param(key, to_line(value)[:_LONGEST]) for key, value in _leaves(run.config)]
        for part in _parts(params, _MOST_PARAMS):
            self._client.log_batch(self._id, params=part)
        return self._id

    def where(self) -> str:
        return f"run {self._id} of experiment {self.config.experiment!r}" + (
            f" at {self.config.uri}" if self.config.uri else ""
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        found = [Metric(_allowed(name), value, now, step) for name, value in metrics.items()]
        for part in _parts(found, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def close(self, outcome: Outcome) -> None:
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome]
        self._client.set_terminated(self._id, status)


_LONGEST, _MOST_PARAMS, _MOST_METRICS = 6000, 100, 1000
"""What MLflow takes: characters of a parameter's value; parameters and metrics of one request."""


def _allowed(name: str) -> str:
    """A name as MLflow takes it, for a reward's part may be called anything."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))[:250]


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and what they hold."""
    if isinstance(config, Mapping) and config:
        for name, value in config.items():
            yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield _allowed(prefix), config


def _parts(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    return (items[at : at + most] for at in range(0, len(items), most))
