"""From what data hold (a string or messages) to token ids: once, and never again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from treadle.errors import DataError
from treadle.types import Message

_LONGEST = 64
"""Characters. Tokens are rarely this long, and never all of a prompt's."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rendering needs."""

    chat_template: Any

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class Renderer:
    """Renders prompts with one tokenizer.

    With `chat`, a string is the user's first message, and messages go through the tokenizer's chat template with its
    generation prompt. Without, the prompt must be a string and is encoded as it is, with the special tokens that
    `tokenizer.encode` adds by itself (a beginning-of-sequence token, for some models).
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, max_tokens: int) -> None:
        if chat and not tokenizer.chat_template:
            raise DataError(
                "data.chat is true, but the model's tokenizer has no chat template: set data.chat=false "
                "(prompts are then encoded as they are), or use a model that was trained to chat"
            )
        self._tokenizer = tokenizer
        self._chat = chat
        self.max_tokens = max_tokens

    def __call__(self, prompt: str | Sequence[Message], where: str) -> tuple[tuple[Message, ...], tuple[int, ...]]:
        """Messages and token ids of a prompt; `where` names it in errors.

        Of a text far too long for `max_tokens` they are the ids of its beginning, which are too many as well.
        """
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        if self._chat:
            token_ids = self._encode(self._through_template(messages, where), add_special_tokens=False)
        elif isinstance(prompt, str):
            token_ids = self._encode(prompt, add_special_tokens=True)
        else:
            raise DataError(
                f"{where}: the prompt is a list of messages, but data.chat is false: set data.chat=true, "
                "or give the prompt as one string"
            )
        if not token_ids:
            raise DataError(f"{where}: the prompt has no token")
        return messages, tuple(token_ids)

    def _through_template(self, messages: Sequence[Message], where: str) -> str:
        try:
            return self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program, and may raise anything
            raise DataError(f"{where}: the tokenizer's chat template refuses these messages: {error}") from error

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        beginning = text[: _LONGEST * self.max_tokens]
        token_ids = self._tokenizer.encode(beginning, add_special_tokens=add_special_tokens)
        if len(beginning) == len(text) or len(token_ids) > self.max_tokens:
            return token_ids
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
