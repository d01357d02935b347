"""Telling trackers what a run records, behind the loop's back.

Each tracker has a thread that follows `metrics.jsonl` and `evaluations.jsonl` and tells what it has not told yet. So a
slow service never holds up the run, one that is down gets everything when it is back (in the next process, if need be),
and a tracker that is named late gets the whole history. `trackers/<name>.json` in the run directory says how far each
has been told.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from treadle.config import plugin_class
from treadle.config.yaml_text import from_text
from treadle.errors import RunError
from treadle.runs.directory import RunDirectory
from treadle.runs.files import reading, write_aside, writing
from treadle.runs.text import readable
from treadle.runs.trackers.base import FOLDER, Outcome, Run, Tracker, TrackerConfig

log = logging.getLogger(__name__)

PATIENCE: dict[Outcome, float] = {"finished": 60.0, "failed": 10.0, "interrupted": 5.0}
"""Seconds that the end of a run waits for trackers that are behind."""
_UNSAID = 2.0  # of them pass before a word is said of it
_PAUSE = 0.5  # seconds between attempts at the end


def make_trackers(configs: Sequence[TrackerConfig]) -> list[Tracker]:
    """The trackers that `run.trackers` names. Raises ConfigError for one that cannot work here."""
    trackers: list[Tracker] = []
    for config in configs:
        found = plugin_class(config.name, FOLDER)
        trackers.append(found(config))
        trackers[-1].check()
    return trackers


class Tracking:
    """The trackers of one run.

    ::

        tracking = Tracking(directory, make_trackers(config.run.told), print)
        tracking.start(anew=True)      # once the record is where the run goes on from
        tracking.tell()                # a row was added
        tracking.close("finished")     # waits, but not for ever
    """

    def __init__(self, directory: RunDirectory, trackers: Sequence[Tracker], say: Callable[[str], None]) -> None:
        """`say` shows a line to people; it is called by the methods below and never by another thread."""
        self._directory = directory
        self._trackers = trackers
        self._say = say
        self._followers: list[_Follower] = []

    def start(self, anew: bool) -> None:
        """Begin to follow. `anew`: the record is empty, and what was told of an earlier attempt is another run."""
        if not self._trackers:
            return
        directory = self._directory
        run = Run(directory.path, from_text(directory.config_text, str(directory.config)))
        with writing(directory.trackers):
            directory.trackers.mkdir(exist_ok=True)
        for tracker in self._trackers:
            state = directory.trackers / f"{tracker.config.name}.json"
            if anew:
                with writing(state):
                    state.unlink(missing_ok=True)
            self._followers.append(_Follower(tracker, run, directory, state))
        for follower in self._followers:
            follower.start()

    def tell_all(self) -> None:
        """Tell a finished run's record to whom it has not been told."""
        self.start(anew=False)
        self.close("finished")

    def tell(self) -> None:
        """There is something new in the record."""
        for follower in self._followers:
            follower.wake.set()
        self._say_news()

    def close(self, outcome: Outcome) -> None:
        """The last row is there. Waits a while for who is behind, and says what was not told."""
        end = time.monotonic() + PATIENCE[outcome]
        for follower in self._followers:
            follower.outcome = outcome
            follower.wake.set()
        for follower in self._followers:
            follower.join(min(_UNSAID, PATIENCE[outcome]))
            if follower.is_alive():
                self._say(f"tracker {follower.label}: waiting for it, {PATIENCE[outcome]:.0f} s at most")
            follower.join(max(0.0, end - time.monotonic()))
            follower.given_up = True
            follower.conclude()
        self._say_news()

    def _say_news(self) -> None:
        for follower in self._followers:
            while follower.lines:
                self._say(f"tracker {follower.label}: {follower.lines.pop(0)}")


class _Follower(threading.Thread):
    def __init__(self, tracker: Tracker, run: Run, directory: RunDirectory, state: Path) -> None:
        # A daemon: a service that never answers must not keep the process from ending.
        super().__init__(name=f"treadle-{tracker.config.name}", daemon=True)
        self.label: str = tracker.config.name
        self.wake = threading.Event()
        self.outcome: Outcome | None = None
        self.given_up = False
        self.lines: list[str] = []
        self._tracker = tracker
        self._run = run
        self._state = state
        self._known, self._told = _read(state)
        self._failures: Counter[str] = Counter()  # by kind
        self._open = self._closed = False
        if tracker.retells:
            self._told = dict.fromkeys(self._told, -1)
        self._tails = {"metrics": _Tail(directory.metrics), "evaluations": _Tail(directory.evaluations)}
        self._waiting: list[tuple[int, str, dict[str, float]]] = []
        self.wake.set()  # there may be a history to tell, and opening takes time

    def run(self) -> None:
        while not self._closed and not self.given_up:
            self.wake.wait(_PAUSE if self.outcome is not None else None)
            self.wake.clear()
            outcome = self.outcome  # before the record is read: after it nothing more comes
            try:
                self._tell()
                if outcome is not None and not self._waiting:
                    self._tracker.close(outcome)
                    self._closed = True
            except Exception as error:  # whatever a library or a class of the user's raises: counted, told, tried again
                if not self.given_up:
                    self._failed(error)

    def conclude(self) -> None:
        """Say in the log, and to people, what this tracker missed."""
        if self._failures:
            kinds = ", ".join(f"{kind} {count}×" for kind, count in self._failures.items())
            log.warning("tracker %s: failed attempts: %s", self.label, kinds)
        if not self._closed:
            last = self._told["metrics"]
            silent = "" if self._failures else "does not answer; "
            self.lines.append(f"{silent}told up to step {max(last, 0)} only; the same command tells it the rest")
            log.warning("tracker %s: %s", self.label, self.lines[-1])

    # ------------------------------------------------------------------ on the thread

    def _tell(self) -> None:
        if not self._open:
            self._known = self._tracker.open(self._run, self._known)
            self._open = True
            self._save()
            self.lines.append(self._tracker.where())
        told = False
        try:
            while not self.given_up and (self._waiting or self._found()):
                step, what, row = self._waiting[0]
                self._tracker.log(step, row)
                self._told[what] = step
                self._waiting.pop(0)
                told = True
        finally:
            if told:
                self._save()

    def _found(self) -> bool:
        """Look for rows that have not been told, an evaluation after its step."""
        new = [(step, what, row) for what, tail in self._tails.items() for step, row in tail.new()]
        self._waiting = sorted((x for x in new if x[0] > self._told[x[1]]), key=lambda x: (x[0], x[1] != "metrics"))
        return bool(self._waiting)

    def _save(self) -> None:
        write_aside(self._state, json.dumps({"known": self._known, **self._told}).encode() + b"\n")

    def _failed(self, error: Exception) -> None:
        """The first of each kind is told; all are counted."""
        kind = type(error).__name__
        if not self._failures[kind]:
            log.warning("tracker %s failed and is told again later", self.label, exc_info=error)
            self.lines.append(f"failed ({readable(f'{kind}: {error}', 200)}) and is told again later")
        self._failures[kind] += 1


class _Tail:
    """Rows as they are added to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and numbers of each whole row since the last call; what is no number is left out."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            lines, _, _ = file.read().rpartition(b"\n")
        if not lines:
            return
        self._at += len(lines) + 1
        for line in lines.split(b"\n"):
            row: dict[str, Any] = json.loads(line)
            step = row.pop("step")
            yield step, {name: float(x) for name, x in row.items() if isinstance(x, int | float)}


def _read(path: Path) -> tuple[str | None, dict[str, int]]:
    """What the next process needs to know of a tracker: its name for the run, and the last step told of each file."""
    if not path.exists():
        return None, {"metrics": -1, "evaluations": -1}
    mend = "Remove it: the tracker then begins a new run."
    with reading(path, mend):
        state = json.loads(path.read_text(encoding="utf-8"))
    match state:
        case {"known": str() | None as known, "metrics": int() as metrics, "evaluations": int() as evaluations}:
            return known, {"metrics": metrics, "evaluations": evaluations}
    raise RunError(f"{path}: not what a run knows of a tracker. {mend}")
