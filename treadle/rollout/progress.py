"""One request on its way through a pool: what has been sampled so far, wherever that was, and what is left to ask.

Suffixes: C tokens sampled by the request.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import RolloutError
from treadle.rollout.requests import Decoder, spells_stop
from treadle.types import Completion, TokenRequest

if TYPE_CHECKING:
    from treadle.rollout.replicas import Member, Piece


@dataclass(eq=False)
class Progress:
    """Tokens are kept here as they come: a replica that is lost takes none with it."""

    request: TokenRequest
    order: int  # of arrival
    vocabulary: int
    only: Member | None = None  # the one replica that may serve it; None: any
    token_C: list[int] = field(default_factory=list)
    logprob_C: list[float] = field(default_factory=list)
    version_C: list[int] = field(default_factory=list)
    finish: str | None = None
    place: asyncio.Future[Member] | None = None  # while it waits: resolved with the replica that serves it next
    _begun: int = 0  # tokens before the replica that serves it now

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first."""
        return (self.request.priority, self.order)

    @property
    def cost(self) -> int:
        """Tokens that it brings, and may bring yet."""
        return len(self.request.token_ids) + self.request.params.max_tokens

    @property
    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            np.array(self.token_C, np.int64),
            np.array(self.logprob_C, np.float32),
            np.array(self.version_C, np.int32),
            self.finish,
        )

    def continues(self) -> None:
        """Another replica serves it from here on."""
        self._begun = len(self.token_C)

    def rest(self) -> TokenRequest:
        """What is left to ask, from the tokens that there are."""
        request, done = self.request, len(self.token_C)
        params = replace(request.params, max_tokens=request.params.max_tokens - done)
        tokens = (*request.token_ids, *self.token_C)
        return replace(request, token_ids=tokens, params=params, position=request.position + done)

    def take(self, piece: Piece, version: int, decoder: Decoder | None) -> int:
        """Take what an engine of this version sampled, up to what ends it; returns how many tokens that were.

        Raises `RolloutError` for what cannot have been sampled, and for an engine that ends before its time.
        """
        before = len(self.token_C)
        if len(piece.tokens) != len(piece.logprobs):
            raise self._wrong(f"the engine sent {len(piece.tokens)} tokens and {len(piece.logprobs)} log-probs")
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            if not 0 <= token < self.vocabulary:
                raise self._wrong(f"the engine sent token {token}, outside the vocabulary (0 to {self.vocabulary - 1})")
            if not math.isfinite(logprob):
                raise self._wrong(f"the log-prob of token {token} is not finite; are the weights still numbers?")
            self.token_C.append(token)
            self.logprob_C.append(logprob)
            self.version_C.append(version)
            if self._stops(token, decoder):
                self.finish = "stop"
            elif len(self.token_C) >= self.request.params.max_tokens:
                self.finish = "length"
            if self.finish is not None:
                break
        own = len(self.token_C) - self._begun
        if piece.versions is not None and len(piece.versions) >= own:
            self.version_C[self._begun :] = piece.versions[:own]  # the engine's own account
        if self.finish is None and piece.finish is not None:
            raise self._wrong(f"the engine ended it before its time ({piece.finish})")
        return len(self.token_C) - before

    def _wrong(self, what: str) -> RolloutError:
        return RolloutError(f"sample '{self.request.id}': {what}")

    def _stops(self, token: int, decoder: Decoder | None) -> bool:
        params = self.request.params
        return token in params.stop_token_ids or bool(
            params.stop and decoder is not None and spells_stop(self.token_C, params.stop, decoder)
        )


class Queue:
    """Requests that wait for a replica, in order of rank."""

    def __init__(self) -> None:
        self._waiting: list[Progress] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Progress]:
        """Those that still wait when their turn comes; they may be placed meanwhile."""
        return (p for p in list(self._waiting) if p.place is not None and not p.place.done())

    def join(self, progress: Progress) -> asyncio.Future[Member]:
        """Wait from here on, until `leave`, for the replica that the future gets, or an error."""
        progress.place = asyncio.get_running_loop().create_future()
        bisect.insort(self._waiting, progress, key=lambda p: p.rank)
        return progress.place

    def leave(self, progress: Progress) -> None:
        if progress in self._waiting:
            self._waiting.remove(progress)

    def place(self, progress: Progress, member: Member) -> None:
        """That replica serves it."""
        assert progress.place is not None
        progress.place.set_result(member)

    def fail(self, error: RolloutError, only: Member | None = None) -> None:
        """Give up on all, or on those that wait for one replica."""
        for progress in self:
            if (only is None or progress.only is only) and progress.place is not None:
                progress.place.set_exception(error)


def seed(request: TokenRequest) -> int:
    """What an engine with a generator for each request seeds it with: a function of noise and position alone."""
    digest = hashlib.blake2b(f"{request.noise}/{request.position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
