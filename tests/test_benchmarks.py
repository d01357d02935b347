"""The pure parts of what docs/benchmarks.md quotes, and one real step told to wait its turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest

from benchmarks import growth, turns, vs_trl
from benchmarks.turns import Job, Player, command


def test_an_exponent_is_that_of_the_largest_points() -> None:
    cubic = {x: 2.0 * x**3 for x in (1.0, 2.0, 4.0, 8.0)}
    assert growth.exponent(cubic) == pytest.approx(3.0)
    assert growth.exponent({0.5: 99.0, **cubic}) == pytest.approx(3.0)
    assert growth.exponent({1.0: 5.0, 2.0: 5.0, 4.0: 5.0}) == pytest.approx(0.0)


def test_a_shape_is_three_numbers() -> None:
    assert vs_trl.shape("6x8x32") == (6, 8, 32)
    with pytest.raises(click.BadParameter, match="6x8"):
        vs_trl.shape("6x8")


def test_the_ratio_is_of_times_within_a_round() -> None:
    facts = {"generation": 1.0, "training": 1.0, "tokens": 8.0, "with_signal": 1.0, "peak_bytes": 2e9}
    times = [(2.0, 6.0), (4.0, 20.0), (1.0, 4.0)]
    rounds = [{"treadle": {**facts, "seconds": a}, "TRL": {**facts, "seconds": b}} for a, b in times]
    assert vs_trl.ratios(rounds) == [3.0, 5.0, 4.0]
    table = vs_trl.table(Job(2, 4, 8), rounds)
    assert "treadle ÷ TRL: 4.00 (3.00 to 5.00 by round)" in table
    assert "| treadle | 4.00 | 2.0 | 1.0 s | 1.0 s | 8.0 | 32 | 100% | 2.00 GB |" in table


def test_rewards_tell_apart_what_they_should() -> None:
    assert [turns.last_number(text, "7") for text in ("3 + 4 = 7", "7 or 8", "none")] == [1.0, 0.0, 0.0]
    found = {turns.spread(text, "") for text in ("a", "b", "\ud800")}
    assert len(found) == 3
    assert all(0 <= value < 1 for value in found)


@pytest.mark.slow
def test_a_step_of_ours_waits_for_its_turn(tiny_model: Path, tmp_path: Path) -> None:
    options = {"data.chat": "false", "threads": 1, "run.dir": str(tmp_path / "run")}
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": ""}) + "\n" for i in range(4)))
    job = Job(2, 3, 4, str(tiny_model), str(data), options=options)
    player = Player("treadle", command(Path(sys.executable), "benchmarks.treadle_steps", job), tmp_path / "log")
    first, second = player.warmed_up(), player.step()
    player.end()
    assert first.keys() | {"seconds"} == second.keys()
    assert second["seconds"] >= second["generation"] + second["training"]
    assert 0 < second["tokens"] <= 4
    assert second["with_signal"] == 1.0
    assert second["peak_bytes"] > second["training_bytes"] > 0
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2


def test_a_program_that_fails_is_named(tmp_path: Path) -> None:
    player = Player("the peer", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
    with pytest.raises(SystemExit, match="the peer ended with exit code 3; see"):
        player.warmed_up()
    player.end()
