"""The examples, run as a reader would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, books, metrics


@pytest.fixture
def checkout(tiny_model: Path, tmp_path: Path) -> Path:
    """A directory that looks like a fresh clone in which `make models/tiny` was run."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    return tmp_path


def run(checkout: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_smoke_learns_from_near_nothing_to_nearly_all(checkout: Path) -> None:
    run(checkout, "-m", "treadle", "train", "examples/smoke.yaml", "threads=1")
    rows = metrics(checkout / "runs" / "smoke")
    assert rows[0]["reward/mean"] < 0.05
    assert rows[-1]["reward/mean"] > 0.8
    assert books(checkout / "runs" / "smoke") == {"trained": 30 * 64}


@pytest.mark.slow
def test_an_algorithm_of_ones_own_is_under_40_lines_and_learns(checkout: Path) -> None:
    example = ROOT / "examples" / "custom_algorithm.py"
    assert example.read_text().count("\n") < 40
    run(checkout, "examples/custom_algorithm.py")
    rows = metrics(checkout / "runs" / "b")
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.2


@pytest.mark.slow
def test_the_python_of_the_readme_runs_as_it_stands(checkout: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        (checkout / "snippet.py").write_text(block)
        run(checkout, "snippet.py")
    assert metrics(checkout / "runs" / "brevity")[-1]["policy/grad_norm"] > 0


def test_the_files_that_the_readme_links_to_are_there() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):  # those of the site: tests/test_docs.py
        assert (ROOT / link).exists(), link


def test_held_out_sums_are_in_no_order_part_of_the_training_data() -> None:
    def pairs(name: str) -> set[frozenset[str]]:
        rows = (ROOT / "examples" / "addition" / name).read_text().splitlines()
        return {frozenset(json.loads(row)["id"].split("+")) for row in rows}

    train, held_out = pairs("train.jsonl"), pairs("held_out.jsonl")
    assert len(train) + len(held_out) == 45
    assert not train & held_out
