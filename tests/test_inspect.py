"""`treadle inspect RUN` in the terminal."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.run_writer import CONFIG, batch_of, issue, prompt, record, statistics, trajectory
from treadle.errors import RunError
from treadle.inspector.terminal import conclude, show
from treadle.runs.config import RunConfig
from treadle.runs.directory import RunDirectory
from treadle.runs.metrics import JsonLines
from treadle.runs.progress import Progress
from treadle.runs.recorder import Recorder
from treadle.types import Group, Kind, Sample


def screen(path: Path, step: int | None = None, limit: int = 8) -> str:
    file = StringIO()
    show(path, step, limit, Console(file=file, width=120, force_terminal=False))
    return file.getvalue()


def test_a_finished_run(tmp_path: Path) -> None:
    record(tmp_path)
    text = screen(tmp_path, limit=2)
    assert "finished, 7 steps recorded" in text
    assert "0.6667" in text  # reward of step 4
    assert "greedy" in text
    assert "trained 38" in text
    assert "step 7: 2 of" in text
    assert "question" in text
    assert "answer" in text
    assert "filtered (rewards are equal)" in screen(tmp_path, step=4, limit=100)
    with pytest.raises(RunError, match=r"no samples of step 70. Recorded steps: 1 to \d"):
        screen(tmp_path, step=70)


def test_a_run_that_is_running_shows_what_a_model_wrote_and_obeys_none_of_it(tmp_path: Path) -> None:
    hostile = "[/red][link=x] \x1b]0;owned\x07"
    bad = Group(0, prompt(0), tuple(Sample(f"0.{n}", Kind.TRAIN, (trajectory(0, n, hostile),)) for n in range(3)))
    with RunDirectory.open(tmp_path, CONFIG) as directory:
        assert "0 steps recorded" in screen(tmp_path)
        config = RunConfig(dir=str(tmp_path))
        with Recorder(directory, config, 7, Progress(Console(file=StringIO()))) as recorder:
            recorder.restore()
            issue(recorder, 0, 1)
            recorder.trained(1, [bad], batch_of([bad]), statistics([bad]), {})
            text = screen(tmp_path)
    assert "running (pid" in text
    assert "[/red][link=x] �]0;owned�" in text
    assert "\x1b" not in text
    assert "stopped before its end" in screen(tmp_path)


def test_what_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        screen(tmp_path)
    with pytest.raises(RunError, match="does not exist"):
        screen(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="limit=-1"):
        screen(tmp_path, limit=-1)


def test_the_end_of_a_training_is_told_in_words_and_whole_paths(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40)
    RunDirectory.open(path, CONFIG).close()
    rows = JsonLines(path / "evaluations.jsonl")
    ways = ("evaluation/greedy", "evaluation/sampled")
    names = [way + what for way in ways for what in ("", "/format", "_failed", "_tokens")]
    rows.append(0, {**dict.fromkeys(names, 0.25), "evaluation/greedy": None, "evaluation/greedy_failed": 0.0})
    rows.append(9, {**dict.fromkeys(names, 1 / 3), "evaluation/greedy_failed": 0.0})
    rows.close()
    file = StringIO()
    conclude(path, Console(file=file, width=60))
    table, where = file.getvalue().split("curves  ")
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "held-out before after change",
        "sampled reward 0.250 0.333 +0.083",
        "sampled reward: format 0.250 0.333 +0.083",
        "greedy reward – 0.333 –",
        "greedy reward: format 0.250 0.333 +0.083",
        "sampled tokens 0.250 0.333 +0.083",
        "greedy tokens 0.250 0.333 +0.083",
        "sampled failed 0.250 0.333 +0.083",
    ]
    assert where.splitlines() == [
        f"{path}/curves.png",
        f"model   {path}/model",
        f"Next: treadle inspect {path} shows metrics, books and samples.",
    ]
    text = screen(path)
    assert "sampled failed" in text
    assert "greedy failed" not in text
