"""The forward pass of Llama-like models as decoding wants it: a float32 residual stream, fused projections, no modules.

Its parameters are the Hugging Face model's own. `Decoder.knows` recognises the models that it was written for, and the
runner proves its logits against those of the model itself; every other model generates through its own modules.
Suffixes: S positions of a pass · R kept ones · E hidden size · D head size · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from treadle.attention import ROTARY_FAMILY
from treadle.rollout.embedded.graphs import Replay
from treadle.rollout.embedded.kernels import Kernels, Projection, Rotation
from treadle.rollout.embedded.plans import Plan


@dataclass(frozen=True, slots=True)
class _Block:
    """One layer; norms are modules with a weight."""

    attention_norm: Any
    qkv: Projection
    q_norm: Any
    k_norm: Any
    rotates: bool
    scaling: float
    out: Projection
    mlp_norm: Any
    gate_up: Projection
    down: Projection


class Decoder:
    """`model` [transformers ForCausalLM] run by `kernels`."""

    def __init__(self, model: Any, kernels: Kernels) -> None:
        config = model.config
        self._model, self._kernels = model, kernels
        self._heads: int = config.num_attention_heads
        self._groups: int = config.num_key_value_heads
        self._eps: float = config.rms_norm_eps
        self._blocks: list[_Block] = []
        self._head: Projection | None = None
        self._replay = Replay(self._run) if model.device.type == "cuda" else None

    @staticmethod
    def knows(model: Any) -> bool:
        """Whether the model is one of those that this file was written for."""
        config = model.config
        return config.model_type in ROTARY_FAMILY and config.hidden_act == "silu"

    def refresh(self) -> None:
        """The weights have changed: what was made of them is made again, by the next pass."""
        if self._kernels.copies_weights:
            self._blocks, self._head = [], None
        if self._replay is not None:
            self._replay.forget()

    def __call__(self, plan: Plan, token_S: Tensor, position_S: Tensor, keep_R: Tensor | None) -> Tensor:
        """Logits [R, V] at the positions `keep_R` of the pass (None: at all of them)."""
        if self._head is None:
            self._prepare()
        return (self._replay or self._run)(plan, token_S, position_S, keep_R)

    def _run(self, plan: Plan, token_S: Tensor, position_S: Tensor, keep_R: Tensor | None) -> Tensor:
        kernels, core = self._kernels, self._model.model
        assert self._head is not None
        x_SE = core.embed_tokens(token_S).float()
        cosine, sine = (x[0] for x in core.rotary_emb(x_SE, position_S[None]))
        delta_SE = None
        for layer, block in enumerate(self._blocks):
            h_SE = kernels.add_norm(x_SE, delta_SE, block.attention_norm.weight, self._eps)
            qkv = block.qkv(h_SE)
            norms = (None, None) if block.q_norm is None else (block.q_norm.weight, block.k_norm.weight)
            angles = (cosine, sine) if block.rotates else (None, None)
            kernels.rotate(qkv, self._heads, self._groups, Rotation(*norms, self._eps, *angles))
            q, k, v = qkv.view(len(qkv), self._heads + 2 * self._groups, -1).split(
                [self._heads, self._groups, self._groups], dim=1
            )
            delta_SE = block.out(plan.attend(layer, q, k, v, block.scaling))
            h_SE = kernels.add_norm(x_SE, delta_SE, block.mlp_norm.weight, self._eps)
            delta_SE = block.down(kernels.silu_mul(block.gate_up(h_SE)))
        if keep_R is not None:
            x_SE, delta_SE = x_SE[keep_R], delta_SE if delta_SE is None else delta_SE[keep_R]
        return self._head(kernels.add_norm(x_SE, delta_SE, core.norm.weight, self._eps))

    def _prepare(self) -> None:
        project = self._kernels.projection
        qwen3 = self._model.config.model_type == "qwen3"
        for layer in self._model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            self._blocks.append(
                _Block(
                    attention_norm=layer.input_layernorm,
                    qkv=project([attention.q_proj, attention.k_proj, attention.v_proj]),
                    q_norm=attention.q_norm if qwen3 else None,
                    k_norm=attention.k_norm if qwen3 else None,
                    rotates=bool(attention.use_rope) if self._model.config.model_type == "smollm3" else True,
                    scaling=attention.scaling,
                    out=project([attention.o_proj]),
                    mlp_norm=layer.post_attention_layernorm,
                    gate_up=project([mlp.gate_proj, mlp.up_proj]),
                    down=project([mlp.down_proj]),
                )
            )
        self._head = project([self._model.lm_head])


def disagreement(ours_RV: Tensor, theirs_RV: Tensor) -> float:
    """The largest distance of two sets of logits, relative to their size; NaN if either is not finite."""
    error_R = (ours_RV - theirs_RV).norm(dim=-1) / theirs_RV.norm(dim=-1).clamp(min=1e-6)
    return float(error_R.max()) if bool(ours_RV.isfinite().all()) else float("nan")
