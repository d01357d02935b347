"""Weights & Biases, online or offline. Its files are in the run directory's `wandb/`.

A run that is continued goes on in the same W&B run. That is append-only: what was told of a step before a crash stays,
and the step done again is not told again. A run that begins anew, for want of a checkpoint, is a new W&B run.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Literal

from treadle.config import key
from treadle.errors import ConfigError
from treadle.runs.trackers.base import Outcome, Run, Tracker, TrackerConfig

_TIMEOUT = 20.0  # seconds


class WandbConfig(TrackerConfig):
    name: str = key("module of treadle.runs.trackers, or my.module:Class", default="wandb")
    project: str = key("W&B project", default="treadle", min_length=1)
    entity: str | None = key("user or team; null: W&B's default", default=None)
    mode: Literal["online", "offline"] = key("offline: only files, for `wandb sync` later", default="online")


class Wandb(Tracker):
    Config = WandbConfig
    config: WandbConfig
    requires = ("wandb",)

    def check(self) -> None:
        super().check()
        import wandb

        try:
            # Otherwise it would ask at the terminal, in the middle of training. No request is made: it may be down.
            ready = self.config.mode == "offline" or wandb.login(prompt=False, verify=False)
        except wandb.Error as error:
            raise ConfigError(f"run.trackers names wandb, which refuses its credentials: {error}") from error
        if not ready:
            raise ConfigError(
                "run.trackers names wandb, which is not logged in here; run `wandb login`, or choose mode: offline"
            )

    def open(self, run: Run, known: str | None) -> str | None:
        import wandb

        name = known or secrets.token_hex(4)
        self._run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            mode=self.config.mode,
            dir=run.path,
            id=name,
            name=run.name,
            resume="allow",
            config=dict(run.config),
            allow_val_change=True,  # `steps` and `run.*` may change when a run is continued
            # The terminal is the live view's. A service that is down is tried again, and must not hold up the end.
            settings=wandb.Settings(console="off", silent=True, init_timeout=_TIMEOUT, finish_timeout=_TIMEOUT),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return name

    def where(self) -> str:
        offline = self.config.mode == "offline"
        return f"wandb sync {self._run.settings.sync_dir}" if offline else str(self._run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code={"finished": 0, "interrupted": 255, "failed": 1}[outcome])
