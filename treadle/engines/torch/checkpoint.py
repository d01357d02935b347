"""A training state on disk: `state.json` (counters), and tensors by name.

An engine that is alone writes them as `state.safetensors`; sharded ones, each rank its own parts, in the format of
torch.distributed.checkpoint: `.metadata` and `*.distcp`. Engines of both kinds read both, however many ranks wrote.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

from treadle.engines.torch.mesh import together
from treadle.engines.torch.sharding import local, rows_here
from treadle.errors import RunError

TENSORS, COUNTERS, INDEX = "state.safetensors", "state.json", ".metadata"


def begin(path: Path, counters: Mapping[str, int]) -> None:
    """Make a new directory; whoever asks for it renames it when it is whole."""
    path.mkdir(parents=True)
    (path / COUNTERS).write_text(json.dumps(dict(counters)))


def staged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, which training no longer changes."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    return cast(dict[str, Tensor], DefaultStager(options).stage(dict(tensors)))


def write(path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Into a directory that has begun. With a group all its ranks write, and one's failure is a `RunError` on all."""
    if group is None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / TENSORS)
        return
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(path), process_group=group)
    except CheckpointException as error:  # no Exception, but a BaseException
        raise RunError(f"checkpoint {path} cannot be written: {_first(error)}") from error


def read_counters(path: Path, expected: Mapping[str, int]) -> dict[str, int]:
    """Counters with the names of `expected`; raises `RunError` naming the file."""
    try:
        counters: Any = json.loads((path / COUNTERS).read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"checkpoint file {path / COUNTERS} is missing or damaged: {error}; use an older one") from error
    if not isinstance(counters, dict) or counters.keys() != expected.keys():
        raise RunError(f"checkpoint file {path / COUNTERS} must have exactly the keys {sorted(expected)}")
    return counters


def read_tensors(path: Path, targets: Mapping[str, Tensor], mesh: DeviceMesh | None) -> None:
    """Overwrite `targets`; raises `RunError` naming the file before anything is changed where it does not fit.

    On a mesh every rank calls it with its parts, and a failure of one is raised by all.
    """
    if (path / TENSORS).exists() or not list(path.glob("*.distcp")):
        together(lambda: _read_whole(path / TENSORS, targets), mesh)
        return
    together(lambda: _check_parts(path, targets), mesh)
    try:
        with warnings.catch_warnings():  # an engine that is alone means it
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(targets), storage_reader=FileSystemReader(path), no_dist=mesh is None)
    except CheckpointException as error:
        raise RunError(f"checkpoint {path} is damaged: {_first(error)}; use an older checkpoint") from error


@torch.no_grad()
def _read_whole(file: Path, targets: Mapping[str, Tensor]) -> None:
    try:
        with safe_open(file, "pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            _check_fit(file, {n: (tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}, targets)
            for name, target in targets.items():
                found = stored.get_tensor(name) if target.ndim == 0 else slices[name][rows_here(target)]
                local(target).copy_(found)
    except (OSError, SafetensorError) as error:
        raise RunError(f"checkpoint file {file} is missing or damaged: {error}; use an older checkpoint") from error


def _check_parts(path: Path, targets: Mapping[str, Tensor]) -> None:
    """The files of all ranks are there, as long as they were written, and have what is wanted."""
    try:
        index = FileSystemReader(path).read_metadata()
    except Exception as error:  # a pickle, which fails in many ways
        text = f"{type(error).__name__}: {error}"
        raise RunError(f"checkpoint file {path / INDEX} is missing or damaged: {text}; use an older one") from error
    for part in index.storage_data.values():
        file = path / part.relative_path
        size = file.stat().st_size if file.exists() else 0
        if size < part.offset + part.length:
            raise RunError(
                f"checkpoint file {file} is missing or damaged: it has {size} bytes where {part.offset + part.length} "
                "were written; use an older checkpoint"
            )
    stored: Any = index.state_dict_metadata
    found = {name: (tuple(entry.size), _DTYPES[entry.properties.dtype]) for name, entry in stored.items()}
    _check_fit(path / INDEX, found, targets)


def _check_fit(file: Path, found: Mapping[str, tuple[tuple[int, ...], str]], targets: Mapping[str, Tensor]) -> None:
    wanted = {name: (tuple(t.shape), _DTYPES[t.dtype]) for name, t in targets.items()}
    if found != wanted:
        culprit = min(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
        raise RunError(
            f"checkpoint file {file} does not fit this model: '{culprit}' is {found.get(culprit, 'missing')} "
            f"there and {wanted.get(culprit, 'missing')} here; train with the model and dtype it was saved from"
        )


def _first(error: CheckpointException) -> str:
    """What went wrong on the first rank where something did."""
    rank, (cause, _) = min(error.failures.items())
    return shorten(f"{type(cause).__name__}: {cause}", 200, placeholder=" …") + f" (on rank {rank})"


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
