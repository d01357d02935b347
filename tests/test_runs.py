"""The run directory: kill-safe, balanced, locked, readable, and never silent about a full disk."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from rich.console import Console

from tests.run_writer import (
    CONFIG,
    STEPS,
    batch_of,
    content,
    group,
    issue,
    prompt,
    record,
    statistics,
    trajectory,
)
from treadle.errors import LedgerError, RunError
from treadle.runs import files
from treadle.runs.checkpoints import STATE, Checkpoints, load_state, save_state
from treadle.runs.config import RunConfig
from treadle.runs.curves import draw
from treadle.runs.directory import RunDirectory
from treadle.runs.files import write_aside
from treadle.runs.ledger import Ledger, State, read_totals
from treadle.runs.log import logging_to
from treadle.runs.metrics import JsonLines, read_rows, without_times
from treadle.runs.progress import Progress
from treadle.runs.recorder import Recorder
from treadle.runs.samples import Ending, append_samples, read_samples, write_samples
from treadle.runs.text import readable
from treadle.types import Group, Kind, Max, Mean, Reward, Sample

ROOT = Path(__file__).parent.parent
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.open(tmp_path / "run", CONFIG) as opened:
        yield opened


def recorder(directory: RunDirectory, every: int = 2) -> Recorder:
    config = RunConfig(dir=str(directory.path), checkpoint_every=every)
    return Recorder(directory, config, STEPS, Progress(Console(file=StringIO())))


def train(record: Recorder, step: int, *indices: int) -> None:
    """Issue these groups and train them at once."""
    for index in indices:
        issue(record, index, step)
    groups = [group(i) for i in indices]
    record.trained(step, groups, batch_of(groups), statistics(groups), {"generate": 1.0})


# ---------------------------------------------------------------------- killed


def under_kills(path: Path, seed: int, runs: int) -> int:
    """Record again and again, killed at random moments; how many kills there were."""
    command = [sys.executable, "-m", "tests.run_writer", str(path), str(seed), str(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kills = re.search(r"killed (\d+) times", done.stdout)
    assert kills is not None
    return int(kills[1])


@pytest.mark.slow
def test_killed_at_any_moment_and_started_again_records_what_an_unbroken_run_records(tmp_path: Path) -> None:
    assert under_kills(tmp_path, seed=1, runs=2) >= 2


@pytest.mark.slow
def test_killed_at_many_moments(tmp_path: Path) -> None:
    assert under_kills(tmp_path, seed=2, runs=10) >= 20


def test_two_unbroken_runs_record_the_same_bytes(tmp_path: Path) -> None:
    record(tmp_path / "a")
    record(tmp_path / "b")
    a, b = content(tmp_path / "a"), content(tmp_path / "b")
    assert a == b
    metrics = read_rows(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert metrics[0] != without_times(metrics[0])


def test_a_finished_run_says_so_and_goes_on_with_more_steps(tmp_path: Path) -> None:
    record(tmp_path)
    with RunDirectory.open(tmp_path, CONFIG.replace("steps: 7", "steps: 9")) as directory:
        assert directory.finished
        summary = directory.read_summary()
        assert summary is not None
        assert summary["steps"] == STEPS
        assert summary["samples"]["in flight"] == 0
        with recorder(directory) as opened:
            found = opened.restore()
            assert found is not None
            assert found[1]["step"] == STEPS
            assert not directory.finished
            for index in found[1]["flying"]:  # cancelled at the end, in flight again by the roll-back
                issue(opened, index, STEPS + 1)
        assert directory.config_text.endswith("steps: 9\n")


def test_leaving_by_an_error_cancels_what_is_in_flight_and_keeps_what_was_dropped(directory: RunDirectory) -> None:
    with pytest.raises(KeyboardInterrupt), recorder(directory) as opened:  # noqa: PT012
        opened.restore()
        train(opened, 1, 0, 1)
        issue(opened, 2, 2)
        issue(opened, 3, 2)
        opened.filtered(group(2), 2, "rewards are equal")
        raise KeyboardInterrupt
    totals = read_totals(directory.ledger)
    assert {k: n for k, n in totals.items() if n} == {"issued": 12, "trained": 6, "filtered": 3, "cancelled": 3}
    assert [row["state"] for row in read_samples(directory.samples / "step_000002.parquet")] == ["filtered"] * 3
    log = directory.log.read_text()
    assert "interrupted in step 2" in log
    with recorder(directory) as opened:
        assert opened.restore() is None  # no checkpoint: from the start
        assert not list(directory.samples.iterdir())
        assert not read_rows(directory.metrics)
        assert read_totals(directory.ledger)["issued"] == 0


def test_dropped_between_a_step_and_its_checkpoint_is_recorded_once(directory: RunDirectory) -> None:
    with recorder(directory) as opened:
        opened.restore()
        issue(opened, 5, 1)
        train(opened, 1, 0)
        opened.filtered(group(5, failed=(0, 1, 2)), 1, "every sample failed")
        with opened.checkpoint(1, {}) as path:
            (path / "weights").write_text("w")
    with recorder(directory) as opened:
        opened.restore()
        train(opened, 2, 1)
    rows = [row for file in sorted(directory.samples.iterdir()) for row in read_samples(file)]
    assert [row["sample"] for row in rows if row["group"] == 5] == ["5.0", "5.1", "5.2"]
    assert {row["why"] for row in rows if row["state"] == "failed"} == {"the judge is down"}
    assert read_totals(directory.ledger)["failed"] == 3


# ---------------------------------------------------------------------- directory


def test_a_second_process_is_told_who_holds_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    program = (
        "import sys, time; from pathlib import Path; from treadle.runs.directory import RunDirectory\n"
        f"held = RunDirectory.open(Path({str(path)!r}), {CONFIG!r}); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"in use by pid {holder.pid} on"):
            RunDirectory.open(path, CONFIG)
        assert f"pid {holder.pid} on" in str(RunDirectory.existing(path).holder())
        os.kill(holder.pid, signal.SIGKILL)
    assert RunDirectory.existing(path).holder() is None
    with RunDirectory.open(path, CONFIG), pytest.raises(RunError, match=f"pid {os.getpid()} "):
        RunDirectory.open(path, CONFIG)  # also within one process
    RunDirectory.open(path, CONFIG).close()


def test_what_is_not_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("three years of work")
    with pytest.raises(RunError, match=r"is not empty and is not a run \(it holds 'thesis.tex'\)"):
        RunDirectory.open(tmp_path, CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.yaml").write_text(CONFIG)  # a config of the user's own makes no run
    with pytest.raises(RunError, match="not a run"):
        RunDirectory.open(project, CONFIG)
    with pytest.raises(RunError, match="is a file"):
        RunDirectory.open(tmp_path / "thesis.tex", CONFIG)
    with pytest.raises(RunError, match="does not exist"):
        RunDirectory.existing(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is not a run"):
        RunDirectory.existing(project)


def test_an_empty_directory_and_one_killed_while_it_was_made_become_runs(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "run.lock").write_text("pid 1")
    (tmp_path / "config.yaml.partial").write_text("# Resol")
    with RunDirectory.open(tmp_path, CONFIG) as opened:
        assert opened.config_text == CONFIG
        assert not opened.finished
        assert opened.read_summary() is None


def test_continuing_with_another_config_lists_the_keys_that_differ(tmp_path: Path) -> None:
    run = "run:\n  checkpoint_every: 5\n"
    with RunDirectory.open(tmp_path / "r", CONFIG + run) as opened, Checkpoints(opened.checkpoints).write(5):
        pass
    free = CONFIG.replace("steps: 7", "steps: 70") + run.replace("5", "1") + "  keep_checkpoints: 2\n"
    with RunDirectory.open(tmp_path / "r", free) as opened:
        assert opened.config_text == free
    with pytest.raises(RunError, match=r"algorithm.group_size: 3 → 8\n  seed: \(absent\) → 1\n.*steps") as caught:
        RunDirectory.open(tmp_path / "r", free.replace("group_size: 3", "group_size: 8") + "seed: 1\n")
    assert "run.checkpoint_every" not in str(caught.value)
    with RunDirectory.open(tmp_path / "r", free + "seed: 1\n", free={"seed"}) as opened:  # the refusal freed the lock
        assert "seed: 1" in opened.config_text


def test_without_a_checkpoint_there_is_nothing_to_continue_and_the_config_may_change(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "r", CONFIG).close()
    with RunDirectory.open(tmp_path / "r", CONFIG.replace("group_size: 3", "group_size: 8")) as opened:
        assert "group_size: 8" in opened.config_text


# ---------------------------------------------------------------------- metrics


def test_metrics_are_plain_numbers_in_a_fixed_order(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "m.jsonl")
    file.append(1, {"z": Mean(1, 3), "a": Max(2), "none": Mean(0, 0), "inf": float("inf"), "time/x": 1.5, "n": None})
    file.close()
    line = (tmp_path / "m.jsonl").read_text()
    expected = '{"step": 1, "a": 2, "inf": null, "n": null, "none": null, "time/x": 1.5, "z": 0.3333333333333333}\n'
    assert line == expected
    assert "time/x" not in without_times(json.loads(line))


def test_metrics_roll_back_to_a_mark_and_over_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = JsonLines(path)
    file.append(1, {"x": 1.0})
    mark = file.mark()
    file.append(2, {"x": 2.0})
    file.close()
    with path.open("a") as half:
        half.write('{"step": 3, "x"')
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    file = JsonLines(path)
    file.roll_back(mark)
    file.append(2, {"x": 2.5})
    assert read_rows(path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.5}]
    with pytest.raises(RunError, match="not the file that was there"):
        file.roll_back(mark - 3)
    with pytest.raises(RunError, match="not the file that was there"):
        file.roll_back(10_000)
    file.close()
    path.write_text('{"step": 1}\nrubbish\n')
    with pytest.raises(RunError, match=r"m.jsonl:2: not a line of JSON"):
        read_rows(path)


# ---------------------------------------------------------------------- samples


def test_samples_hold_every_token_and_what_passes_found(tmp_path: Path) -> None:
    kinds = (Kind.TRAIN, Kind.BASELINE, Kind.TRAIN)
    trained, other = [group(4, kinds, failed=(2,)), group(1)], group(7)
    nothing = Sample("9.0", Kind.TRAIN, (), failure="prompt never answered")
    alone = [Ending(other, State.FILTERED, "equal"), Ending(Group(9, prompt(9), (nothing,)), State.FILTERED)]
    batch = batch_of(trained)
    path = tmp_path / "s.parquet"
    write_samples(path, [*(Ending(g, State.TRAINED) for g in trained), *alone], batch)

    rows = {row["sample"]: row for row in read_samples(path)}
    states = [(r["sample"], r["state"]) for r in rows.values()]
    assert states[:4] == [("4.0", "trained"), ("4.1", "baseline"), ("4.2", "failed"), ("1.0", "trained")]
    assert states[-2:] == [("7.2", "filtered"), ("9.0", "failed")]
    assert rows["4.2"]["why"] == "the judge is down"
    assert rows["4.2"]["advantages"] is None  # failed samples are in no batch
    assert rows["4.2"]["token_ids"] is not None
    assert rows["7.0"]["old_logprobs"] is None
    assert rows["7.0"]["why"] == "equal"
    assert rows["9.0"]["token_ids"] is None
    packed = [s for g in trained for s in g.usable]
    for at, sample in enumerate(packed):
        row, only, tokens = rows[sample.id], batch.select([at]), sample.trajectories[0].token_T
        assert row["token_ids"] == tokens.tolist()
        assert row["provenance"] == only.provenance_T.tolist()
        assert row["versions"] == only.version_T.tolist()
        assert row["trained"] == only.mask_T.tolist()
        assert only.advantage_T is not None
        assert only.old_logprob_T is not None
        assert row["advantages"] == only.advantage_T.tolist()
        for name, field in (("sampling_logprobs", only.sampling_logprob_T), ("old_logprobs", only.old_logprob_T)):
            np.testing.assert_array_equal(np.float32(row[name]), field.numpy())
        assert row["values"] is None  # nobody asked a critic
        assert (row["reward"], row["reward_parts"]) == (only.reward_N.item(), {"right": 0.5})
        assert json.loads(row["messages"])[-1]["content"] == row["response"]
        assert row["answer"] == str(row["prompt_index"])
    write_samples(tmp_path / "again.parquet", [*(Ending(g, State.TRAINED) for g in trained), *alone], batch)
    assert path.read_bytes() == (tmp_path / "again.parquet").read_bytes()


def test_samples_of_turns_and_several_trajectories(tmp_path: Path) -> None:
    reward = Reward(1.5, turns=(1.5,))
    sample = Sample("0.0", Kind.TRAIN, (trajectory(0, 0, reward=reward), trajectory(0, 2, "half \ud800 pair", reward)))
    several = Group(0, prompt(0), (sample,))
    write_samples(tmp_path / "s.parquet", [Ending(several, State.TRAINED)], batch_of([several]))
    first, second = read_samples(tmp_path / "s.parquet")
    assert (first["trajectory"], second["trajectory"]) == (0, 1)
    assert first["turn_rewards"] == [1.5]
    assert second["turn_ends"] == [4]
    assert second["response"] == "half ? pair"
    with pytest.raises(ValueError, match="packs 2 trajectories, the trained groups have 5"):
        write_samples(tmp_path / "s", [Ending(g, State.TRAINED) for g in (several, group(1))], batch_of([several]))


def test_samples_are_appended_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    append_samples(path, [Ending(group(1), State.FILTERED, "equal")])
    append_samples(path, [Ending(group(2), State.FILTERED, "equal")])
    assert [row["group"] for row in read_samples(path, ["group"])] == [1, 1, 1, 2, 2, 2]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunError, match=r"s.parquet: cannot be read"):
        read_samples(path)
    with pytest.raises(RunError, match="cannot be read"):
        read_samples(tmp_path / "none.parquet")


# ---------------------------------------------------------------------- ledger


def test_every_mistake_in_the_books_names_the_sample(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.issue(0, "p", {"0.0": Kind.TRAIN, "0.1": Kind.BASELINE}, 1)
    with pytest.raises(LedgerError, match=r"sample 0\.0 \(prompt p\) is issued a second time in step 2"):
        ledger.issue(0, "p", {"0.0": Kind.TRAIN}, 2)
    with pytest.raises(LedgerError, match=r"sample 7\.7 cannot end as trained: it was never issued"):
        ledger.finish("7.7", State.TRAINED, 1)
    with pytest.raises(LedgerError, match=r"sample 0\.1 cannot end as trained: it was issued for baseline"):
        ledger.finish("0.1", State.TRAINED, 1)
    ledger.finish("0.0", State.TRAINED, 1, trajectories=(trajectory(0),))
    with pytest.raises(LedgerError, match=r"sample 0\.0 cannot end as filtered: it has ended as trained in step 1"):
        ledger.finish("0.0", State.FILTERED, 1)
    with pytest.raises(LedgerError, match="issued a second time"):
        ledger.issue(0, "p", {"0.0": Kind.TRAIN}, 2)
    assert ledger.balance() == {"issued": 2, "in flight": 1, "trained": 1} | dict.fromkeys(
        ("baseline", "filtered", "stale", "failed", "evaluated", "cancelled"), 0
    )
    other = sqlite3.connect(tmp_path / "ledger.sqlite")
    other.execute("DELETE FROM samples WHERE sample = '0.1'")
    other.commit()
    other.close()
    with pytest.raises(LedgerError, match=r"do not balance.*in flight for only one of them: 0\.1"):
        ledger.balance()
    ledger.close()


def test_the_ledger_of_another_time_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.issue(0, "p", {"0.0": Kind.TRAIN}, 1)
    with pytest.raises(LedgerError, match="events 2 to 9 are missing"):
        ledger.roll_back(9)
    ledger.close()
    (tmp_path / "rubbish").write_bytes(b"no ledger at all" * 100)
    with pytest.raises(RunError, match="rubbish: damaged"):
        Ledger(tmp_path / "rubbish")
    with pytest.raises(RunError, match="rubbish: cannot be read"):
        read_totals(tmp_path / "rubbish")


def test_a_thousand_samples_a_step_cost_milliseconds_and_reading_meanwhile_is_free(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    child = (trajectory(0),)
    spent = []
    for step in range(5):
        names = [f"{step}.{i}" for i in range(1000)]
        begin = time.process_time()
        ledger.issue(step, "p", dict.fromkeys(names, Kind.TRAIN), step)
        for name in names:
            ledger.finish(name, State.TRAINED, step, reward=1.0, trajectories=child)
        assert read_totals(ledger.path)["issued"] == step * 1000  # not committed, not locked
        ledger.balance()
        spent.append(time.process_time() - begin)
    assert min(spent) < 0.25
    ledger.close()


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a dict: marks, roll-backs, and kills that lose what was not committed."""

    names = st.integers(0, 11).map(str)

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.books: dict[str, tuple[Kind, State | None]] = {}
        self.again: set[str] = set()
        self.marks = [(0, dict(self.books))]

    @rule(name=names, kind=st.sampled_from(Kind))
    def issue(self, name: str, kind: Kind) -> None:
        if name in self.again:
            self.again.remove(name)
        elif name in self.books:
            with pytest.raises(LedgerError, match=f"sample {name} "):
                self.ledger.issue(0, "p", {name: kind}, 1)
            return
        else:
            self.books[name] = kind, None
        self.ledger.issue(0, "p", {name: kind}, 1)

    @rule(name=names, state=st.sampled_from(State))
    def finish(self, name: str, state: State) -> None:
        kind, now = self.books.get(name, (None, None))
        only = {State.TRAINED: Kind.TRAIN, State.BASELINE: Kind.BASELINE, State.EVALUATED: Kind.EVALUATION}
        if kind is None or now is not None or only.get(state, kind) != kind:
            with pytest.raises(LedgerError, match=f"sample {name} "):
                self.ledger.finish(name, state, 1)
            return
        self.ledger.finish(name, state, 1, why="w", reward=0.5, trajectories=(trajectory(1), trajectory(2)))
        self.books[name] = kind, state
        self.again.discard(name)

    @rule()
    def mark(self) -> None:
        self.marks.append((self.ledger.mark(), dict(self.books)))

    @rule(which=st.integers(0, 100), killed=st.booleans())
    def roll_back(self, which: int, killed: bool) -> None:
        if killed:
            self.ledger._db.close()
            self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.marks = self.marks[: which % len(self.marks) + 1]
        clock, books = self.marks[-1]
        self.books = dict(books)
        in_flight = {f.sample: f.kind for f in self.ledger.roll_back(clock)}
        assert in_flight == {name: kind for name, (kind, state) in books.items() if state is None}
        self.again = set(in_flight)

    @rule()
    def balance(self) -> None:
        states = [state for _, state in self.books.values()]
        expected = {"issued": len(states), "in flight": states.count(None)} | {s.value: states.count(s) for s in State}
        assert self.ledger.balance() == expected
        (children,) = self.ledger._db.execute("SELECT COUNT(*) FROM trajectories").fetchone()
        assert children == 2 * (len(states) - states.count(None))

    def teardown(self) -> None:
        self.balance()
        self.ledger.cancel("over")
        assert self.ledger.balance()["in flight"] == 0
        self.ledger.close()
        shutil.rmtree(self.folder)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


# ---------------------------------------------------------------------- checkpoints


def test_checkpoints_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 2, 3):
        with checkpoints.write(step) as path:
            (path / "policy").mkdir()
            (path / "policy" / "weights").write_bytes(b"w" * step)
            save_state(path / STATE, {"step": step, "x": 0.1 + 0.2, "seed": 2**63})
            assert checkpoints.latest() == (None if step == 1 else (step - 1, tmp_path / f"step_{step - 1:06d}"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest == (3, tmp_path / "step_000003")
    assert load_state(latest[1] / STATE) == {"step": 3, "x": 0.1 + 0.2, "seed": 2**63}
    with pytest.raises(ValueError, match="never replaced"), checkpoints.write(3):
        pass
    with pytest.raises(KeyboardInterrupt), checkpoints.write(4):
        raise KeyboardInterrupt
    assert checkpoints.latest() == latest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "half a manifest", "renamed"])
def test_a_damaged_checkpoint_is_ignored_left_alone_and_can_be_written_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        with checkpoints.write(step) as path:
            (path / "weights").write_text("weights")
    newest = tmp_path / "step_000002"
    if damage == "truncated":
        (newest / "weights").write_text("wei")
    elif damage == "missing":
        (newest / "weights").unlink()
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "half a manifest":
        (newest / "manifest.json").write_text('{"step": 2, "fi')
    else:
        newest = newest.rename(tmp_path / "step_000007")
    stray = tmp_path / "step_000003.partial"
    stray.mkdir()
    (stray / "weights").write_text("w")
    assert Checkpoints.newest(tmp_path) == (1, tmp_path / "step_000001")
    assert stray.exists()  # whoever only looks touches nothing
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert not stray.exists()
    assert newest.exists()
    assert checkpoints.latest() == (1, tmp_path / "step_000001")
    assert f"{newest} is ignored" in caplog.text
    with checkpoints.write(2) as path:
        (path / "weights").write_text("weights")
    assert checkpoints.latest() == (2, tmp_path / "step_000002")
    assert not (tmp_path / "step_000001").exists()


# ---------------------------------------------------------------------- full disk


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_file_and_leaves_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "summary.json"
    write_aside(target, b"old")
    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(RunError, match=r"summary.json: no space left on the disk. Free some"):
        write_aside(target, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert target.read_bytes() == b"old"
    with pytest.raises(RunError, match=r"nowhere/x: cannot be written: .*No such file"):
        write_aside(tmp_path / "nowhere" / "x", b"")


def test_a_full_disk_under_metrics_and_log() -> None:
    metrics = JsonLines(Path("/dev/full"))
    with pytest.raises(RunError, match="/dev/full: no space left"):
        metrics.append(1, {"x": 1.0})
    metrics.close()
    with pytest.raises(RunError, match="/dev/full: no space left"), logging_to(Path("/dev/full")):
        logging.getLogger("treadle.x").info("hello")
    assert not any(h.__module__.startswith("treadle") for h in logging.getLogger().handlers)


def test_a_half_line_of_metrics_that_a_full_disk_cut_is_taken_back(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "m.jsonl")
    metrics.append(1, {"x": 1.0})
    real = metrics._file

    class Full:
        """Takes five bytes and then has no space."""

        room = 5

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def write(self, data: bytes) -> int:
            if not self.room:
                full_disk()
            self.room = 0
            return real.write(data[:5])

    metrics._file = Full()  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"m.jsonl: no space left"):
        metrics.append(2, {"x": 2.0})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "x": 1.0}\n'
    real.close()


def test_a_full_disk_under_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.issue(0, "p", {"0.0": Kind.TRAIN}, 1)
    ledger.commit()
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(RunError, match=r"ledger.sqlite: no space left"):  # noqa: PT012
        for i in range(1, 10_000):
            ledger.issue(i, "p" * 100, {f"{i}.0": Kind.TRAIN}, 1)
    ledger.close()
    assert read_totals(tmp_path / "ledger.sqlite")["issued"] >= 1


def test_a_full_disk_under_a_checkpoint_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.write(1) as path:
        (path / "weights").write_text("w")
    with pytest.raises(RunError, match=r"step_000002: no space left"), checkpoints.write(2):
        full_disk()
    with pytest.raises(RunError, match=r"step_000002: no space left"), checkpoints.write(2):
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors does
    nearly = shutil.disk_usage(tmp_path)._replace(free=512)
    with pytest.raises(ZeroDivisionError), checkpoints.write(2):
        _ = 1 / 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nearly)
    with pytest.raises(RunError, match=r"step_000002: no space left") as caught, checkpoints.write(2):
        raise RuntimeError("a native writer failed")  # as torch.save does, without an errno
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert checkpoints.latest() == (1, tmp_path / "step_000001")


def test_a_full_disk_in_a_step_ends_the_run_which_then_goes_on(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=r"step_000002.parquet: no space left"), recorder(directory, every=1) as opened:  # noqa: PT012
        opened.restore()
        train(opened, 1, 0, 1)
        with opened.checkpoint(1, {"step": 1}) as path:
            (path / "weights").write_text("w")
        monkeypatch.setattr(files.os, "fsync", full_disk)
        train(opened, 2, 2, 3)
    monkeypatch.undo()
    assert read_totals(directory.ledger)["cancelled"] == 6
    with recorder(directory) as opened:
        found = opened.restore()
        assert found is not None
        assert found[1] == {"step": 1}
        train(opened, 2, 2, 3)
    assert read_totals(directory.ledger)["trained"] == 12


# ---------------------------------------------------------------------- for people

HOSTILE = "[/red] [bold]x \x1b]0;owned\x07 \x1b[2J \u202egnp \ud800 é\nline"


@given(st.text())
def test_readable_text_is_one_line_of_printable_characters(text: str) -> None:
    assert readable(text).isprintable()
    assert len(readable(text, 10)) <= 10


def shown(progress_encoding: str, terminal: bool) -> str:
    class Screen(StringIO):
        encoding = progress_encoding

    screen = Screen()
    console = Console(file=screen, force_terminal=terminal, color_system=None, width=100, legacy_windows=False)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Progress(console) as progress:  # noqa: PT012
        progress.start(50, 10)
        progress.stage("generate", 3, 48)
        progress.evaluation(10, {"evaluation/greedy": 0.25, "evaluation/greedy_failed": 0.0})
        progress.step(11, {"reward/mean": 0.5, "response/tokens": None, "hidden": 3.0, "time/step": 2.0})
        progress._drawn = 0.0
        progress.sample(HOSTILE, HOSTILE, 1.0)
        assert threading.active_count() == threads
        raise KeyboardInterrupt
    progress.stop()
    return screen.getvalue()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_shows_stages_and_the_sample_but_obeys_none_of_its_text(encoding: str) -> None:
    screen = shown(encoding, terminal=True)
    screen.encode(encoding)
    assert "generate" in screen
    assert "3/48" in screen
    assert "11/50" in screen
    assert "left" in screen
    assert "[/red] [bold]x" in screen
    assert not re.search(r"\x07|\u202e|\x1b\]|\x1b\[2J", screen)
    assert screen.endswith("\x1b[?25h")  # the cursor is back


def test_elsewhere_a_step_is_a_plain_line() -> None:
    lines = shown("utf-8", terminal=False).splitlines()
    assert lines == [
        "goes on after step 10 of 50",
        "evaluation after step 10   greedy 0.25",
        "step 11/50   reward 0.5   tokens –   0:01:18 left",
    ]


def test_curves_are_drawn_whatever_was_recorded(directory: RunDirectory) -> None:
    def size() -> int:
        picture = draw(directory).read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        return len(picture)

    empty = size()
    metrics, evaluations = JsonLines(directory.metrics), JsonLines(directory.evaluations)
    for step in range(30):
        metrics.append(step, {"reward/mean": step / 30, "response/tokens": 9.0, "policy/grad_norm": None})
        evaluations.append(step, {"evaluation/greedy": 0.5, "evaluation/greedy_tokens": 500.0})
    metrics.close()
    evaluations.close()
    assert size() > empty


def test_the_log_is_written_and_the_handler_leaves(tmp_path: Path) -> None:
    before = list(logging.getLogger().handlers)
    with logging_to(tmp_path / "log.txt"):
        logging.getLogger("treadle.x").info("half \ud800 pair")
        logging.getLogger("library").warning("take care")
        logging.getLogger("library").info("chatter")
    logging.getLogger("treadle.x").warning("after")
    log = (tmp_path / "log.txt").read_text()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO treadle.x: half", log)
    assert "WARNING library: take care" in log
    assert "chatter" not in log
    assert "after" not in log
    assert logging.getLogger().handlers == before
