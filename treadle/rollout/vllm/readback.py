"""Proof that a vLLM worker computes with what arrived: weights are read back out of the layers after a load.

Suffixes: I inputs of a layer · O its outputs · K columns that are looked at.

Kernels keep weights in layouts of their own (packed, fused, tied), and a load that forgets to pack again leaves old
ones at work without a word. But a layer applied to the j-th unit vector answers with the j-th column of its weight,
exactly, in any precision: one product of the sum is the weight and the others are zeros. A few columns, others at each
version, of every linear layer cost one pass with a few rows. Parameters that a worker keeps as they came are digested
whole.

Layers that are split over devices, and experts that were packed, are left to the probe.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from treadle.errors import WeightSyncError
from treadle.weights.digest import Manifest, describe

COLUMNS = 2
_WEIGHT = ".weight"


class Witness:
    """Looks at the tensors on their way in, then at the layers."""

    def __init__(self, version: int, *, split: bool) -> None:
        """`split`: layers are spread over devices, so that none of them holds whole columns."""
        self._version, self._split = version, split
        self._columns_KO: dict[str, Tensor] = {}
        self._units: dict[int, tuple[list[int], Tensor]] = {}  # by number of inputs
        self._where = torch.device("cpu")  # tensors arrive there: hosts and GPUs have digests of their own
        self._layers = 0  # that were read back

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass them on, some columns of each matrix noted."""
        for name, tensor in tensors:
            self._where = tensor.device
            if tensor.dim() == 2:
                self._columns_KO[name] = tensor[:, self._unit(tensor.shape[1], tensor)[0]].T.contiguous()
            yield name, tensor

    def check(self, model: Any, manifest: Manifest) -> None:
        """Raise `WeightSyncError` naming the first parameter or layer that does not hold what arrived."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        for name, parameter in model.named_parameters():
            self._parameter(name, parameter, manifest)
        if self._split:
            return
        fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})  # of some of vLLM's models
        layers = list(model.named_modules())
        # Where the head is a layer of its own, embeddings are looked up only, in the parameter that was digested.
        heads = ParallelLMHead if any(isinstance(m, ParallelLMHead) for _, m in layers) else VocabParallelEmbedding
        for name, layer in layers:
            if isinstance(layer, LinearBase | heads):
                inputs = layer.input_size if isinstance(layer, LinearBase) else layer.embedding_dim
                self._layer(name, layer, inputs, self._expected(name, fused))
        if self._layers == 0:
            raise WeightSyncError(
                f"version {self._version}: no layer of {type(model).__name__} goes by a name that was published, so "
                "none could be read back; use rollout.name=embedded for this architecture"
            )

    def _parameter(self, name: str, parameter: Tensor, manifest: Manifest) -> None:
        if name not in manifest or parameter.numel() == 0:
            return
        kind, _, digest = manifest[name].rpartition(" ")
        rows = kind[kind.index("[") + 1 : -1].split(", ")[0]
        whole = parameter[: int(rows)] if rows and parameter.dim() else parameter  # a vocabulary may be padded
        held = describe(whole.to(self._where))
        if held.rpartition(" ")[0] != kind:
            return  # another shape: a slice of it, or packed
        if held.rpartition(" ")[2] != digest:
            raise WeightSyncError(f"version {self._version}: '{name}' arrived, but the engine holds other values")

    def _expected(self, name: str, fused: Mapping[str, list[str]]) -> Tensor | None:
        """Columns of the whole matrix of a linear layer, joined of the parts that it is fused of."""
        parent, dot, last = name.rpartition(".")
        parts = [f"{parent}{dot}{part}{_WEIGHT}" for part in fused.get(last, [last])]
        if last == "lm_head" and parts[0] not in self._columns_KO:
            parts = [n for n in self._columns_KO if n.endswith("embed_tokens.weight")]  # tied
        if not parts or not all(part in self._columns_KO for part in parts):
            return None
        return torch.cat([self._columns_KO[part] for part in parts], dim=1)

    def _layer(self, name: str, layer: Any, inputs: int, expected_KO: Tensor | None) -> None:
        if expected_KO is None or layer.quant_method is None:
            return
        chosen, unit_KI = self._unit(inputs, expected_KO)
        held_KO = layer.quant_method.apply(layer, unit_KI)[:, : expected_KO.shape[1]]
        if not torch.equal(held_KO, expected_KO.to(held_KO)):
            column, output = (held_KO != expected_KO.to(held_KO)).nonzero()[0].tolist()
            raise WeightSyncError(
                f"version {self._version}: the engine's '{name}' computes with other weights than those that arrived "
                f"(output {output}, input {chosen[column]}): a packed or tied matrix that was left old looks like this"
            )
        self._layers += 1

    def _unit(self, inputs: int, like: Tensor) -> tuple[list[int], Tensor]:
        """Columns to look at, others at each version, the same for all matrices of as many inputs; and what asks a
        layer for them."""
        if inputs not in self._units:
            chosen = sorted(random.Random(f"{self._version}/{inputs}").sample(range(inputs), min(COLUMNS, inputs)))
            unit_KI = torch.zeros(len(chosen), inputs, dtype=like.dtype, device=like.device)
            unit_KI[range(len(chosen)), chosen] = 1
            self._units[inputs] = chosen, unit_KI
        return self._units[inputs]
