"""The books: every sample that was issued ends in exactly one state.

`ledger.sqlite` is a plain SQLite file without a write-ahead log beside it, so one file is the whole truth. Each event
(a sample issued, a sample ended) ticks a clock that is written with it; a checkpoint remembers the clock, and
`roll_back` returns the books to that instant exactly, whatever was in flight then. The clock has no gaps, so a row
that someone removed is missed when the file is opened.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from treadle.errors import LedgerError, RunError
from treadle.runs.files import disk_full, failed_write, reading
from treadle.runs.text import storable
from treadle.types import Kind, Trajectory


class State(StrEnum):
    """How a sample ended."""

    TRAINED = "trained"
    BASELINE = "baseline"  # entered the baseline of a trained group
    FILTERED = "filtered"  # the algorithm had no use for its group
    STALE = "stale"  # older than `max_staleness` allows
    FAILED = "failed"  # the world outside broke
    EVALUATED = "evaluated"
    CANCELLED = "cancelled"  # in flight when the run ended


IN_FLIGHT = "in flight"
"""Name, among those of the states, of samples that have not ended."""

_ONLY = {State.TRAINED: Kind.TRAIN, State.BASELINE: Kind.BASELINE, State.EVALUATED: Kind.EVALUATION}
"""States that only samples of one kind can end in."""

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS samples (
    sample TEXT PRIMARY KEY,
    group_index INTEGER NOT NULL,
    prompt TEXT NOT NULL,
    kind TEXT NOT NULL,
    issued_step INTEGER NOT NULL,   -- the step that was under way
    issued_at INTEGER NOT NULL,     -- clock of events
    state TEXT CHECK (state IN ({", ".join(f"'{s}'" for s in State)})),  -- NULL while in flight
    step INTEGER,                   -- that consumed it
    why TEXT,
    reward REAL,
    ended_at INTEGER,               -- clock of events
    CHECK ((state IS NULL) = (ended_at IS NULL))
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS samples_by_state ON samples (state);
CREATE TABLE IF NOT EXISTS trajectories (
    sample TEXT NOT NULL REFERENCES samples (sample),
    number INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    ended TEXT NOT NULL,
    PRIMARY KEY (sample, number)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A sample that was asked for and has not ended."""

    sample: str
    group_index: int
    prompt: str
    kind: Kind
    issued_step: int


class Ledger:
    """Double entry: the table on the disk, and what this process believes; `balance` compares them.

    Events are on the disk after `commit` (and `balance`, `mark`, `roll_back`, `close`, which commit).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._guarded():
            self._db = sqlite3.connect(path, timeout=60)
            # The file itself changes only at a commit, in one go: people may read it all the while.
            self._db.execute("PRAGMA cache_spill = OFF")
            self._db.executescript(_SCHEMA)
        self._read_back()

    # ------------------------------------------------------------------ events

    def issue(self, group_index: int, prompt: str, samples: Mapping[str, Kind], step: int) -> None:
        """Samples of one prompt are asked for while `step` is under way.

        What was in flight at the instant of a roll-back is asked for again, and counts once.
        """
        for sample, kind in samples.items():
            if sample in self._again:
                self._again.remove(sample)
                continue
            try:
                with self._guarded():
                    self._db.execute(
                        "INSERT INTO samples (sample, group_index, prompt, kind, issued_step, issued_at)"
                        " VALUES (?, ?, ?, ?, ?, ?)",
                        (sample, group_index, prompt, kind, step, self._clock + 1),
                    )
            except sqlite3.IntegrityError as error:
                raise LedgerError(
                    f"sample {sample} (prompt {prompt}) is issued a second time in step {step}"
                ) from error
            self._clock += 1
            self._issued += 1
            self._in_flight[sample] = kind

    def finish(
        self,
        sample: str,
        state: State,
        step: int | None,
        *,
        why: str | None = None,
        reward: float | None = None,
        trajectories: Sequence[Trajectory] = (),
    ) -> None:
        """A sample ends: once, in one state."""
        kind = self._in_flight.get(sample)
        if kind is None:
            raise LedgerError(f"sample {sample} cannot end as {state}: {self._history(sample)}")
        if _ONLY.get(state, kind) != kind:
            raise LedgerError(f"sample {sample} cannot end as {state}: it was issued for {kind}")
        with self._guarded():
            self._db.execute(
                "UPDATE samples SET state = ?, step = ?, why = ?, reward = ?, ended_at = ? WHERE sample = ?",
                (state, step, None if why is None else storable(why), reward, self._clock + 1, sample),
            )
            self._db.executemany(
                "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?)",
                [(sample, i, len(t.token_T), t.sampled_tokens, t.ended) for i, t in enumerate(trajectories)],
            )
        self._clock += 1
        self._ended[state] += 1
        del self._in_flight[sample]
        self._again.discard(sample)

    def cancel(self, why: str) -> None:
        """What is still in flight ends as cancelled."""
        for sample in list(self._in_flight):
            self.finish(sample, State.CANCELLED, None, why=why)

    # ------------------------------------------------------------------ books

    def balance(self) -> dict[str, int]:
        """Samples `issued`, `in flight` and by state; `LedgerError` unless table and process agree on all of them."""
        self.commit()
        table = _totals(self._db)
        believed = {"issued": self._issued, IN_FLIGHT: len(self._in_flight)} | {s.value: self._ended[s] for s in State}
        in_flight = {s for (s,) in self._db.execute("SELECT sample FROM samples WHERE state IS NULL")}
        odd = sorted(in_flight ^ self._in_flight.keys())
        if odd or table != believed or self._issued != len(self._in_flight) + self._ended.total():
            raise LedgerError(
                f"{self.path}: the books do not balance: the table says {table}, this process {believed}"
                + (f"; in flight for only one of them: {', '.join(odd[:5])}" if odd else "")
            )
        return table

    def commit(self) -> None:
        with self._guarded():
            self._db.commit()

    def mark(self) -> int:
        """Commit; an instant that `roll_back` returns to."""
        self.commit()
        return self._clock

    def roll_back(self, mark: int) -> list[InFlight]:
        """Undo every event after `mark` (0: all), and say what was in flight then, in the order of issue.

        It still is: `issue` it again (or only start it again, or `cancel`).
        """
        last = self._last_event(mark)
        if last != mark:
            raise LedgerError(
                f"{self.path}: not the ledger that was there at the last checkpoint: events {last + 1} to {mark} are "
                "missing. Put it back, or start anew in another run.dir."
            )
        with self._guarded(), self._db:
            self._db.execute(
                "DELETE FROM trajectories WHERE sample IN"
                " (SELECT sample FROM samples WHERE issued_at > :mark OR ended_at > :mark)",
                {"mark": mark},
            )
            self._db.execute("DELETE FROM samples WHERE issued_at > ?", (mark,))
            self._db.execute(
                "UPDATE samples SET state = NULL, step = NULL, why = NULL, reward = NULL, ended_at = NULL"
                " WHERE ended_at > ?",
                (mark,),
            )
        return self._read_back()

    def close(self) -> None:
        """Commit and close. The file is closed even where the commit fails."""
        with closing(self._db):
            self.commit()

    # ------------------------------------------------------------------ inside

    def _read_back(self) -> list[InFlight]:
        """Believe the table."""
        with self._guarded():
            totals = _totals(self._db)
            self._clock = self._last_event()
            (events,) = self._db.execute("SELECT COUNT(issued_at) + COUNT(ended_at) FROM samples").fetchone()
            rows = self._db.execute(
                "SELECT sample, group_index, prompt, kind, issued_step FROM samples"
                " WHERE state IS NULL ORDER BY issued_at"
            ).fetchall()
        if events != self._clock:
            raise LedgerError(
                f"{self.path}: damaged: {self._clock} events were written and {events} are there, so rows were removed "
                "or added. Put it back, or start anew in another run.dir."
            )
        with reading(self.path, "Put it back, or start anew in another run.dir."):
            in_flight = [InFlight(name, group, prompt, Kind(kind), step) for name, group, prompt, kind, step in rows]
        self._issued = totals["issued"]
        self._ended = Counter({state: totals[state] for state in State})
        self._in_flight = {f.sample: f.kind for f in in_flight}
        self._again = set(self._in_flight)
        return in_flight

    def _last_event(self, until: int = 2**62) -> int:
        """The latest event not after `until`. Events are numbered without a gap."""
        (last,) = self._db.execute(
            "SELECT MAX(at) FROM (SELECT 0 AS at UNION ALL SELECT issued_at FROM samples"
            " UNION ALL SELECT ended_at FROM samples) WHERE at <= ?",
            (until,),
        ).fetchone()
        return last

    def _history(self, sample: str) -> str:
        row = self._db.execute("SELECT state, step FROM samples WHERE sample = ?", (sample,)).fetchone()
        return "it was never issued" if row is None else f"it has ended as {row[0]} in step {row[1]}"

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise disk_full(self.path) from error
            raise failed_write(self.path, error) from error
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.IntegrityError):
                raise
            raise RunError(f"{self.path}: damaged: {error}") from error


def read_totals(path: Path) -> dict[str, int]:
    """The totals of a run that this process does not own: `issued`, `in flight` and by state."""
    try:
        # Not `mode=ro`: after a kill, the first reader finishes or undoes the commit that was under way.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=60)) as db:
            return _totals(db)
    except sqlite3.Error as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def _totals(db: sqlite3.Connection) -> dict[str, int]:
    counts: dict[str | None, int] = dict(db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state").fetchall())
    return {
        "issued": sum(counts.values()),
        IN_FLIGHT: counts.get(None, 0),
        **{state.value: counts.get(state.value, 0) for state in State},
    }
