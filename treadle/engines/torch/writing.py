"""A model without its weights, for a controller that never holds them; and a stream of weights as a model on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from treadle.engines.torch.model import described, find, load_tokenizer
from treadle.errors import ModelError
from treadle.weights.stream import cut

FILE_BYTES = 5_000_000_000


def skeleton(path: str, scores: bool = False) -> Any:
    """The causal LM (or, with `scores`, the reward model) of a directory or hub name on the meta device, with its
    settings for generation."""
    model = described(path, "float32", scores)
    directory = find(path)
    if (Path(directory) / "generation_config.json").exists():
        try:
            model.generation_config = GenerationConfig.from_pretrained(directory)
        except Exception as error:
            raise ModelError(f"model '{path}': its generation_config.json cannot be used: {error!s:.300}") from error
    model.name_or_path = path
    return model


def write_model(tensors: Iterable[tuple[str, Tensor]], path: Path, source: str) -> None:
    """Write a new Hugging Face directory: these tensors, a file of them in memory at a time; everything else as the
    model in `source` has it."""
    path.mkdir(parents=True)
    directory = find(source)
    files: list[tuple[dict[str, int], int]] = []
    for number, part in enumerate(cut(tensors, FILE_BYTES)):
        dtype = next(iter(part.values())).dtype
        save_file({n: t.detach().cpu().contiguous() for n, t in part.items()}, path / f"{number}.safetensors", _META)
        files.append((dict.fromkeys(part, number), sum(t.nbytes for t in part.values())))
    if not files:
        raise ModelError(f"model '{source}': no weights were exported")
    if len(files) == 1:
        (path / "0.safetensors").rename(path / "model.safetensors")
    else:
        names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
        for number, name in enumerate(names):
            (path / f"{number}.safetensors").rename(path / name)
        where = {tensor: names[number] for numbers, _ in files for tensor, number in numbers.items()}
        index = {"metadata": {"total_size": sum(size for _, size in files)}, "weight_map": where}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = AutoConfig.from_pretrained(directory)
    config.dtype = dtype
    config.save_pretrained(path)
    if (Path(directory) / "generation_config.json").exists():
        GenerationConfig.from_pretrained(directory).save_pretrained(path)
    load_tokenizer(source).save_pretrained(path)


_META = {"format": "pt"}
