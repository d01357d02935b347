"""What a step costs beside the models grows no worse than linearly: four times as much takes no nine times as long.

CPU seconds, so that other work on the machine does not count; a quadratic cost would take sixteen times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.records import COSTS, Cost, measured

UNITS = [cost for cost in COSTS if cost.axis == "trajectories"]
RUNS = [cost for cost in COSTS if cost.axis != "trajectories"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cost", UNITS, ids=lambda cost: cost.name)
def test_a_step_grows_linearly(cost: Cost, tmp_path: Path) -> None:
    small, large = measured(cost, (1024, 4096), tmp_path).values()
    assert large < 9 * small


@pytest.mark.parametrize("cost", RUNS, ids=lambda cost: cost.name)
def test_a_long_run_grows_linearly(cost: Cost, tmp_path: Path) -> None:
    small, large = measured(cost, (1600, 6400), tmp_path).values()
    assert large < 9 * small
