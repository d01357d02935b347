"""Small reward models, and an independent judge of what they say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "bos_token_id": None,
    "eos_token_id": 0,
}
"""Of a decoder of any family."""
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def make_reward_model(
    path: Path, tokenizer: Path, kind: Any = LlamaConfig, template: str | None = TEMPLATE, **changes: Any
) -> Path:
    """A random one that is not timid, with the tokenizer of another model and a chat template of its own."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(
        kind(**{**SMALL, "vocab_size": 384, "pad_token_id": None, "num_labels": 1, **changes})
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.ndim > 1 else 1.0)
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, path / file)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


class Judge:
    """The same by transformers alone."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def tokens(self, token_ids: Sequence[int]) -> float:
        with torch.no_grad():
            return float(self._model(input_ids=torch.tensor([list(token_ids)])).logits)

    def text(self, text: str) -> float:
        return self.tokens(self._tokenizer.encode(text, add_special_tokens=False))
