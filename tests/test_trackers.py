"""Trackers are told what the run directory records; what they wrote is read back."""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from rich.console import Console

import treadle
from tests.run_writer import STEPS, batch_of, evaluation, group, issue
from tests.runs import settings
from treadle.config import load
from treadle.errors import ConfigError, RunError
from treadle.runs.config import RunConfig
from treadle.runs.directory import RunDirectory
from treadle.runs.metrics import read_rows
from treadle.runs.progress import Progress
from treadle.runs.recorder import Recorder
from treadle.runs.trackers import tracking
from treadle.runs.trackers.base import Outcome, Run, Tracker, TrackerConfig
from treadle.runs.trackers.tracking import Tracking, make_trackers
from treadle.types import Mean

CONFIG = "algorithm:\n  group_size: 3\nsteps: 7\n"
Told = dict[int, dict[str, float]]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests opens a database slowly."""
    monkeypatch.setattr(tracking, "PATIENCE", dict.fromkeys(tracking.PATIENCE, 200.0))


def record(path: Path, trackers: list[Any], steps: range, end: str = "finish", output: StringIO | None = None) -> None:
    """Steps of a run, an evaluation after each third, checkpoints after even ones; then an end, or none."""
    config = load(RunConfig, None, base={"dir": str(path), "checkpoint_every": 2, "trackers": trackers})
    console = Console(file=output if output is not None else StringIO())
    with RunDirectory.open(path, CONFIG) as directory:
        recorder = Recorder(directory, config, STEPS, Progress(console), trackers=make_trackers(config.told))
        with recorder if end != "killed" else _killed(recorder):
            found = recorder.restore()
            assert steps.start == (1 if found is None else found[1]["step"] + 1)
            for step in steps:
                done = group(step)
                issue(recorder, step, step)
                statistics = {"reward/mean": Mean(step, 10), "samples/failed": Mean(0.0, 0.0)}
                recorder.trained(step, [done], batch_of([done]), statistics, {"generate": 0.5})
                if step % 3 == 0:
                    recorder.evaluated(step, {"greedy": [evaluation(step, 0)]}, {"evaluation/greedy": Mean(step, 20)})
                if recorder.checkpoint_due(step):
                    with recorder.checkpoint(step, {"step": step}) as folder:
                        (folder / "weights").write_text("weights")
            if end == "error":
                raise RunError("the disk is full")
            if end == "finish":
                recorder.finish({"data_ended": False})


class _killed:
    """Leaves a recorder as `kill -9` does, all files closed but nothing ended."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        followers = self._recorder._tracking._followers
        end = time.monotonic() + 200
        while any(f._told["metrics"] < self._recorder._step for f in followers) and time.monotonic() < end:
            time.sleep(0.01)  # what is told is told
        for follower in followers:
            follower.given_up = True
            follower.wake.set()
            follower.join()
            follower._tracker.close("failed")  # or its file would be complained about
        self._recorder._tracking._followers = []
        self._recorder._open.close()


def expected(steps: range) -> Told:
    """What is told of these steps: numbers only."""
    told: Told = {}
    for step in steps:
        tokens = group(step)
        sampled = sum(t.sampled_tokens for s in tokens.usable for t in s.trajectories)
        told[step] = {"reward/mean": step / 10, "time/generate": 0.5, "time/step": 0.5}
        told[step]["time/tokens_per_second"] = sampled / 0.5
        if step % 3 == 0:
            told[step]["evaluation/greedy"] = step / 20
    return told


def approximately(told: Told) -> dict[int, Any]:
    return {step: pytest.approx(metrics) for step, metrics in told.items()}


# ---------------------------------------------------------------------- TensorBoard


def events(run: Path) -> Told:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    told: Told = {}
    for tag in found.Tags()["scalars"]:
        for event in found.Scalars(tag):
            assert tag not in told.setdefault(event.step, {}), "told twice"
            told[event.step][tag] = event.value
    return told


def test_tensorboard_holds_the_record(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = StringIO()
    record(tmp_path / "run", ["tensorboard"], range(1, 8), output=output)
    assert events(tmp_path / "run") == approximately(expected(range(1, 8)))
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    (text,) = found.Tensors("config")
    assert text.tensor_proto.string_val[0].decode() == "".join(f"    {line}\n" for line in CONFIG.splitlines())
    shown = output.getvalue().replace("\n", " ")
    assert f"tracker tensorboard: tensorboard --logdir {tmp_path / 'run' / 'tensorboard'}" in shown


def test_tensorboard_forgets_what_a_crash_undid_also_in_a_viewer_that_has_seen_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path / "run", ["tensorboard"], range(1, 6), "killed")  # the checkpoint is after step 4
    viewer = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    viewer.Reload()
    assert [e.step for e in viewer.Scalars("reward/mean")] == [1, 2, 3, 4, 5]
    record(tmp_path / "run", ["tensorboard"], range(5, 8))
    assert events(tmp_path / "run") == approximately(expected(range(1, 8)))
    viewer.Reload()
    assert [e.step for e in viewer.Scalars("reward/mean")] == [1, 2, 3, 4, 5, 6, 7]


# ---------------------------------------------------------------------- Weights & Biases


def wandb_records(file: Path) -> Iterator[Any]:
    """The messages of a `.wandb` file: LevelDB's log format (blocks of 32 KiB, each record with checksum, length and
    type: whole, first, middle, last) after 7 bytes of header."""
    from wandb.proto import wandb_internal_pb2

    data, at, message = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return  # still being written
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(message)  # type: ignore[attr-defined]
            message = b""


def wandb_runs(run: Path) -> Iterator[tuple[str, dict[str, Any], Told, int | None]]:
    """Of each file, oldest first: the W&B run's id, its configuration, what was told of each step, its exit code."""
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):  # named by their time
        name, config, told, code = "", {}, {}, None
        end = time.monotonic() + 100  # W&B's own process may still be writing what it was given
        while not any(m.WhichOneof("record_type") == "exit" for m in wandb_records(file)) and time.monotonic() < end:
            time.sleep(0.05)
        for message in wandb_records(file):
            match message.WhichOneof("record_type"):
                case "run":
                    name = message.run.run_id
                    config |= {item.key: json.loads(item.value_json) for item in message.run.config.update}
                case "history":
                    row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in message.history.item}
                    step = row.pop("step")
                    row = {k: v for k, v in row.items() if not k.startswith("_")}
                    assert not row.keys() & told.get(step, {}).keys(), "told twice"
                    told.setdefault(step, {}).update(row)
                case "exit":
                    code = message.exit.exit_code
        yield name, config, told, code


OFFLINE = {"name": "wandb", "mode": "offline", "project": "sums"}


@pytest.mark.slow
def test_wandb_goes_on_in_the_same_run_and_tells_no_step_twice(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="disk is full"):
        record(tmp_path / "run", [OFFLINE], range(1, 6), "error")
    record(tmp_path / "run", [OFFLINE], range(5, 8))
    (one, config, before, failed), (other, _, after, finished) = wandb_runs(tmp_path / "run")
    assert one == other
    assert config["algorithm"] == {"group_size": 3}
    assert (failed, finished) == (1, 0)
    assert before == approximately(expected(range(1, 6)))
    assert after == approximately(expected(range(6, 8)))  # step 5 was done again, and had been told


def test_wandb_that_is_not_logged_in_is_refused_before_anything_is_loaded(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **_: False)
    config = settings(tmp_path, tiny_model, run={"dir": str(tmp_path / "run"), "trackers": ["wandb"]})
    with pytest.raises(ConfigError, match=r"not logged in.*`wandb login`.*mode: offline"):
        treadle.train(config)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- MLflow


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy is deprecated"
)  # MLflow's tables, under SQLAlchemy 2.1
def test_mlflow_goes_on_in_the_same_run_and_tells_no_step_twice(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow = {"name": "mlflow", "uri": uri, "experiment": "sums"}
    with pytest.raises(RunError, match="disk is full"):
        record(tmp_path / "run", [mlflow], range(1, 6), "error")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (failed,) = client.search_runs([experiment.experiment_id])
    assert failed.info.status == "FAILED"
    record(tmp_path / "run", [mlflow], range(5, 8))
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status, run.info.run_name) == (failed.info.run_id, "FINISHED", "run")
    assert run.data.params == {"algorithm.group_size": "3", "steps": "7"}
    told: Told = {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            assert name not in told.setdefault(point.step, {}), "told twice"
            told[point.step][name] = point.value
    assert told == approximately(expected(range(1, 8)))


def test_mlflow_gets_names_and_values_that_it_takes() -> None:
    from treadle.runs.trackers.mlflow import _allowed

    assert _allowed("reward/pass@8") == "reward/pass_at_8"
    assert _allowed("reward/my.module:fn, ü") == "reward/my.module:fn_ ü"
    assert len(_allowed("x" * 1000)) == 250


# ---------------------------------------------------------------------- what all have in common


class Remembering(Tracker):
    """A tracker of the user's, which fails when it is told to."""

    Config = TrackerConfig
    told: ClassVar[list[tuple[int, Mapping[str, float]]]]
    opened: ClassVar[list[str | None]]
    ended: ClassVar[list[Outcome]]
    down: ClassVar[bool]
    stumbles: ClassVar[int]  # times that it fails to take step 5
    stuck = threading.Event()

    def open(self, run: Run, known: str | None) -> str | None:
        self.opened.append(known)
        self._fail()
        return f"{run.name} by {run.config['algorithm']['group_size']}"

    def where(self) -> str:
        return "in memory"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.stuck.wait()
        self._fail()
        if step == 5 and type(self).stumbles:
            type(self).stumbles -= 1
            raise TimeoutError
        self.told.append((step, metrics))

    def close(self, outcome: Outcome) -> None:
        self._fail()
        self.ended.append(outcome)

    def _fail(self) -> None:
        if type(self).down:
            raise ConnectionError("no [route] to host")


MINE = "tests.test_trackers:Remembering"


@pytest.fixture(autouse=True)
def _forget() -> None:
    Remembering.told, Remembering.opened, Remembering.ended = [], [], []
    Remembering.down, Remembering.stumbles = False, 0
    Remembering.stuck.set()


def steps_told() -> list[int]:
    """Each step as often as it was told, an evaluation as half a step later."""
    return [step for step, metrics in Remembering.told if "reward/mean" in metrics]


def test_a_tracker_of_ones_own_is_told_everything_in_order(tmp_path: Path) -> None:
    record(tmp_path / "run", [MINE], range(1, 8))
    assert [(step, "evaluation/greedy" in metrics) for step, metrics in Remembering.told] == [
        *((step, False) for step in (1, 2, 3)),
        (3, True),
        *((step, False) for step in (4, 5, 6)),
        (6, True),
        (7, False),
    ]
    assert Remembering.told[0][1] == pytest.approx(expected(range(1, 2))[1])
    assert (Remembering.opened, Remembering.ended) == ([None], ["finished"])


def test_what_a_process_that_was_killed_had_told_is_not_told_again(tmp_path: Path) -> None:
    record(tmp_path / "run", [MINE], range(1, 6), "killed")
    record(tmp_path / "run", [MINE], range(5, 8))
    assert steps_told() == [1, 2, 3, 4, 5, 6, 7]
    assert Remembering.opened == [None, "run by 3"]


def test_a_run_that_begins_anew_is_another_run_to_the_tracker(tmp_path: Path) -> None:
    record(tmp_path / "run", [MINE], range(1, 2), "killed")  # no checkpoint yet
    record(tmp_path / "run", [MINE], range(1, 3), "interrupted")
    assert steps_told() == [1, 1, 2]
    assert Remembering.opened == [None, None]


def test_a_service_that_is_down_neither_ends_the_run_nor_goes_unsaid_and_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "PATIENCE", dict.fromkeys(tracking.PATIENCE, 1.0))
    Remembering.down = True
    output = StringIO()
    with caplog.at_level(logging.WARNING):
        record(tmp_path / "run", [MINE], range(1, 8), output=output)
    assert (Remembering.told, Remembering.ended) == ([], [])
    said = [r.getMessage() for r in caplog.records]
    assert sum("failed and is told again later" in line for line in said) == 1, "once, however often it failed"
    assert any(line.startswith(f"tracker {MINE}: failed attempts: ConnectionError ") for line in said)
    shown = " ".join(output.getvalue().split())
    assert f"tracker {MINE}: failed (ConnectionError: no [route] to host) and is told again later" in shown
    assert "told up to step 0 only; the same command tells it the rest" in shown
    assert (tmp_path / "run" / "summary.json").exists()

    Remembering.down = False
    with RunDirectory.existing(tmp_path / "run") as directory:  # what the same command does
        config = load(RunConfig, None, base={"dir": str(tmp_path / "run"), "trackers": [MINE]})
        Tracking(directory, make_trackers(config.told), print).tell_all()
    assert steps_told() == [1, 2, 3, 4, 5, 6, 7]
    assert Remembering.ended == ["finished"]


def test_what_comes_while_a_row_is_tried_again_is_told_after_it(tmp_path: Path) -> None:
    Remembering.stumbles = 3
    record(tmp_path / "run", [MINE], range(1, 8))
    assert steps_told() == [1, 2, 3, 4, 5, 6, 7]
    assert (Remembering.stumbles, Remembering.ended) == (0, ["finished"])


def test_a_service_that_hangs_holds_up_nothing_but_a_while_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "PATIENCE", dict.fromkeys(tracking.PATIENCE, 0.5))
    Remembering.stuck.clear()
    output = StringIO()
    record(tmp_path / "run", [MINE], range(1, 8), output=output)
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
    shown = " ".join(output.getvalue().split())
    assert f"tracker {MINE}: waiting for it, 0 s at most" in shown
    assert f"tracker {MINE}: does not answer; told up to step 0 only; the same command tells it the rest" in shown
    Remembering.stuck.set()
    for thread in threading.enumerate():
        if thread.name == f"treadle-{MINE}":
            thread.join()
    assert steps_told() == [1]  # it gave up: another process may have the run by now


def test_a_tracker_that_is_named_late_gets_the_history(tmp_path: Path) -> None:
    record(tmp_path / "run", [], range(1, 5), "interrupted")
    record(tmp_path / "run", [MINE], range(5, 8))
    assert steps_told() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("text", ["{", "[]", '{"known": 3, "metrics": 1, "evaluations": 1}', '{"known": null}'])
def test_damaged_notes_on_a_tracker_are_named(tmp_path: Path, text: str) -> None:
    record(tmp_path / "run", [MINE], range(1, 5), "interrupted")
    notes = tmp_path / "run" / "trackers" / f"{MINE}.json"
    assert json.loads(notes.read_text()) == {"known": "run by 3", "metrics": 4, "evaluations": 3}
    notes.write_text(text)
    with pytest.raises(RunError, match=r"Remembering.json.*Remove it"):
        record(tmp_path / "run", [MINE], range(5, 8))


def test_a_finished_run_is_told_to_a_tracker_that_is_named_afterwards(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, tiny_model, steps=2)
    summary = treadle.train(config)
    config["run"]["trackers"] = ["tensorboard"]
    assert treadle.train(config) == summary
    rows = {row.pop("step"): row for row in read_rows(tmp_path / "run" / "metrics.jsonl")}
    numbers = {s: {k: v for k, v in row.items() if v is not None} for s, row in rows.items()}
    assert events(tmp_path / "run") == {step: pytest.approx(row, rel=1e-6) for step, row in numbers.items()}
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["run"]["trackers"] == [{"name": "tensorboard"}]


# ---------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("trackers", "says"),
    [
        (["tensorbord"], r"there is no 'tensorbord' in treadle.runs.trackers: did you mean tensorboard"),
        (["tensorboard", "tensorboard"], r"tensorboard stands there 2 times"),
        ([{"name": "wandb", "mode": "sometimes"}], r"one of online, offline"),
        ([{"name": "wandb", "projekt": "x"}], r"no such key; did you mean .*project"),
        ([3], r"run.trackers|trackers"),
        ("tensorboard", r"a list"),
        ([{"name": "console", "metrics": ["rewards/mean"]}], r"no metric 'rewards/mean'; did you mean 'reward/mean'"),
        (["tests.test_trackers:Nothing"], r"has no 'Nothing'"),
    ],
)
def test_a_mistake_in_the_trackers_is_named(trackers: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(RunConfig, None, base={"dir": "runs/x", "trackers": trackers})


def test_a_package_that_is_missing_is_named_before_anything_is_loaded(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.runs.trackers.base.find_spec", lambda name: None)
    config = settings(tmp_path, tiny_model, run={"dir": str(tmp_path / "run"), "trackers": ["mlflow"]})
    with pytest.raises(ConfigError, match=r"the package mlflow is not installed; pip install 'treadle\[mlflow\]'"):
        treadle.train(config)
    assert not (tmp_path / "run").exists()


def test_the_terminal_shows_the_metrics_that_one_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(RunConfig, None, base={"dir": "x", "trackers": [{"name": "console", "metrics": ["samples/failed"]}]})
    assert (config.told, config.console.metrics) == ([], ("samples/failed",))
    progress = Progress(shown=config.console.metrics)
    progress.start(2, 0)
    progress.step(1, {"samples/failed": 0.25, "reward/mean": 1.0})
    assert "step 1/2   samples/failed 0.25" in capsys.readouterr().out
