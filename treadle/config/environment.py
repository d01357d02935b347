"""The one place that reads environment variables."""

from __future__ import annotations

import os


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a process that it starts."""
    return {**os.environ, **changes}
