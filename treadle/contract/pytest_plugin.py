"""A pytest fixture for algorithms of one's own, there as soon as treadle is installed:

def test_my_algorithm_keeps_the_laws(check_algorithm):
    check_algorithm(MyAlgorithm())
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def check_algorithm() -> Callable[..., None]:
    """Called with an algorithm (and `without=["direction"]`), fails with every law that it breaks and the least example
    of each."""
    from treadle.contract.check import check

    return check
