"""One request on its way through the engine: what was asked, what has been sampled so far, who waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from treadle.errors import RolloutError
from treadle.types import Completion, TokenRequest

PrefixKey = tuple[str, bytes]
_SPARE_TOKENS = 4  # at the start of a window a character may be cut, or a leading space dropped


class Decoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


@dataclass(eq=False, slots=True)
class Generation:
    """Sampled tokens are kept here, not in the cache: stopping, loading or sleeping never loses one.

    `done` is resolved with the completion; the caller's cancellation cancels it, which is how its row becomes free.
    """

    request: TokenRequest
    order: int  # of arrival
    done: asyncio.Future[Completion]
    token_C: list[int] = field(default_factory=list)
    logprob_C: list[float] = field(default_factory=list)
    version_C: list[int] = field(default_factory=list)
    key: PrefixKey | None = field(init=False)  # of the prompt pass it shares; None: it shares none

    def __post_init__(self) -> None:
        tokens = np.asarray(self.request.token_ids, np.int64).tobytes()  # bytes remember their hash, tuples do not
        self.key = (self.request.prefix, tokens) if self.request.prefix else None

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first."""
        return (self.request.priority, self.order)

    @property
    def length(self) -> int:
        """Tokens so far, the prompt included."""
        return len(self.request.token_ids) + len(self.token_C)

    @property
    def position(self) -> int:
        """Position of the next token among all that its sample has sampled."""
        return self.request.position + len(self.token_C)

    def add(self, token: int, logprob: float, version: int, decoder: Decoder | None) -> None:
        """Take a sampled token; resolve `done` if it was the last one."""
        self.token_C.append(token)
        self.logprob_C.append(logprob)
        self.version_C.append(version)
        params = self.request.params
        if token in params.stop_token_ids or (params.stop and decoder is not None and self._spells_stop(decoder)):
            self._finish("stop")
        elif len(self.token_C) >= params.max_tokens:
            self._finish("length")

    def _spells_stop(self, decoder: Decoder) -> bool:
        """Whether the last token completed a stop string. It is looked for in what this request sampled, special
        tokens spelled out. Every token spells at least a byte, so a string of B bytes lies within the last B tokens."""
        window = max(len(s.encode()) for s in self.request.params.stop) + _SPARE_TOKENS
        text = decoder.decode(self.token_C[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(s in text for s in self.request.params.stop)

    def _finish(self, finish: str) -> None:
        self.done.set_result(
            Completion(
                np.array(self.token_C, np.int64),
                np.array(self.logprob_C, np.float32),
                np.array(self.version_C, np.int32),
                finish,
            )
        )


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
