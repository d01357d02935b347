"""The one hook into Hugging Face attention: a plan object passed with the call decides who attends to whom.

The training engine passes a plan over packed sequences, the embedded rollout engine one over its KV cache; both drive
the same, shared model object. Suffixes: H query heads · K key/value heads · S positions · D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from treadle.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

NAME = "treadle"
ROTARY_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
"""`model_type` of models with RMS norms before attention and before a SiLU-gated MLP, and rotary positions, for which
there are passes of our own."""


class AttentionPlan(Protocol):
    """Who attends to whom in one forward pass."""

    longest: int
    """Positions that the longest sequence has after this pass."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q [1, H, S, D] and k, v [1, K, S, D], rotated; the result [1, H, S, D]."""
        ...


def attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer."""
    if plan is None:
        raise ModelError(f"attention '{NAME}' was called without a plan; such a model is run by an engine")
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{type(module).__name__} caps its scores or has attention sinks, which are not supported yet")
    if sliding_window is not None and plan.longest > sliding_window:
        raise ModelError(
            f"a sequence of {plan.longest} tokens is longer than the sliding window of {sliding_window} that "
            f"{type(module).__name__} uses; shorten sampling.max_tokens or data.max_prompt_tokens"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    return plan(layer, query, key, value, scale).transpose(1, 2), None


def sliding_window(settings: Mapping[str, Any]) -> int | None:
    """Positions that the layers of a model look back at most, by its configuration; None: all that there are."""
    slides = "sliding_attention" in (settings.get("layer_types") or ["sliding_attention"])
    return settings.get("sliding_window") if slides else None


def install(model: Any) -> None:
    """Make a Hugging Face causal LM attend through plans; refuses an architecture that does not offer the hook."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not getattr(type(model), "_supports_attention_backend", False):
        raise ModelError(f"{type(model).__name__} does not take its attention from outside, so it cannot run packed")
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    model.set_attn_implementation(NAME)
