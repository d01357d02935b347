"""What rollout engines have in common: which requests can be served, and when a stop string has been spelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from treadle.errors import RolloutError
from treadle.types import TokenRequest

_SPARE_TOKENS = 4  # at the start of a window a character may be cut, or a leading space dropped


class Decoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


def spells_stop(token_C: Sequence[int], stop: Sequence[str], decoder: Decoder) -> bool:
    """Whether the last token completed a stop string. It is looked for in what this request sampled, special tokens
    spelled out. Every token spells at least a byte, so a string of B bytes lies within the last B tokens."""
    window = max(len(s.encode()) for s in stop) + _SPARE_TOKENS
    text = decoder.decode(list(token_C[-window:]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(s in text for s in stop)


def check(request: TokenRequest, vocabulary: int, context: int, decoder: Decoder | None) -> None:
    """Refuse a request that cannot be served as it stands; raises `RolloutError` naming the sample and the value."""
    params, prompt = request.params, request.token_ids
    wrong: str | None = None
    if not prompt:
        wrong = "its prompt is empty; a model needs at least one token to start from"
    elif not 0 <= min(prompt) <= max(prompt) < vocabulary:
        bad = next(t for t in prompt if not 0 <= t < vocabulary)
        wrong = (
            f"prompt token {bad} is outside the model's vocabulary (0 to {vocabulary - 1}); which tokenizer made it?"
        )
    elif not 0 <= params.temperature < float("inf"):
        wrong = f"temperature {params.temperature} must be 0 (greedy) or more"
    elif not 0 < params.top_p <= 1:
        wrong = f"top_p {params.top_p} must be above 0 and at most 1 (off)"
    elif params.top_k < 0:
        wrong = f"top_k {params.top_k} must be 0 (off) or more"
    elif params.max_tokens < 1:
        wrong = f"max_tokens {params.max_tokens} must be at least 1"
    elif len(prompt) + params.max_tokens > context:
        wrong = (
            f"prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} do not fit the model's context of "
            f"{context}; shorten one of them"
        )
    elif not (0 <= request.noise < 2**64 and 0 <= request.position < 2**63):
        wrong = f"noise {request.noise} must have 64 bits and position {request.position} must be 0 or more"
    elif "" in params.stop:
        wrong = "an empty stop string would stop everywhere"
    elif params.stop and decoder is None:
        wrong = f"stop strings {params.stop} need a tokenizer, and this engine was made without one"
    if wrong is not None:
        raise RolloutError(f"sample '{request.id}': {wrong}")
