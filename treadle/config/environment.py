"""The one place that reads and changes environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a process that it starts."""
    return {**os.environ, **changes}


@contextmanager
def changed(changes: Mapping[str, str]) -> Iterator[None]:
    """This process's own environment with changes, for a library that starts processes and takes it from there."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
