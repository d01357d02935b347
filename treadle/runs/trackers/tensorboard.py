"""TensorBoard: event files in the run directory's `tensorboard/`, for `tensorboard --logdir`.

They are written from the record anew by each process, so that steps which a crash undid are not in them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from treadle.config import key
from treadle.config.yaml_text import to_text
from treadle.runs.trackers.base import Outcome, Run, Tracker, TrackerConfig


class TensorBoardConfig(TrackerConfig):
    name: str = key("module of treadle.runs.trackers, or my.module:Class", default="tensorboard")


class TensorBoard(Tracker):
    Config = TensorBoardConfig
    requires = ("tensorboard",)
    retells = True

    def open(self, run: Run, known: str | None) -> str | None:
        event = _messages("event")
        self._folder = run.path / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        old = list(self._folder.glob("*tfevents*"))
        self._begin()
        # A viewer that has read the old files forgets what it knows when it comes upon this.
        self._write(event.Event(step=0, session_log=event.SessionLog(status=event.SessionLog.START)))
        self._write(event.Event(step=0, summary=_text("config", to_text(run.config))))
        for path in old:
            path.write_bytes(b"")  # it may have that file open, and would wait for more for ever were it gone
        return None

    def where(self) -> str:
        return f"tensorboard --logdir {self._folder}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record for the whole row: it is there or it is not."""
        summary = _messages("summary")
        values = [summary.Summary.Value(tag=name, simple_value=x) for name, x in metrics.items()]
        self._write(_messages("event").Event(step=step, summary=summary.Summary(value=values)))

    def close(self, outcome: Outcome) -> None:
        self._file.close()

    # ------------------------------------------------------------------ inside

    def _begin(self) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Viewers read the files of a directory in the order of their names, each when the one before has ended.
        path = self._folder / f"events.out.tfevents.{time.time():017.6f}"
        self._file = path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(_messages("event").Event(file_version="brain.Event:2"))

    def _write(self, event: Any) -> None:
        """Append a record. After a failure (a full disk) the file may end in half of one; the next starts another."""
        if self._file.closed:
            self._begin()
        event.wall_time = time.time()
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError:
            self._file.close()
            raise


def _text(tag: str, text: str) -> Any:
    """A summary that TensorBoard's text page shows as it is."""
    from tensorboard.plugins.text.metadata import create_summary_metadata

    summary, tensor, types = _messages("summary"), _messages("tensor"), _messages("types")
    block = "".join(f"    {line}\n" for line in text.splitlines())
    content = tensor.TensorProto(dtype=types.DT_STRING, string_val=[block.encode()])
    metadata = create_summary_metadata(display_name="", description="")
    return summary.Summary(value=[summary.Summary.Value(tag=tag, metadata=metadata, tensor=content)])


def _messages(name: str) -> Any:
    """A module of protobuf messages. Its classes come into being when it is imported: no type checker can see them."""
    return import_module(f"tensorboard.compat.proto.{name}_pb2")
