"""What a tracker is: a place beside the run directory that is told a run's metrics.

A tracker is one file here, or a class of your own: `run.trackers: [my.module:Class]`. `tracking.py` calls its methods
from a thread that it alone has, so they may take their time and may fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from treadle.config import Config, key
from treadle.errors import ConfigError

FOLDER = "treadle.runs.trackers"
Outcome = Literal["finished", "interrupted", "failed"]


class TrackerConfig(Config):
    """The key that every tracker has."""

    name: str = key("module of treadle.runs.trackers, or my.module:Class")


@dataclass(frozen=True, slots=True)
class Run:
    """What a tracker is told of a run before its metrics."""

    path: Path  # the run directory
    config: Mapping[str, Any]  # resolved

    @property
    def name(self) -> str:
        return self.path.resolve().name


class Tracker:
    """Base of all trackers. `__init__` keeps the configuration and imports nothing."""

    Config: ClassVar[type[TrackerConfig]] = TrackerConfig
    requires: ClassVar[tuple[str, ...]] = ()
    """Packages that have to be there; `pip install 'treadle[<name>]'` installs those of ours."""
    retells: ClassVar[bool] = False
    """True: each process tells the record from its first row, over what was told before. False: what was told stays,
    and a step that is done again after a crash is not told again."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def check(self) -> None:
        """Raises ConfigError where this tracker cannot work here; called before anything is loaded."""
        for package in self.requires:
            if find_spec(package) is None:
                name = self.config.name
                raise ConfigError(
                    f"run.trackers names {name}, but the package {package} is not installed; "
                    f"pip install 'treadle[{name}]', or leave {name} out"
                )

    def open(self, run: Run, known: str | None) -> str | None:
        """Begin, or go on with what an earlier process began. Returns what the next process gets as `known`."""
        raise NotImplementedError

    def where(self) -> str:
        """Once open: where people look, in a few words."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, or those of the evaluation after it. A call that raises is made again later."""
        raise NotImplementedError

    def close(self, outcome: Outcome) -> None:
        """Nothing comes after. Also called where the process will be started again."""
        raise NotImplementedError
