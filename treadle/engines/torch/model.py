"""Hugging Face causal LMs and reward models in and out: load a model, load a tokenizer, find a model's tensors."""

from __future__ import annotations

import itertools
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils import logging

from treadle.attention import install, sliding_window
from treadle.engines.torch.mesh import together
from treadle.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_SCORES = "ForSequenceClassification"


def load_model(path: str, dtype: str, scores: bool = False) -> Any:
    """A causal LM from a directory or a hub name, on the GPU if there is one, attending through plans, without dropout.

    With `scores` a reward model: a `…ForSequenceClassification` of a decoder, with one score. Dropout is set to zero
    whatever the configuration says: with it the KL of two equal policies is not zero. Raises `ModelError` naming the
    path when it is missing, damaged, incomplete or not of that kind.
    """
    model = _read(path, dtype, scores)
    if torch.cuda.is_available():  # not run by the tests
        model.cuda()
    return model


def load_sharded(path: str, dtype: str, mesh: DeviceMesh, scores: bool = False) -> Any:
    """A model for `TorchEngine(..., mesh=mesh)`: rank 0's is that of `load_model`, on the CPU; the others' have no
    weights until the engine spreads them.

    A collective: every rank calls it, and a failure of one, as in `load_model`, is raised by all.
    """

    def load() -> Any:
        return _read(path, dtype, scores) if dist.get_rank() == 0 else described(path, dtype, scores)

    return together(load, mesh)


def has_score(path: str) -> bool:
    """Whether this is a reward model: its last layer gives scores in place of logits."""
    return _scores(_configuration(path)[1])


def described(path: str, dtype: str, scores: bool = False) -> Any:
    """The model of `load_model` without its weights, on the meta device."""
    return _described(path, _checked(path, scores)[1], dtype, scores)


def _read(path: str, dtype: str, scores: bool) -> Any:
    directory, config = _checked(path, scores)
    logging.disable_progress_bar()
    # A configuration that describes no model shows before the weights are read.
    _described(path, config, dtype, scores)
    try:
        loaded: Any = _kind(scores).from_pretrained(
            directory, config=config, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except Exception as error:
        raise ModelError(
            f"model '{path}': its weights or generation_config.json cannot be loaded, download or export it again: "
            f"{_said(error)}"
        ) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model '{path}' lacks {len(missing)} tensors of a {type(model).__name__}, '{missing[0]}' first; "
            f"is it the export of a {'reward' if scores else 'causal language'} model?"
        )
    install(model)
    return model.eval()


def _scores(config: Any) -> bool:
    return any(str(name).endswith(_SCORES) for name in config.architectures or ())


def _kind(scores: bool) -> Any:
    return AutoModelForSequenceClassification if scores else AutoModelForCausalLM


def _checked(path: str, scores: bool) -> tuple[str, Any]:
    """The directory and the configuration of a causal LM or a reward model, without dropout."""
    directory, config = _configuration(path)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"model '{path}' is a {config.model_type}, not a causal language model; choose one that is")
    if scores and (not _scores(config) or config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES):
        raise ModelError(
            f"model '{path}' is a {', '.join(config.architectures or [config.model_type])}, which gives no score; "
            f"choose a reward model, a …{_SCORES} of a causal language model"
        )
    if scores and config.num_labels != 1:
        raise ModelError(f"model '{path}' gives {config.num_labels} scores; a reward model must give one (num_labels)")
    if not scores and _scores(config):
        raise ModelError(
            f"model '{path}' is a {config.architectures[0]}, a reward model that generates nothing; choose a causal "
            "language model here (this one can be reward_model.model, or critic.model)"
        )
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    return directory, config


def _described(path: str, config: Any, dtype: str, scores: bool) -> Any:
    """The model that a configuration describes, without weights."""
    try:
        with torch.device("meta"):
            model = _kind(scores).from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:
        raise _unusable(path, error) from error
    if scores and not isinstance(dict(model.named_children()).get("score"), nn.Linear):
        raise ModelError(
            f"model '{path}' is a {type(model).__name__}, whose score is not made by one matrix; choose a reward model "
            "that is a decoder with a linear score"
        )
    install(model)
    return model.eval()


def context_length(path: str) -> int | None:
    """Positions that the model was built for; None if its configuration does not say."""
    return getattr(_configuration(path)[1].get_text_config(), "max_position_embeddings", None)


def reach(path: str) -> tuple[int | None, int | None]:
    """Tokens that the model can look at together, and how many different ones it knows; None where its configuration
    does not say."""
    config = _configuration(path)[1].get_text_config()
    # Some architectures call them otherwise, as attributes they all have these names.
    positions, vocabulary = (getattr(config, name, None) for name in ("max_position_embeddings", "vocab_size"))
    limits = [n for n in (positions, sliding_window(config.to_dict())) if n is not None]
    return min(limits, default=None), vocabulary


def fastest_dtype() -> Literal["bfloat16", "float32"]:
    """bfloat16 on a GPU and on a CPU with instructions for its products; elsewhere float32 is several times faster."""
    if torch.cuda.is_available():
        return "bfloat16"
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text().split() if cpu.exists() else []
    return "bfloat16" if {"amx_bf16", "avx512_bf16"} & set(flags) else "float32"


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a local directory or a hub name; raises `ModelError` naming the path."""
    directory, _ = _configuration(path)
    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        raise ModelError(
            f"model '{path}' has no tokenizer that can be loaded; tokenizer.json and tokenizer_config.json belong "
            f"beside its config.json: {_said(error)}"
        ) from error


def check_vocabulary(policy: Any, other: Any, tokenizer: Any, role: str) -> None:
    """Raises `ModelError` naming both models if the one of `role` has no embedding for a token the policy can use."""
    needed = min(_vocabulary(policy), max(tokenizer.get_vocab().values()) + 1)  # rows beyond them are padding
    if (known := _vocabulary(other)) < needed:
        raise ModelError(
            f"the {role} '{other.name_or_path}' has a vocabulary of {known} tokens, the policy '{policy.name_or_path}' "
            f"uses {needed}; choose a {role} with the policy's vocabulary"
        )


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer: what the model's generation configuration says, and the tokenizer's.

    Raises `ModelError` naming the model if the configuration names what is no token of it.
    """
    configured = model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    known = _vocabulary(model)
    for end in ends:
        if end is not None and not (isinstance(end, int) and 0 <= end < known):
            raise ModelError(
                f"model '{model.name_or_path}': eos_token_id in its generation_config.json is {end!r}; allowed: "
                f"a token id from 0 to {known - 1}, or a list of them"
            )
    return tuple(sorted({*ends, tokenizer.eos_token_id} - {None}))


def own_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name in the model, tied ones once; they share the model's memory."""
    seen: set[Tensor] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor not in seen:
            seen.add(tensor)
            yield name, tensor.detach()


def checkpoint_tensors(
    model: Any, of: Callable[[Tensor], Tensor | None] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name in a Hugging Face checkpoint, a layer at a time, tied ones once.

    `of` makes something else of the model's tensors first, or None of what is not to be told.
    """
    for _, layer in itertools.groupby(own_tensors(model), key=lambda named: _layer(named[0])):
        found = [(name, of(tensor)) for name, tensor in layer]
        if told := {name: tensor for name, tensor in found if tensor is not None}:
            yield from revert_weight_conversion(model, told).items()


def places(model: Any) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint lies in the model: what is written to it is loaded, though the model may hold
    it as a part of another, as experts are stacked. Raises `ModelError` for one that has no place of its own."""
    found: dict[str, Tensor] = {}
    for _, layer in itertools.groupby(own_tensors(model), key=lambda named: _layer(named[0])):
        own = dict(layer)
        told = revert_weight_conversion(model, own)
        if told.keys() == own.keys():
            found |= own
            continue
        numbered: dict[str, Tensor] = {}  # elements have numbers in the place of values: these tell where each one went
        begins: list[int] = [0]
        for name, tensor in own.items():
            numbered[name] = torch.arange(begins[-1], begins[-1] + tensor.numel()).view(tensor.shape)
            begins.append(begins[-1] + tensor.numel())
        for name, number in revert_weight_conversion(model, numbered).items():
            holder = list(own)[bisect_right(begins, int(number.flatten()[0])) - 1]
            view = _view(number, numbered[holder])
            if view is None or not own[holder].is_contiguous():
                raise ModelError(
                    f"{type(model).__name__} holds '{name}' of its checkpoint scattered in '{holder}', so it cannot be "
                    "loaded in place; use rollout.name=vllm, or controller.backend=local"
                )
            shape, strides, offset = view
            found[name] = own[holder].as_strided(shape, strides, own[holder].storage_offset() + offset)
    return found


def _view(number: Tensor, held: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Shape, strides and offset of the view of `held` that is `number`, if there is one. The numbers of `held` follow
    each other."""
    flat = number.flatten()
    first, last, begin = int(flat[0]), int(flat[-1]), int(held.flatten()[0])
    strides = [int(number.select(i, 1).flatten()[0]) - first if n > 1 else 1 for i, n in enumerate(number.shape)]
    if min(strides, default=1) < 1 or not begin <= first <= last < begin + held.numel():
        return None
    view = (tuple(number.shape), tuple(strides), first - begin)
    reach = sum((n - 1) * step for n, step in zip(number.shape, strides, strict=True))
    return view if first + reach == last and torch.equal(held.as_strided(*view), number) else None


def find(path: str) -> str:
    """The local directory of a model: itself, or the hub's files, downloaded unless already here.

    A name that is neither fails at once; transformers itself would try for half a minute.
    """
    directory = os.path.expanduser(path)
    if os.path.isdir(directory):  # False, where pathlib raises, for a name that no file can have
        if not os.path.isfile(os.path.join(directory, "config.json")):
            raise ModelError(f"model directory '{path}' has no config.json; it must be a Hugging Face model directory")
        return directory
    if os.path.exists(directory) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
        raise ModelError(f"no model directory '{path}'; give a directory with a config.json, or a hub name as org/name")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, allow_patterns=FILES, etag_timeout=3)
    except HFValidationError as error:
        raise ModelError(f"no model directory '{path}', and it is not a hub name either") from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"no model directory '{path}', and the hub does not serve a model of that name: {_said(error)}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"no model directory '{path}', no downloaded model of that name, and the hub cannot be reached; "
            "check the path, or the network"
        ) from error


def _configuration(path: str) -> tuple[str, Any]:
    """A model's directory and its configuration: read before anything else, for all else fails strangely without it."""
    directory = find(path)
    try:
        return directory, AutoConfig.from_pretrained(directory)
    except Exception as error:  # transformers lets through whatever a strange value causes, here and in the other loads
        raise _unusable(path, error) from error


def _unusable(path: str, error: Exception) -> ModelError:
    return ModelError(f"model '{path}': its config.json cannot be used: {_said(error)}")


def _layer(name: str) -> str:
    """What of a tensor's name says which layer it belongs to; empty outside of layers."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


def _vocabulary(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def _said(error: Exception) -> str:
    """What a library said, on one line."""
    return shorten(f"{type(error).__name__}: {error}", 300, placeholder=" …")
