"""Configuration keys of the run itself. They may change when a run is continued."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, field_validator

from treadle.config import Config, key, name_schema, plugin
from treadle.runs.trackers.base import FOLDER, TrackerConfig
from treadle.runs.trackers.console import Config as ConsoleConfig

Tracker = Annotated[TrackerConfig, plugin(FOLDER)]


def _short_schema(schema: dict[str, Any]) -> None:
    """A JSON Schema of the section, to which the short form of a tracker is added."""
    trackers = schema["properties"]["trackers"]
    trackers["items"] = {"anyOf": [*name_schema(FOLDER)["anyOf"], trackers["items"]]}


class RunConfig(Config):
    """Where a run is recorded, and how often it can be taken up again."""

    model_config = ConfigDict(json_schema_extra=_short_schema)

    dir: str = key("directory that records the run; the same command with the same directory continues it")
    checkpoint_every: int = key("steps between checkpoints; 0: only one, at the end", default=10, ge=0, le=1 << 30)
    keep_checkpoints: int = key("newest checkpoints that are kept", default=1, ge=1, le=1 << 20)
    trackers: tuple[Tracker, ...] = key(
        "who is told the metrics beside the run directory: names (tensorboard), or sections with a name", default=()
    )

    @field_validator("trackers", mode="before")
    @classmethod
    def _short_form(cls, trackers: Any) -> Any:
        """`[tensorboard]` is short for `[{name: tensorboard}]`."""
        if isinstance(trackers, list | tuple):
            return tuple({"name": t} if isinstance(t, str) else t for t in trackers)
        return trackers

    @property
    def console(self) -> ConsoleConfig:
        """What the terminal shows."""
        return next((t for t in self.trackers if isinstance(t, ConsoleConfig)), ConsoleConfig())

    @property
    def told(self) -> list[TrackerConfig]:
        """The trackers beside the terminal."""
        return [t for t in self.trackers if not isinstance(t, ConsoleConfig)]

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
        names = [t.name for t in trackers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} stands there {names.count(name)} times; name a tracker once")
        return trackers
