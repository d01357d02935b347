"""`treadle diff A B`, and the record of code and machine that it compares."""

from __future__ import annotations

import json
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import treadle
from tests.run_writer import CONFIG, record
from tests.runs import finish, settings
from treadle.errors import RunError
from treadle.inspector.diff import show
from treadle.runs import environment
from treadle.runs.directory import RunDirectory
from treadle.runs.metrics import JsonLines, read_rows


def screen(one: Path, other: Path, last: int = 10, width: int = 120) -> str:
    file = StringIO()
    show(one, other, last, Console(file=file, width=width, force_terminal=False))
    return file.getvalue()


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def begin(path: Path, config: str = CONFIG, **metrics: list[Any]) -> Path:
    """A run with these metrics, by step from 1."""
    RunDirectory.open(path, config).close()
    rows = JsonLines(path / "metrics.jsonl")
    for step, values in enumerate(zip(*metrics.values(), strict=True), 1):
        rows.append(step, dict(zip((name.replace("__", "/") for name in metrics), values, strict=True)))
    rows.close()
    return path


def test_metrics_side_by_side(tmp_path: Path) -> None:
    one = begin(tmp_path / "one", reward__mean=[0.0, 1.0, 2.0, 9.0], time__step=[1.0] * 4, old=[1, 1, 1, 1])
    other = begin(tmp_path / "other", reward__mean=[5.0, 2.0, 4.0], time__step=[2.0, 2.0, None], new=[None] * 3)
    text = screen(one, other, last=2)
    assert "last step (A 4, B 3), and mean over steps 2 to 3, which both have done" in text
    table = words(text)
    assert ["mean", "9", "4", "1.5", "3", "+1.5", "+100%"] in table  # (2 + 4) / 2 against (1 + 2) / 2
    assert ["step", "1", "–", "1", "2", "+1", "+100%"] in table  # what is no number is left out
    assert ["old", "1", "–", "1", "–", "–"] in table
    assert ["new", "–", "–", "–", "–", "–"] in table
    assert text.index("reward") < text.index("time")
    assert max(map(len, screen(one, other, width=80).splitlines()[2:])) <= 80


def test_runs_that_have_little_or_nothing_in_common(tmp_path: Path) -> None:
    begun, done = begin(tmp_path / "begun"), tmp_path / "done"
    record(done)
    assert "metrics: of one run only" in screen(begun, done)
    assert "metrics: none to compare" in screen(begun, begun)
    text = screen(done, begun)
    assert "finished, 7 steps recorded" in text
    assert "stopped before its end" in text
    assert "last evaluation: A after step 6" in text
    assert ["greedy", "reward", "0.6", "–", "–"] in words(text)
    assert "code and machine: not recorded" in text
    same = screen(done, done)
    assert "configuration: 0 of 2 keys differ" in same
    with pytest.raises(RunError, match="is not a run"):
        screen(done, tmp_path)
    with pytest.raises(RunError, match="does not exist"):
        screen(tmp_path / "nowhere", done)
    (begun / "environment.jsonl").write_text("[]\n")
    with pytest.raises(RunError, match=r"environment.jsonl:1: not a row of a run"):
        screen(done, begun)


def test_configurations_by_key_whatever_is_in_them(tmp_path: Path) -> None:
    hostile = '"[red]\\e[31m x"'
    one = begin(tmp_path / "one", f"seed: 1\nsampling: {{stop: [a]}}\nmodel: {hostile}\nrun: {{dir: one}}\n")
    other = begin(tmp_path / "other", "seed: 1\nsampling: {stop: [b], max_tokens: 3}\nrun: {dir: two}\nmodel: null\n")
    text = screen(one, other)
    assert "configuration: 3 of 4 keys differ" in text
    assert ["sampling.max_tokens", "(absent)", "3"] in words(text)
    assert ["sampling.stop", "[a]", "[b]"] in words(text)
    assert ["model", '"[red]\\e[31m', 'x"', "null"] in words(text)
    assert "run.dir" not in text
    assert "\x1b" not in text
    long = begin(tmp_path / "long", f"{'section_of_a_long_name.' * 5}key: 1\n".replace(".", ": {", 0))
    assert "section_of_a_long_name" in screen(long, one, width=40)


def test_code_and_machine_are_told_where_they_differ(tmp_path: Path) -> None:
    one, other = begin(tmp_path / "one"), begin(tmp_path / "other")
    row = {"step": 0, "time": "then", "treadle": "0.1.0", "commit": "abc", "changed": False, "cpus": 2}
    (one / "environment.jsonl").write_text(json.dumps(row) + "\n")
    (other / "environment.jsonl").write_text(json.dumps({**row, "time": "now"}) + "\n")
    assert "code and machine: the same" in screen(one, other)
    later = {**row, "step": 4, "changed": True, "cpus": 8}
    (other / "environment.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(later) + "\n")
    text = screen(one, other)
    assert "code and machine: these differ" in text
    assert ["commit", "abc", "abc", "and", "changes"] in words(text)
    assert ["cpus", "2", "8"] in words(text)
    assert "B went on after step 4 in another environment: commit abc → abc and changes; cpus 2 → 8" in text


# ---------------------------------------------------------------------- the record


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_checkout_that_one_works_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "project" not in environment.describe()
    git(tmp_path, "init")
    (tmp_path / "reward.py").write_text("one")
    git(tmp_path, "add", "reward.py")
    assert environment.describe()["project"] is None  # nothing is committed yet
    git(tmp_path, "commit", "-m", "first")
    clean = environment.describe()
    assert len(clean["project"]) == 12
    assert clean["project_changed"] is False
    (tmp_path / "reward.py").write_text("two")
    assert environment.describe()["project_changed"] is True
    (tmp_path / "unknown.txt").write_text("")  # not tracked: not part of it
    git(tmp_path, "commit", "-am", "second")
    now = environment.describe()
    assert now["project_changed"] is False
    assert set(environment.changes(clean, now)) == {"project"}
    assert now["torch"].startswith("2.")
    assert now["treadle"] == "0.1.0"


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = environment.describe()
    assert found["commit"] is None
    assert "project" not in found


def test_a_run_notes_what_made_it_and_when_that_changed(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path, tiny_model, steps=1)
    treadle.train(config)
    path = tmp_path / "run" / "environment.jsonl"
    first = path.read_bytes()
    (row,) = read_rows(path)
    assert (row["step"], row["treadle"], row["gpus"]) == (0, "0.1.0", row["gpus"])
    treadle.train({**config, "steps": 2})
    assert path.read_bytes() == first  # the same code: nothing to add
    assert "another environment" not in caplog.text
    monkeypatch.setattr(environment, "describe", lambda: {"treadle": "0.2.0"})
    treadle.train({**config, "steps": 3})
    assert "goes on in another environment: treadle 0.1.0 → 0.2.0" in caplog.text
    assert [(r["step"], r["treadle"]) for r in read_rows(path)] == [(0, "0.1.0"), (2, "0.2.0")]


def test_on_the_command_line(tmp_path: Path) -> None:
    one = begin(tmp_path / "one", reward__mean=[0.5])
    code, out, err = finish("diff", one, one)
    assert (code, err) == (0, "")
    assert "configuration: 0 of 2 keys differ" in out
    code, out, err = finish("diff", one, tmp_path)
    assert (code, out) == (1, "")
    assert "is not a run" in err
