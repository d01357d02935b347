"""Notes between a sender and its receivers through a directory that all of them see: atomic renames, no server.

<place>/<session>/000000.json          one bucket: where its tensors lie
                  000000.taken.<who>   that receiver needs it no more
                  end.json             how many buckets there were
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import WeightSyncError

if TYPE_CHECKING:
    from treadle.weights.stream import Address

_PAUSE = 0.0005  # seconds between two looks; short beside what a bucket takes
_END = "end.json"


class Outbox:
    """The sender's side of one session."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.path = folder(address)
        shutil.rmtree(self.path, ignore_errors=True)
        with _writing(self.path):
            self.path.mkdir(parents=True)

    def post(self, index: int, note: dict[str, Any]) -> None:
        write(self.path / f"{index:06d}.json", {"bucket": index} | note)

    def end(self, count: int) -> None:
        write(self.path / _END, {"buckets": count})

    def wait_taken(self, index: int) -> None:
        """Until every receiver has taken the bucket."""
        deadline = time.monotonic() + self._address.timeout
        missing = set(self._address.receivers)
        while missing := {who for who in missing if not (self.path / f"{index:06d}.taken.{who}").exists()}:
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"{', '.join(sorted(missing))} did not take bucket {index} of the weights within "
                    f"{self._address.timeout:g} s"
                )
            time.sleep(_PAUSE)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class PostingSender:
    """What senders that post notes have in common; `address.place` is the directory."""

    def __init__(self) -> None:
        self._outbox: Outbox | None = None
        self._place: str | None = None
        self._count = 0  # buckets of this session so far

    def begin(self, address: Address) -> None:
        if self._outbox is not None:
            self._outbox.remove()
        if self._place != address.place:
            self.close()
        self._address, self._place, self._count = address, address.place, 0
        self._outbox = Outbox(address)

    def end(self) -> None:
        self._box.end(self._count)

    def close(self) -> None:
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    @property
    def _box(self) -> Outbox:
        assert self._outbox is not None, "begin first"
        return self._outbox

    def _post(self, note: dict[str, Any]) -> None:
        """A bucket lies where `note` says."""
        self._box.post(self._count, note)
        self._count += 1


def notes(address: Address) -> Iterator[tuple[int, dict[str, Any]]]:
    """A receiver's side: every bucket's note as it comes."""
    path, index = folder(address), 0
    deadline = time.monotonic() + address.timeout
    while True:
        note = read(path / f"{index:06d}.json")
        if note is None:
            end = read(path / _END)
            if end is not None:
                if end["buckets"] == index:
                    return
                if end["buckets"] < index or read(path / f"{index:06d}.json") is None:
                    raise WeightSyncError(f"{end['buckets']} buckets of weights were sent, bucket {index} is not there")
                continue
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"bucket {index} of the weights did not arrive within {address.timeout:g} s; is the trainer alive?"
                )
            time.sleep(_PAUSE)
            continue
        if note["bucket"] != index:
            raise WeightSyncError(f"bucket {note['bucket']} of the weights arrived in the place of bucket {index}")
        yield index, note
        index += 1
        deadline = time.monotonic() + address.timeout


def take(address: Address, who: str, index: int) -> None:
    """Say that this receiver needs the bucket no more."""
    (folder(address) / f"{index:06d}.taken.{who}").touch()


def folder(address: Address) -> Path:
    return Path(address.place) / f"{address.session:08d}"


def write(path: Path, note: dict[str, Any]) -> None:
    aside = path.with_suffix(".partial")
    with _writing(path):
        aside.write_text(json.dumps(note))
        aside.rename(path)


def read(path: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise WeightSyncError(f"{path}: no note about weights: {error}") from error
    if not isinstance(note, dict):
        raise WeightSyncError(f"{path}: no note about weights: {note!r}")
    return note


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightSyncError(
            f"{path}: no place for weights: {error}. Make room, or see rollout.weights.transport and .directory"
        ) from error
