"""Weights through safetensors files in a directory that both sides see, on this machine or a network.

Staged, the files of a publish stay until the next one: any tool can read them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from treadle.errors import WeightSyncError
from treadle.weights.transports import mailbox

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.weights.stream import Address, Bucket


class Sender:
    """Writes each bucket as one file; `address.place` is the directory."""

    host = True

    def __init__(self) -> None:
        self._box: mailbox.Outbox | None = None
        self._place: str | None = None

    def begin(self, address: Address) -> None:
        if self._box is not None:
            self._box.remove()
        if self._place != address.place:
            self.close()
        self._address, self._count, self._place = address, 0, address.place
        self._box = mailbox.Outbox(address)

    def put(self, bucket: Bucket) -> None:
        assert self._box is not None
        path = self._file(self._count)
        try:
            if not self._address.staged and self._count > 0:
                self._box.wait_taken(self._count - 1)
                self._file(self._count - 1).unlink()
            save_file(_apart(bucket), path)
            size = path.stat().st_size
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"{path}: weights could not be written: {error}. Make room, or set rollout.weights.directory"
            ) from error
        # A file orders its tensors by dtype and name; the stream's order is the note's.
        self._box.post(self._count, {"file": path.name, "bytes": size, "tensors": list(bucket)})
        self._count += 1

    def end(self) -> None:
        assert self._box is not None
        self._box.end(self._count)

    def close(self) -> None:
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def _file(self, index: int) -> Path:
        assert self._box is not None
        return self._box.path / f"{index:06d}.safetensors"


class Receiver:
    """Reads the files."""

    def __init__(self, who: str) -> None:
        self._who = who

    def buckets(self, address: Address) -> Iterator[Bucket]:
        for index, note in mailbox.notes(address):
            bucket = _read(mailbox.folder(address) / note["file"], note)
            if not address.staged:
                bucket = {name: tensor.clone() for name, tensor in bucket.items()}
                mailbox.take(address, self._who, index)
            yield bucket
            del bucket  # not held while the next one is waited for

    def close(self) -> None: ...


def _apart(bucket: Bucket) -> dict[str, Tensor]:
    """Each tensor in memory of its own, for a file refuses tensors that share it, as tied ones do."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in bucket.items():
        body = tensor.detach().cpu().contiguous()
        memory = body.untyped_storage().data_ptr()
        found[name] = body.clone() if memory in seen else body
        seen.add(memory)
    return found


def _read(path: Path, note: Mapping[str, Any]) -> Bucket:
    try:
        if (size := path.stat().st_size) != note["bytes"]:
            raise WeightSyncError(f"{path}: {size} bytes of weights, {note['bytes']} were written")
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in note["tensors"]}
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path}: weights cannot be read: {error}") from error
