"""Where weights lie on their way to other processes: a directory of one trainer, in shared memory or on a disk."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path
from uuid import uuid4

from treadle.weights.config import WeightsConfig

SHARED_MEMORY = Path("/dev/shm")


def new_place(weights: WeightsConfig, run: Path) -> str:
    """A directory that is not there yet, named after this process. What processes left that were killed goes now, for
    in shared memory it would hold as many bytes as the weights until the machine starts again."""
    home = SHARED_MEMORY if weights.transport != "files" else Path(weights.directory or run / "weights").absolute()
    for left in home.glob(f"{_prefix()}*"):
        owner = re.fullmatch(rf"{re.escape(_prefix())}(\d+)-\w+", left.name)
        if owner is not None and not _alive(int(owner[1])):
            shutil.rmtree(left, ignore_errors=True)
    return str(home / f"{_prefix()}{os.getpid()}-{uuid4().hex[:8]}")


def _prefix() -> str:
    """The machine's name belongs to it: on a shared disk the processes of others cannot be seen."""
    return f"treadle-{re.sub(r'[^A-Za-z0-9]', '', platform.node())}-"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's
    return True
