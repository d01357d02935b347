"""A pytest fixture for algorithms of one's own, there as soon as treadle is installed:

def test_my_algorithm_keeps_the_laws(check_algorithm):
    check_algorithm(MyAlgorithm())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def check_algorithm() -> Callable[[Any], None]:
    """Called with an algorithm, fails with every law that it breaks and the least example of each."""
    from treadle.contract.check import check

    return check
