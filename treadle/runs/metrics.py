"""JSON lines: `metrics.jsonl` (one line a step) and `evaluations.jsonl` (one line an evaluation).

Equal runs write equal bytes, apart from the keys that begin with `time/`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from treadle.errors import RunError
from treadle.runs.files import reading, writing
from treadle.types import Statistic

TIME = "time/"
"""Keys with this prefix depend on the clock and nothing else does."""

Value = float | int | str | None | Statistic


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """What two equal runs have in common."""
    return {k: v for k, v in row.items() if not k.startswith(TIME)}


def plain(metrics: Mapping[str, Value]) -> dict[str, float | int | str | None]:
    """Numbers that JSON has: means are divided out, what is not finite becomes None."""
    row: dict[str, float | int | str | None] = {}
    for name, value in metrics.items():
        number = value.value if isinstance(value, Statistic) else value
        row[name] = None if isinstance(number, float) and not math.isfinite(number) else number
    return row


class JsonLines:
    """An append-only file of rows. A row is on its way to the disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def append(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Write `{"step": step, …}`, keys in alphabetical order. A failed write leaves no half line."""
        row = {"step": step, **dict(sorted(plain(metrics).items()))}
        data = json.dumps(row, allow_nan=False).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        with writing(self.path):
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with suppress(OSError):  # the first failure is the one to tell
                    self._file.truncate(end)
                raise

    def mark(self) -> int:
        """Force all rows to the disk; a place that `roll_back` returns to."""
        with writing(self.path):
            os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def roll_back(self, mark: int) -> None:
        """Drop what was appended after `mark`, a half-written line included. `roll_back(0)` empties the file."""
        data = self.path.read_bytes()
        if len(data) < mark or (mark and data[mark - 1 : mark] != b"\n"):
            raise RunError(
                f"{self.path}: not the file that was there at the last checkpoint ({mark} bytes of whole lines are "
                "expected). Put it back, or start anew in another run.dir."
            )
        with writing(self.path):
            self._file.truncate(mark)

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows; a line that is being written, or was when the process was killed, is left out."""
    if not path.exists():
        return []
    mend = "Put back the file as the run wrote it."
    with reading(path, mend):
        *lines, _ = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RunError(f"{path}:{number}: not a line of JSON: {error}. {mend}") from error
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise RunError(f'{path}:{number}: not a row of a run: an object with an integer "step" is expected. {mend}')
        rows.append(row)
    return rows
