"""Weights through safetensors files in a directory that both sides see, on this machine or a network.

Staged, the files of a publish stay until the next one: any tool can read them.
"""

from __future__ import annotations

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


class Sender(mailbox.PostingSender):
    """Writes each bucket as one file."""

    host = True

    def put(self, bucket: Bucket) -> None:
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
        self._post({"file": path.name, "bytes": size, "tensors": list(bucket)})

    def _file(self, index: int) -> Path:
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
