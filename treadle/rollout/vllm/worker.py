"""What treadle adds to vLLM's worker: weights come in on a thread of their own, are loaded on command, and read back.

vLLM mixes `WorkerExtension` into its worker's class by name and calls its methods through `collective_rpc`. They take
and give plain values, and report failures as values: an exception would arrive without its kind.

vLLM's own `load_weights` leaves a CPU model half updated, so loads go through its layer-wise reload. What that leaves
old or unpacked on a CPU (the packed matrix of a tied head, the experts of a mixture; vLLM 0.32) is packed again.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from treadle.errors import WeightSyncError
from treadle.rollout.vllm.readback import Witness
from treadle.weights.stream import Address, Landing, Receiving

_LOOK = 0.5  # seconds between two looks for the parent


class WorkerExtension:
    """Methods of a worker. Its state is made by `treadle_open`, before anything else is called."""

    # What vLLM's worker, which this becomes a part of, has.
    rank: int
    model_runner: Any
    model_config: Any
    vllm_config: Any

    def treadle_open(self, replica: str) -> None:
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        self._treadle_landing = Landing(f"{replica}-{rank}")
        self._treadle_receiving: Receiving | None = None
        threading.Thread(target=_follow, args=(os.getppid(),), name="treadle-follow", daemon=True).start()

    def treadle_expect(self, address: dict[str, Any]) -> None:
        """Begin to receive a publish; what was on its way before is forgotten."""
        if self._treadle_receiving is not None:
            self._treadle_receiving.give_up()
        self._treadle_receiving = self._treadle_landing.receive(
            Address(**{**address, "receivers": tuple(address["receivers"])})
        )

    def treadle_received(self) -> dict[str, Any]:
        """`manifest`: of all that arrived, or None while it is still on its way; `error`."""
        assert self._treadle_receiving is not None
        try:
            return {"manifest": self._treadle_receiving.manifest}
        except WeightSyncError as error:
            return {"error": str(error)}

    def treadle_load(self, version: int) -> dict[str, Any]:
        """Load what arrives, and read it back: `manifest`, seconds of each part; or `error`."""
        from vllm.config import set_current_vllm_config

        assert self._treadle_receiving is not None
        model, receiving = self.model_runner.get_model(), self._treadle_receiving
        witness = Witness(version, split=self.vllm_config.parallel_config.tensor_parallel_size > 1)
        try:
            started = time.perf_counter()
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                self._treadle_reload(model, witness.watch(receiving.tensors()), version)
                loaded = time.perf_counter()
                manifest = receiving.manifest
                assert manifest is not None
                witness.check(model, manifest)
            ended = time.perf_counter()
        except WeightSyncError as error:
            return {"error": str(error)}
        except Exception as error:  # whatever vLLM raises: the engine has weights of two versions now
            return {"error": f"version {version}: vLLM could not load it: {type(error).__name__}: {error}"}
        return {
            "manifest": dict(manifest),
            "load": loaded - started,
            "readback": ended - loaded,
            "digest": receiving.digest_seconds,
        }

    def _treadle_reload(self, model: Any, tensors: Any, version: int) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(model)
        try:
            model.load_weights(tensors)
            missing = _missing(model)
        finally:
            finalize_layerwise_reload(model, self.model_config)
        _pack_tied_heads(model)
        _pack_experts(model)
        self.model_runner.reset_lora_state()
        if missing:
            raise WeightSyncError(
                f"version {version}: '{missing[0]}' did not get all of its weights"
                + (f", nor did {len(missing) - 1} more layers" if len(missing) > 1 else "")
            )


def _follow(parent: int) -> None:
    """End when the parent does: an engine outlives a trainer that was killed, and holds its memory (vLLM 0.32)."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


def _missing(model: Any) -> list[str]:
    """Layers that have parameters which were not filled. A padded vocabulary is filled as far as it goes."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    missing = []
    named: list[tuple[str, Any]] = list(model.named_modules())
    for name, layer in named:
        info = get_layerwise_info(layer)
        if not info.can_load() or not any(True for _ in layer.parameters(recurse=False)):
            continue  # done, or there is nothing to fill
        if isinstance(layer, ParallelLMHead) and info.load_numel == 0 and model.config.tie_word_embeddings:
            continue
        padded = isinstance(layer, VocabParallelEmbedding) and layer.num_embeddings_padded != layer.num_embeddings
        if info.load_numel == 0 or not padded:
            missing.append(name)
    return missing


def _pack_tied_heads(model: Any) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tables = {m.weight.data_ptr() for m in _all(model, VocabParallelEmbedding) if not isinstance(m, ParallelLMHead)}
    for head in _all(model, ParallelLMHead):
        if head.weight.data_ptr() in tables:
            head.quant_method.process_weights_after_loading(head)


def _pack_experts(model: Any) -> None:
    """On a CPU a reload writes experts into the packed layout's place as they came (vLLM 0.32)."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in _all(model, RoutedExperts):
        if isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
            assert layer.quant_method.moe_kernel is not None
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _all(model: Any, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]
