"""A vLLM worker whose loads go wrong in ways that one would not notice: it reports success."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from treadle.rollout.vllm import worker
from treadle.rollout.vllm.worker import WorkerExtension

Named = tuple[str, Tensor]


class Sabotaged(WorkerExtension):
    """`sabotage(kind)` before a load; the next load is sound again."""

    _kind: str | None
    _last: dict[str, Any]

    def sabotage(self, kind: str) -> None:
        self._kind = kind

    def treadle_open(self, replica: str) -> None:
        super().treadle_open(replica)
        self._kind, self._last, self._old = None, {}, {}

    def treadle_load(self, version: int) -> dict[str, Any]:
        if self._kind == "nothing was loaded":  # but the sender and its digests are believed
            assert self._treadle_receiving is not None
            for _ in self._treadle_receiving.tensors():
                pass
            self._kind = None
            return {**self._last, "manifest": dict(self._treadle_receiving.manifest or {})}
        self._last = super().treadle_load(version)
        self._kind = None
        return self._last

    def _treadle_reload(self, model: Any, tensors: Iterable[Named], version: int) -> None:
        kind = self._kind
        before = {name: layer.cpu_linear for name, layer in model.named_modules() if hasattr(layer, "cpu_linear")}
        norms = {n: p.clone() for n, p in model.named_parameters() if n.endswith("norm.weight")}
        tables = {n: p.clone() for n, p in model.named_parameters() if n.endswith("embed_tokens.weight")}
        packing = worker._pack_tied_heads
        if kind == "the tied head was left old":
            worker._pack_tied_heads = lambda _: None
        try:
            super()._treadle_reload(model, self._changed(tensors, kind), version)
        finally:
            worker._pack_tied_heads = packing
        modules: dict[str, Any] = dict(model.named_modules())
        parameters = dict(model.named_parameters())
        if kind in modules:  # this layer keeps its packed matrix
            modules[kind].cpu_linear = before[kind]
        if kind == "a norm was left old":
            name = "model.layers.1.input_layernorm.weight"
            parameters[name].data.copy_(norms[name])
        if kind == "the embedding was left old":
            (name,) = tables
            parameters[name].data.copy_(tables[name])

    def _changed(self, tensors: Iterable[Named], kind: str | None) -> Iterator[Named]:
        """The stream behind the digests, changed."""
        held: dict[str, Tensor] = {}
        for name, tensor in tensors:
            layer, _, part = name.partition("model.layers.0.")[2].rpartition(".")
            if kind == f"skipped {name}":
                continue
            if kind == "cast to bfloat16 and back":
                yield name, tensor.bfloat16().to(tensor.dtype)
            elif kind == "one layer scaled" and layer == "mlp.down_proj":
                yield name, tensor * 1.001
            elif kind == "a square matrix transposed" and layer == "self_attn.o_proj" and part == "weight":
                yield name, tensor.T.contiguous()
            elif kind == "rows permuted" and layer == "mlp.gate_proj":
                yield name, tensor.flip(0)
            elif kind == "gate and up swapped" and layer in ("mlp.gate_proj", "mlp.up_proj"):
                held[layer] = tensor.clone()
                if len(held) == 2:
                    yield "model.layers.0.mlp.gate_proj.weight", held["mlp.up_proj"]
                    yield "model.layers.0.mlp.up_proj.weight", held["mlp.gate_proj"]
            elif kind == "two layers swapped" and "self_attn.q_proj.weight" in name:
                yield name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1."), tensor
            elif kind == "a tensor of zeros" and layer == "self_attn.v_proj":
                yield name, torch.zeros_like(tensor)
            elif kind == "half a tensor" and layer == "mlp.up_proj":
                yield name, torch.cat([tensor[: len(tensor) // 2], tensor[: len(tensor) // 2]])
            elif kind == "noise below the tolerance" and layer == "mlp.up_proj":
                yield name, tensor + 1e-6
            else:
                yield name, tensor
