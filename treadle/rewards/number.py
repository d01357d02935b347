"""1 if the last number in the response equals the answer, else 0."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from treadle.types import Trajectory

_NUMBER = re.compile(r"(?:(?<![\w)])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def reward(trajectory: Trajectory) -> float:
    """The answer is a number, or text that is one ("5", "-1,234.50"); numbers are compared as numbers."""
    answer = str(trajectory.prompt.answer).strip().replace(",", "").replace("−", "-")
    try:
        wanted = Decimal(answer)
    except InvalidOperation:
        wanted = Decimal("nan")
    if not wanted.is_finite():
        raise ValueError(f"the answer {trajectory.prompt.answer!r} is not a number")
    found = _NUMBER.findall(trajectory.response)
    return float(bool(found) and Decimal(found[-1].replace(",", "").replace("−", "-")) == wanted)
