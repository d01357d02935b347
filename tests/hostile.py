"""What fuzz tests share: how much to try, a limit on one example, and what counts as a good refusal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from treadle.errors import TreadleError

T = TypeVar("T")

EXTENT = pytest.mark.parametrize("extent", [1, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
"""How many times the usual number of examples."""


def tries(examples: int) -> settings:
    checks = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


class TooSlow(BaseException):
    """Passes through every `except Exception` on its way to the test."""


@contextmanager
def within(cpu_s: float) -> Iterator[None]:
    """Raises TooSlow after so many seconds of this process's own work: a busy machine does not fail a test."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {cpu_s:g} s of work")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(
    attempt: Callable[[], T],
    refusal: type[TreadleError] | tuple[type[TreadleError], ...],
    *names: str,
    cpu_s: float = 5,
) -> T | str:
    """What the attempt gives, or the message of its refusal, which must be text and hold one of `names`.

    Whatever else is raised is raised.
    """
    try:
        with within(cpu_s):
            return attempt()
    except refusal as error:
        message = str(error)
    message.encode()  # it can be printed
    assert message.strip(), "a refusal without a word"
    assert len(message) < 20_000, f"a message of {len(message)} characters: {message[:200]}"
    assert "pydantic" not in message, message
    assert not names or any(name in message for name in names), message
    return message
