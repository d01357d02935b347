"""Hugging Face causal LMs in and out: load a model, load a tokenizer, write a directory that loads again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from treadle.attention import install
from treadle.errors import ModelError

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def load_model(path: str, dtype: str) -> Any:
    """A causal LM from a local directory or a hub name, in evaluation mode, without dropout, attending through plans.

    Dropout is set to zero whatever the configuration says: with it the KL of two equal policies is not zero.
    Raises `ModelError` naming the path when it is missing, damaged, incomplete or not a causal LM.
    """
    directory = find(path)
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ModelError(f"model '{path}': its config.json cannot be used: {_first_line(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"model '{path}' is a {config.model_type}, not a causal language model; choose one that is")
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"model '{path}': its weights cannot be loaded, download or export it again: {_first_line(error)}"
        ) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model '{path}' lacks {len(missing)} tensors of a {type(model).__name__}, '{missing[0]}' first; "
            "is it the export of a causal language model?"
        )
    install(model)
    return model.eval()


def context_length(path: str) -> int | None:
    """Positions that the model was built for; None if its configuration does not say."""
    settings = AutoConfig.from_pretrained(find(path)).get_text_config().to_dict()
    return settings.get("max_position_embeddings")


def fastest_dtype() -> Literal["bfloat16", "float32"]:
    """bfloat16 on a GPU and on a CPU with instructions for its products; elsewhere float32 is several times faster."""
    if torch.cuda.is_available():
        return "bfloat16"
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text().split() if cpu.exists() else []
    return "bfloat16" if {"amx_bf16", "avx512_bf16"} & set(flags) else "float32"


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a local directory or a hub name; raises `ModelError` naming the path."""
    directory = find(path)
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model '{path}' has no tokenizer that can be loaded; tokenizer.json and tokenizer_config.json belong "
            f"beside its config.json: {_first_line(error)}"
        ) from error


def save_pretrained(model: Any, path: Path, tokenizer: Any) -> None:
    """Write a Hugging Face directory: weights in compute dtype (tied ones once), configuration, tokenizer."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def find(path: str) -> str:
    """The local directory of a model: itself, or the hub's files, downloaded unless already here.

    A name that is neither fails at once; transformers itself would try for half a minute.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(f"model directory '{path}' has no config.json; it must be a Hugging Face model directory")
        return str(directory)
    if directory.exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
        raise ModelError(f"no model directory '{path}'; give a directory with a config.json, or a hub name as org/name")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, allow_patterns=FILES, etag_timeout=3)
    except HFValidationError as error:
        raise ModelError(f"no model directory '{path}', and it is not a hub name either") from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"no model directory '{path}', and the hub does not serve a model of that name: {_first_line(error)}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"no model directory '{path}', no downloaded model of that name, and the hub cannot be reached; "
            "check the path, or the network"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
