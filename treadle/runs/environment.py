"""What code and machine a run was made by: `environment.jsonl`, a line at its start and one whenever that changed.

`{"step": 0, "time": "2026-11-29T18:25:00Z", "treadle": "0.1.0", "commit": "8ddeb66a3c10", "changed": false, …}`
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from treadle.config.environment import child_environment
from treadle.runs.checkpoints import Checkpoints
from treadle.runs.directory import RunDirectory
from treadle.runs.files import write_aside
from treadle.runs.metrics import read_rows

log = logging.getLogger(__name__)

PACKAGES = ("treadle", "torch", "transformers", "tokenizers", "numpy")
WHEN = ("step", "time")
"""Keys that say when a line was written; all others say by what."""


def record(run: RunDirectory) -> None:
    """Note what is running now, if it is not what was. Call before the run is rolled back to its latest checkpoint."""
    now = describe()
    step = Checkpoints.step(run.checkpoints)
    rows = read_rows(run.environment) if step is not None else []
    if rows and (other := changes(rows[-1], now)):
        log.warning("goes on in another environment: %s", "; ".join(f"{k} {a} → {b}" for k, (a, b) in other.items()))
    if rows and not other:
        return
    row = {"step": step or 0, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **now}
    write_aside(run.environment, b"".join(json.dumps(r).encode() + b"\n" for r in (*rows, row)))


def changes(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between two lines, apart from when they were written."""
    names = [name for name in {**one, **other} if name not in WHEN]
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def describe() -> dict[str, Any]:
    """Versions, commits and the machine. A commit is null where there is no git or no checkout; `changed`: tracked
    files differ from it. `project` is the checkout of the current directory, where that is not treadle's own."""
    package, here = Path(__file__).parent.parent, Path.cwd()
    own, project = _top(package, "__init__.py"), _top(here)
    return {
        **{name: _version(name) for name in PACKAGES},
        **_commit("commit", "changed", own),
        **(_commit("project", "project_changed", project) if project not in (None, own) else {}),
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": socket.gethostname(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(name: str, changed: str, top: str | None) -> dict[str, Any]:
    if top is None:
        return {name: None}
    said = _git(Path(top), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12") or ""
    return {name: said.removesuffix("-dirty") or None, changed: said.endswith("-dirty")}


def _top(folder: Path, tracked: str | None = None) -> str | None:
    """The checkout that a folder is in; None where there is none, or where it does not hold the file `tracked`."""
    if tracked is not None and _git(folder, "ls-files", tracked) in (None, ""):
        return None
    return _git(folder, "rev-parse", "--show-toplevel")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=child_environment(GIT_OPTIONAL_LOCKS="0"),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or a checkout too slow to wait for
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
