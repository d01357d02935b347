"""What a reward model, named by `reward_model.model`, says of the whole conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.batch import Batch
from treadle.errors import ModelError, RewardError
from treadle.types import Ended, Group, Kind, Provenance, Sample, Trajectory

if TYPE_CHECKING:
    from treadle.handles import ScoringHandle


class ModelReward:
    """Scores trajectories with a model of some role, which is told to `serve` once it is there.

    A reward model has a tokenizer and a chat template of its own, so it reads the conversation as it was taught to. One
    without a template reads the very tokens of the policy, whose vocabulary it must have.
    """

    def __init__(
        self, tokenizer: Any, policy_tokenizer: Any, name: str, context: int | None, vocabulary: int | None
    ) -> None:
        """`context`: tokens that the model called `name` reads at most, of `vocabulary` that it knows; None: no limit
        is known.

        Raises `ModelError` where it has neither a chat template nor the policy's vocabulary, or another tokenizer.
        """
        self._tokenizer, self._name, self._context, self._vocabulary = tokenizer, name, context, vocabulary
        if vocabulary is not None and tokenizer.vocab_size > vocabulary:
            raise ModelError(
                f"the reward model '{name}' knows {vocabulary} tokens, and its tokenizer makes {tokenizer.vocab_size}; "
                "they do not belong together"
            )
        if not tokenizer.chat_template and tokenizer.get_vocab() != policy_tokenizer.get_vocab():
            raise ModelError(
                f"the reward model '{name}' has no chat template, so it would read the policy's tokens, but their "
                "vocabularies differ; give its tokenizer the chat template that it was trained with"
            )
        self._model: ScoringHandle | None = None
        self._turn = asyncio.Lock()
        self._waiting: list[tuple[Trajectory, asyncio.Future[float]]] = []

    def serve(self, model: ScoringHandle) -> None:
        """Ask this one from now on."""
        self._model = model

    async def __call__(self, trajectory: Trajectory) -> float:
        """Its score. Raises `RewardError` for a conversation that the model cannot read."""
        score: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._read(trajectory), score))
        try:
            async with self._turn:  # those that come meanwhile are asked about together
                if not score.done():
                    await self._ask()
            return score.result()
        finally:
            if not score.cancel():  # nobody waits for it any more; what it holds has been told, or need not be
                score.exception()

    async def _ask(self) -> None:
        """Fill in all that wait, with what went wrong if need be."""
        assert self._model is not None
        asked, self._waiting = [one for one in self._waiting if not one[1].done()], []
        try:
            rows = [Group(n, t.prompt, (Sample(str(n), Kind.TRAIN, (t,)),)) for n, (t, _) in enumerate(asked)]
            found = (await self._model.score(Batch.pack(rows)))["score_N"].tolist()
        except asyncio.CancelledError:  # of this caller alone: the others ask for themselves
            self._waiting = asked + self._waiting
            raise
        except Exception as error:
            for _, score in asked:
                if not score.done():
                    score.set_exception(error)
            return
        for (_, score), value in zip(asked, found, strict=True):
            if not score.done():
                score.set_result(value)

    def _read(self, trajectory: Trajectory) -> Trajectory:
        """The tokens that the model reads, none of them to be trained."""
        tokens: Sequence[int] = trajectory.token_T.tolist()
        if self._tokenizer.chat_template:
            if not trajectory.messages:
                raise RewardError(
                    f"prompt {trajectory.prompt.id!r}: its trajectory has no messages for the reward model to read; "
                    "the agent must fill them in"
                )
            try:
                text = self._tokenizer.apply_chat_template(list(trajectory.messages), tokenize=False)
            except Exception as error:  # a template is a program, and may raise anything
                raise RewardError(
                    f"prompt {trajectory.prompt.id!r}: the chat template of the reward model '{self._name}' refuses "
                    f"this conversation: {error}"
                ) from error
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if not tokens or (self._context is not None and len(tokens) > self._context):
            raise RewardError(
                f"prompt {trajectory.prompt.id!r}: its conversation has {len(tokens)} tokens, and the reward model "
                f"'{self._name}' reads 1 to {self._context or 'any number'}; lower data.max_prompt_tokens or "
                "sampling.max_tokens, or choose another model"
            )
        if self._vocabulary is not None and (largest := max(tokens)) >= self._vocabulary:
            raise RewardError(
                f"prompt {trajectory.prompt.id!r}: the reward model '{self._name}' knows {self._vocabulary} tokens, "
                f"and its tokenizer made token {largest} of this conversation"
            )
        return Trajectory(
            prompt=trajectory.prompt,
            token_T=np.array(tokens, np.int64),
            provenance_T=np.full(len(tokens), Provenance.PROMPT, np.uint8),
            logprob_T=np.full(len(tokens), np.nan, np.float32),
            version_T=np.full(len(tokens), -1, np.int32),
            turn_ends=(),
            ended=Ended.TERMINATED,
        )
