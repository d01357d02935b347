"""What people, disks and pipes do to a run: every damage is named, and nothing recorded is lost to it."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.run_writer import CONFIG, STEPS, record
from treadle.errors import LedgerError, RunError
from treadle.inspector.terminal import show
from treadle.runs.checkpoints import Checkpoints
from treadle.runs.config import RunConfig
from treadle.runs.directory import RunDirectory
from treadle.runs.ledger import Ledger
from treadle.runs.metrics import read_rows
from treadle.runs.progress import Progress
from treadle.runs.recorder import Recorder
from treadle.types import Kind

OTHER = CONFIG.replace("group_size: 3", "group_size: 8")


def restored_step(path: Path, text: str = CONFIG, keep: int = 1) -> int | None:
    """Open a run to go on with it; the step that it goes on from."""
    config = RunConfig(dir=str(path), keep_checkpoints=keep)
    with RunDirectory.open(path, text) as directory, Recorder(directory, config, STEPS, Progress()) as recorder:
        found = recorder.restore()
        return None if found is None else found[1]["step"]


def inspect(path: Path) -> None:
    show(path, console=Console(file=StringIO()))


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("text", [CONFIG, OTHER], ids=["same", "other"])
@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("loss", ["gone", "altered"])
def test_a_run_whose_checkpoints_are_lost_is_never_begun_anew(
    tmp_path: Path, text: str, finished: bool, loss: str
) -> None:
    record(tmp_path)
    run = RunDirectory(tmp_path)
    if not finished:
        run.summary.unlink()
    if loss == "gone":
        shutil.rmtree(run.checkpoints)
    else:
        (run.checkpoints / "step_000007" / "weights").write_text("weights of step 8")
    records = [p for p in (run.config, run.metrics, run.evaluations, run.summary, *run.samples.iterdir()) if p.exists()]
    before = {path: path.read_bytes() for path in records}
    message = "group_size: 3 → 8" if (text, loss) == (OTHER, "altered") else "its checkpoints are gone or damaged. Put"
    with pytest.raises(RunError, match=message):
        restored_step(tmp_path, text)
    assert {path: path.read_bytes() for path in records} == before


def test_the_older_checkpoint_stands_in_for_a_damaged_one_which_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        with Checkpoints(tmp_path, keep=2).write(step) as path:
            (path / "weights").write_text("right")
    (tmp_path / "step_000002" / "weights").write_text("wrong")
    checkpoints = Checkpoints(tmp_path, keep=1)  # a damaged one does not count among those that are kept
    assert checkpoints.latest() == (1, tmp_path / "step_000001")
    assert "step_000002 is ignored: weights does not hold the bytes that were written" in caplog.text
    with checkpoints.write(2) as path:
        (path / "weights").write_text("right")
    assert checkpoints.latest() == (2, tmp_path / "step_000002")
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]


# ---------------------------------------------------------------------- other files


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", b"{", "cannot be read: .*Remove it"),
        ("summary.json", b"{}", "not a summary: .*Remove it"),
        ("summary.json", b"[]", "not a summary"),
        ("summary.json", b'{"steps": true, "data_ended": false}', "not a summary"),
        ("metrics.jsonl", b"[1]\n", ":1: not a row of a run: .*Put back"),
        ("metrics.jsonl", b'{"step": "1"}\n', ":1: not a row of a run"),
        ("evaluations.jsonl", b'{"step": 1}\n{"x": 1}\n', ":2: not a row of a run"),
        ("metrics.jsonl", None, "cannot be read"),
        ("run.lock", None, "a folder, and no lock of a run. Remove it"),
    ],
)
def test_a_damaged_file_is_named_with_its_mend(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    RunDirectory.open(tmp_path, CONFIG).close()
    path = tmp_path / name
    path.unlink(missing_ok=True)
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(RunError, match=f"{name}.*{message}"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.lock", None, "a folder, and no lock of a run. Remove it"),
        ("config.yaml", b"# Resolved configuration of a treadle run.\nsteps: \xff\n", "cannot be read: .*Put back"),
        ("checkpoints/step_000001/state.json", b"{}", "marks, state are expected. Remove this checkpoint"),
    ],
)
def test_a_damaged_file_of_a_run_that_goes_on_is_named_with_its_mend(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run, Checkpoints(run.checkpoints).write(1) as path:
        (path / "state.json").write_bytes(b"{}")
    path = tmp_path / name
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(RunError, match=f"{name}.*{message}"):
        restored_step(tmp_path)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("DELETE FROM samples WHERE sample = '0.1'", LedgerError, "4 events were written and 3 are there"),
        ("UPDATE samples SET kind = 'weird' WHERE sample = '0.1'", RunError, "'weird' is not a valid Kind"),
    ],
)
def test_a_damaged_ledger_is_named(tmp_path: Path, damage: str, error: type[RunError], message: str) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.issue(0, "p", dict.fromkeys(("0.0", "0.1", "0.2", "0.3"), Kind.TRAIN), 1)
    ledger.close()
    db = sqlite3.connect(path)
    db.execute(damage)
    db.commit()
    db.close()
    with pytest.raises(error, match=f"ledger.sqlite: .*{message}"):
        Ledger(path)


def test_samples_that_are_gone_are_named_and_strange_ones_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(tmp_path)
    samples = tmp_path / "samples"
    (samples / "step_000002.parquet").unlink()
    (samples / "evaluation_000003.parquet").unlink()
    (samples / "step_000007.parquet").unlink()
    strange = [samples / "folder", samples / "step_000090.parquet", samples / "step_abc.parquet", samples / "notes"]
    for path in strange:
        path.mkdir() if path.name in ("folder", "step_000090.parquet") else path.write_text("mine")
    inspect(tmp_path)
    assert restored_step(tmp_path) == STEPS
    gone = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [Path(line.split(" is gone; ")[0]).name for line in gone] == [
        "step_000002.parquet",
        "step_000007.parquet",
        "evaluation_000003.parquet",
    ]
    assert all(path.exists() for path in strange)


@pytest.mark.parametrize("look", [RunDirectory.existing, lambda path: RunDirectory.open(path, CONFIG)])
@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 200] * 21)])
def test_a_name_that_the_file_system_cannot_hold(tmp_path: Path, name: str, look: Callable[[Path], object]) -> None:
    with pytest.raises(RunError, match=r"cannot be read: .*File name too long.* Name another directory"):
        look(tmp_path / name)


# ---------------------------------------------------------------------- the display

PROGRAM = """
import sys
from pathlib import Path
from tests.run_writer import record
record(Path(sys.argv[1]))
print("a word after the end")
"""


@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1", "TERM": "xterm"}], ids=["lines", "live"])
@pytest.mark.parametrize("where", ["/dev/full", "closed pipe"])
def test_a_display_that_fails_is_switched_off_and_the_run_goes_on(
    tmp_path: Path, where: str, colour: dict[str, str]
) -> None:
    if where == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(where, os.O_WRONLY)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=os.environ | colour, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    run = RunDirectory(tmp_path / "run")
    assert run.finished
    assert len(read_rows(run.metrics)) == STEPS
    assert run.log.read_text().count("is off from now on") == 1
