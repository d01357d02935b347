"""One request on its way through the engine: what was asked, what has been sampled so far, who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from treadle.rollout.requests import Decoder, spells_stop
from treadle.types import Completion, TokenRequest

PrefixKey = tuple[str, bytes]
Heard = Callable[[int, float, str | None], None]
"""Told of a token as it is sampled: id, log-prob, and with the last one why it ends."""


@dataclass(eq=False, slots=True)
class Generation:
    """Sampled tokens are kept here, not in the cache: stopping, loading or sleeping never loses one.

    `done` is resolved with the completion; the caller's cancellation cancels it, which is how its row becomes free.
    """

    request: TokenRequest
    order: int  # of arrival
    done: asyncio.Future[Completion]
    heard: Heard | None = None
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
        params, finish = self.request.params, None
        if token in params.stop_token_ids or (
            params.stop and decoder is not None and spells_stop(self.token_C, params.stop, decoder)
        ):
            finish = "stop"
        elif len(self.token_C) >= params.max_tokens:
            finish = "length"
        if self.heard is not None:
            self.heard(token, logprob, finish)
        if finish is not None:
            self._finish(finish)

    def _finish(self, finish: str) -> None:
        self.done.set_result(
            Completion(
                np.array(self.token_C, np.int64),
                np.array(self.logprob_C, np.float32),
                np.array(self.version_C, np.int32),
                finish,
            )
        )
