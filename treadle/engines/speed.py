"""How many operations a model's passes need, and how many a second this machine can do: what shares are taken of."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from treadle.handles import Cost

if TYPE_CHECKING:
    import torch

SIDE = {"cpu": 512, "cuda": 8192}
"""Of the square matrices that are multiplied: large enough for the full rate, small enough to take milliseconds."""


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a large matrix product here and now: the best of several, within about 0.1 s.

    To be called on the thread that computes, for threads are counted by it.
    """
    import torch

    side = SIDE.get(device.type, 2048)
    noise = torch.Generator().manual_seed(0)  # the global one belongs to the run
    x = torch.rand(side, side, generator=noise).to(device, dtype)
    float((x @ x)[0, 0])  # the first one sets things up
    best, end = math.inf, time.perf_counter() + 0.1
    while best == math.inf or time.perf_counter() < end:
        begin = time.perf_counter()
        float((x @ x)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best


def cost_of(model: Any) -> Cost | None:
    """The operations of a Hugging Face causal LM, 2 for each weight of its matrices; None where they do not follow from
    its shapes (experts, of which a token visits a few)."""
    from torch import nn

    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    known = {id(m.weight) for m in layers.values()}
    if any(p.ndim > 1 and id(p) not in known for p in model.parameters()):
        return None
    head = model.get_output_embeddings()
    linear = [m for m in layers.values() if isinstance(m, nn.Linear) and m is not head]
    config = model.config.get_text_config()
    width = config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * (config.to_dict().get("head_dim") or width)
    logits = 0.0 if head is None else 2.0 * head.weight.numel()
    return Cost(token=2.0 * sum(m.weight.numel() for m in linear), logits=logits, pair=4.0 * attention)
