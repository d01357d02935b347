"""`log.txt`: what the program and its libraries log while a run is open. Attempts to go on append to it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.runs.files import failed_write, writing


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Log to this file inside the block: our own messages from INFO, those of libraries from WARNING."""
    root, ours = logging.getLogger(), logging.getLogger("treadle")
    before = ours.level
    with writing(path):
        handler = _Handler(path, encoding="utf-8", errors="backslashreplace")
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(before)
        root.removeHandler(handler)
        with writing(path):
            handler.close()


class _Handler(logging.FileHandler):
    """A file handler whose full disk ends the run, as that of any other file of the run does."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            raise failed_write(Path(self.baseFilename), error) from error
        super().handleError(record)
