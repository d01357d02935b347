"""One prompt, one answer."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from treadle.types import Ended, Kind, Provenance, SamplingParams, TokenRequest, Trajectory, noise_key

if TYPE_CHECKING:
    from treadle.handles import Generator
    from treadle.types import Completion, Request

_FIRST, _USUAL = 0, 1  # evaluation goes before training


class Decoder(Protocol):
    """The part of a tokenizer that makes text for people and rewards."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class SingleTurn:
    """The policy answers once; what it sampled is the trajectory. Its messages are its own: a reward that changes them
    changes no other sample's."""

    def __init__(self, decoder: Decoder, sampling: SamplingParams, seed: int) -> None:
        self._decoder = decoder
        self._sampling = sampling
        self._seed = seed

    async def __call__(self, request: Request, sample_id: str, rollout: Generator) -> list[Trajectory]:
        params = replace(self._sampling, temperature=0.0) if request.greedy else self._sampling
        completion = await rollout.generate(
            TokenRequest(
                id=sample_id,
                token_ids=request.prompt.token_ids,
                params=params,
                noise=noise_key(self._seed, sample_id),
                prefix=sample_id.rpartition(".")[0],
                priority=_FIRST if request.kind is Kind.EVALUATION else _USUAL,
            )
        )
        return [self._trajectory(request, params, completion)]

    def _trajectory(self, request: Request, params: SamplingParams, completion: Completion) -> Trajectory:
        prompt = request.prompt
        before, sampled = len(prompt.token_ids), len(completion.token_C)
        text = self._decoder.decode(completion.token_C.tolist(), skip_special_tokens=True)
        return Trajectory(
            prompt=prompt,
            token_T=np.concatenate([np.asarray(prompt.token_ids, np.int64), completion.token_C]),
            provenance_T=np.repeat(np.array([Provenance.PROMPT, Provenance.SAMPLED], np.uint8), [before, sampled]),
            logprob_T=np.concatenate([np.full(before, np.nan, np.float32), completion.logprob_C]),
            version_T=np.concatenate([np.full(before, -1, np.int32), completion.version_C]),
            turn_ends=(before + sampled - 1,) if sampled else (),
            ended=Ended.TERMINATED if completion.finish == "stop" else Ended.TRUNCATED,
            extras_T={name: _after(before, extra_C) for name, extra_C in completion.extras_C.items()},
            messages=(*deepcopy(prompt.messages), {"role": "assistant", "content": text}),
            temperature=params.temperature,
        )


def _after(before: int, extra_C: np.ndarray) -> np.ndarray:
    """What a completion carries, on the whole trajectory: zero on the prompt's tokens."""
    return np.concatenate([np.zeros((before, *extra_C.shape[1:]), extra_C.dtype), extra_C])
