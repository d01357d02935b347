"""`Recorder`: all that a loop tells its run directory.

A checkpoint marks a place in every record. `restore` rolls all of them back to it, so a process may be killed at any
point: what it recorded after the latest checkpoint is undone and happens again.

Within a step the order is samples file, ledger, metrics row: a row of metrics means that the other two are there.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.metrics import Registry
from treadle.runs.checkpoints import STATE, Checkpoints, load_state, save_state
from treadle.runs.config import RunConfig
from treadle.runs.curves import draw
from treadle.runs.directory import RunDirectory
from treadle.runs.files import PARTIAL, write_aside, writing
from treadle.runs.ledger import Ledger, State
from treadle.runs.log import logging_to
from treadle.runs.metrics import TIME, JsonLines, plain, read_rows
from treadle.runs.progress import Progress
from treadle.runs.samples import Ending, append_samples, write_samples
from treadle.runs.text import readable
from treadle.runs.trackers.base import Outcome, Tracker
from treadle.runs.trackers.tracking import Tracking
from treadle.types import Group, Kind, Prompt, Statistics

if TYPE_CHECKING:
    from treadle.batch import Batch

log = logging.getLogger(__name__)

_MARKS = ("ledger", "metrics", "evaluations")


class Recorder:
    """Records of one run, all consistent with each other at every checkpoint.

    ::

        with RunDirectory.open(path, text) as directory, Recorder(directory, config.run, config.steps) as recorder:
            found = recorder.restore()
            recorder.issued(prompt, [("0.0", Kind.TRAIN), ("0.1", Kind.TRAIN)], step=1)
            recorder.trained(1, groups, batch, {"reward/mean": Mean(3, 8)}, {"generate": 0.8, "update": 1.1})
            with recorder.checkpoint(1, {"version": 1}) as path:
                await policy.save(path / "policy")
            recorder.finish({"reward": 0.4})

    Leaving the block ends what is still in flight as cancelled, also when an error or Ctrl-C leaves it.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: RunConfig,
        steps: int,
        progress: Progress | None = None,
        metrics: Registry | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """`metrics`: those that may be written; None: ours."""
        self.directory = directory
        self.config = config
        self.steps = steps
        self.progress = progress if progress is not None else Progress(shown=config.console.metrics)
        self._dropped: list[Ending] = []  # since samples were last written
        self._step = 0  # the last one that is done
        self._defined = metrics if metrics is not None else Registry()
        self._tracking = Tracking(directory, trackers, self.progress.note)
        self._outcome: Outcome = "failed"
        with ExitStack() as stack:
            stack.enter_context(logging_to(directory.log))
            stack.enter_context(self.progress)
            self._ledger = stack.enter_context(closing(Ledger(directory.ledger)))
            self._metrics = stack.enter_context(closing(JsonLines(directory.metrics)))
            self._evaluations = stack.enter_context(closing(JsonLines(directory.evaluations)))
            self._checkpoints = Checkpoints(directory.checkpoints, config.keep_checkpoints)
            stack.callback(lambda: self._tracking.close(self._outcome))
            self._open = stack.pop_all()

    def restore(self) -> tuple[Path, dict[str, Any]] | None:
        """Call once, before anything is recorded: roll every record back to the latest checkpoint, or to the start.

        Returns that checkpoint's directory and the `state` that was given with it. Raises `RunError`, and leaves all
        as it is, where checkpoints were written and none is whole.
        """
        latest = self._checkpoints.latest()
        self.directory.refuse_loss(latest is not None)
        marks, state = dict.fromkeys(_MARKS, 0), {}
        if latest is not None:
            self.directory.mark_checkpointed()  # killed before it could
            saved = load_state(latest[1] / STATE, "marks", "state")
            marks, state = saved["marks"], saved["state"]
        with writing(self.directory.path):
            self.directory.summary.unlink(missing_ok=True)  # it goes on, so it is not finished
        self._ledger.roll_back(marks["ledger"])
        self._metrics.roll_back(marks["metrics"])
        self._evaluations.roll_back(marks["evaluations"])
        self._settle_samples()
        self._step = latest[0] if latest is not None else 0
        self._tracking.start(anew=latest is None)
        self.progress.start(self.steps, self._step)
        if latest is None:
            return None
        log.info("goes on after step %d from %s", *latest)
        return latest[1], state

    # ------------------------------------------------------------------ during a step

    def issued(self, prompt: Prompt, samples: Sequence[tuple[str, Kind]], step: int) -> None:
        """Samples of a prompt are asked for, by id, while `step` is under way."""
        self._ledger.issue(prompt.index, prompt.id, dict(samples), step)

    def filtered(self, group: Group, step: int, why: str) -> None:
        """A group ended while `step` was under way and is not trained."""
        ending = Ending(group, State.FILTERED, why)
        self._finish(ending, step)
        self._dropped.append(ending)

    def trained(
        self, step: int, groups: Sequence[Group], batch: Batch, statistics: Statistics, seconds: Mapping[str, float]
    ) -> None:
        """A step is done: `batch` packs these groups, in this order; `seconds` went by in its stages.

        Raises `TrainingError` for a metric without a definition.
        """
        self._defined.check(statistics)
        endings = [Ending(g, State.TRAINED) for g in groups]
        write_samples(self.directory.samples_file("step", step), [*endings, *self._dropped], batch)
        self._dropped.clear()
        for ending in endings:
            self._finish(ending, step)
        self._ledger.balance()
        row = {**plain(statistics), **_times(groups, seconds)}
        self._metrics.append(step, row)
        self._step = step
        self.progress.step(step, row)
        self._show_last(groups)
        self._tracking.tell()

    def evaluated(self, step: int, groups: Mapping[str, Sequence[Group]], statistics: Statistics) -> None:
        """An evaluation after `step` (0: before training) is done: its groups by way of sampling, e.g. "greedy"."""
        self._defined.check(statistics)
        endings = [Ending(g, State.EVALUATED, evaluation=way) for way, part in groups.items() for g in part]
        write_samples(self.directory.samples_file("evaluation", step), endings)
        for ending in endings:
            group = ending.group
            self._ledger.issue(group.index, group.prompt.id, {s.id: s.kind for s in group.samples}, step)
            self._finish(ending, step)
        self._ledger.balance()
        row = plain(statistics)
        self._evaluations.append(step, row)
        self.progress.evaluation(step, row)
        log.info("evaluation after step %d: %s", step, row)
        self._tracking.tell()

    def checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint follows this step (one follows the last step in any case)."""
        every = self.config.checkpoint_every
        return every > 0 and step % every == 0

    @contextmanager
    def checkpoint(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        """A directory for the engines to save into, at the end of `step`.

        `state` (JSON) and all records belong to the instant of the call; what happens during a long save comes after.
        """
        self._write_dropped(step)
        marks = dict(zip(_MARKS, (self._ledger.mark(), self._metrics.mark(), self._evaluations.mark()), strict=True))
        with self._checkpoints.write(step) as path:
            save_state(path / STATE, {"step": step, "marks": marks, "state": state})
            yield path
        self.directory.mark_checkpointed()
        log.info("checkpoint after step %d", step)

    # ------------------------------------------------------------------ the end

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run came to its end: `curves.png`, and last `summary.json`, which says so.

        `summary` has `data_ended`: whether it ended for want of prompts, and not by `steps`.
        """
        self._write_dropped(self._step + 1)
        self._ledger.cancel("the run ended")
        draw(self.directory)
        whole = {"steps": self._step, **summary, "samples": self._ledger.balance()}
        write_aside(self.directory.summary, json.dumps(whole, indent=2).encode() + b"\n")
        log.info("finished after step %d", self._step)
        self._outcome = "finished"

    def close(self, why: str = "the run stopped") -> None:
        """End what is in flight as cancelled, and close all files, even where a full disk prevents the former."""
        with self._open.pop_all():
            self._write_dropped(self._step + 1)
            self._ledger.cancel(why)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            log.warning("interrupted in step %d", self._step + 1)
            self._outcome = "interrupted"
            self.close("interrupted")
        else:
            log.error("stopped in step %d", self._step + 1, exc_info=error)
            self.close(readable(f"{type(error).__name__}: {error}", 200))

    # ------------------------------------------------------------------ inside

    def _settle_samples(self) -> None:
        """Remove files of samples whose rows were rolled back, and name those that a row promises and that are gone."""
        run = self.directory
        orphans = [*run.samples.glob(f"*{PARTIAL}")]
        for what, rows in (("step", run.metrics), ("evaluation", run.evaluations)):
            files, promised = run.samples_files(what), {row["step"] for row in read_rows(rows)}
            orphans += [path for step, path in files.items() if step not in promised]
            for step in sorted(promised - files.keys()):
                log.warning("%s is gone; the run goes on without it", run.samples_file(what, step))
        for path in orphans:
            with writing(path):
                path.unlink()

    def _finish(self, ending: Ending, step: int) -> None:
        for sample, state, why in ending.samples():
            reward = None if sample.reward is None else sample.reward.value
            self._ledger.finish(sample.id, state, step, why=why, reward=reward, trajectories=sample.trajectories)

    def _write_dropped(self, step: int) -> None:
        """Samples of groups that were dropped since a step was last recorded join the file of `step`."""
        if self._dropped:
            append_samples(self.directory.samples_file("step", step), self._dropped)
            self._dropped.clear()

    def _show_last(self, groups: Sequence[Group]) -> None:
        done = [s for g in groups for s in g.usable if s.trajectories]
        if done and (messages := groups[-1].prompt.messages):
            trajectory = done[-1].trajectories[-1]
            reward = None if trajectory.reward is None else trajectory.reward.value
            self.progress.sample(str(messages[-1]["content"]), trajectory.response, reward)


def _times(groups: Sequence[Group], seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage and in all, and sampled tokens trained per second of the step."""
    whole = sum(seconds.values())
    tokens = sum(t.sampled_tokens for g in groups for s in g.usable for t in s.trajectories)
    named = {f"{TIME}{stage}": value for stage, value in seconds.items()}
    return {**named, f"{TIME}step": whole, f"{TIME}tokens_per_second": tokens / whole if whole else 0.0}
