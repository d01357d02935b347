"""A training state on disk: `state.safetensors` (tensors by name) and `state.json` (counters)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treadle.errors import RunError

TENSORS, COUNTERS = "state.safetensors", "state.json"


def write(path: Path, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
    """Into a new directory; whoever calls it renames the directory when it is whole."""
    path.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / TENSORS)
    (path / COUNTERS).write_text(json.dumps(dict(counters)))


def read_counters(path: Path, expected: Mapping[str, int]) -> dict[str, int]:
    """Counters with the names of `expected`; raises `RunError` naming the file."""
    try:
        counters: Any = json.loads((path / COUNTERS).read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"checkpoint file {path / COUNTERS} is missing or damaged: {error}; use an older one") from error
    if not isinstance(counters, dict) or counters.keys() != expected.keys():
        raise RunError(f"checkpoint file {path / COUNTERS} must have exactly the keys {sorted(expected)}")
    return counters


@torch.no_grad()
def read_tensors(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Overwrite `targets`; raises `RunError` naming the file before anything is changed where it does not fit."""
    file = path / TENSORS
    try:
        with safe_open(file, "pt") as stored:
            names = list(stored.keys())
            found = {name: (_shape(stored, name), stored.get_slice(name).get_dtype()) for name in names}
            wanted = {name: (tuple(t.shape), _DTYPES[t.dtype]) for name, t in targets.items()}
            if found != wanted:
                culprit = min(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
                raise RunError(
                    f"checkpoint file {file} does not fit this model: '{culprit}' is {found.get(culprit, 'missing')} "
                    f"there and {wanted.get(culprit, 'missing')} here; train with the model and dtype it was saved from"
                )
            for name, target in targets.items():
                target.copy_(stored.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise RunError(f"checkpoint file {file} is missing or damaged: {error}; use an older checkpoint") from error


def _shape(stored: Any, name: str) -> tuple[int, ...]:
    return tuple(stored.get_slice(name).get_shape())


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
