"""A Hugging Face causal LM run over packed trajectories, with the head that turns states into per-token quantities.

Suffixes: S packed tokens of one pass · M trained ones among them · E hidden size · N trajectories.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from treadle.attention import install
from treadle.engines.torch.attention import PackedAttention
from treadle.engines.torch.head import LogitRule, accurate_dtype, logits, quantities
from treadle.errors import ModelError
from treadle.handles import Outputs

if TYPE_CHECKING:
    from collections.abc import Set

    from treadle.batch import Batch
    from treadle.handles import Quantity

Head = Literal["lm", "value"]
QUANTITIES: dict[Head, frozenset[Quantity]] = {
    "lm": frozenset({"logprob", "entropy", "sum_p2", "given"}),
    "value": frozenset({"value"}),
}


class Network:
    """Batches live on the CPU; a pass takes their tokens to the model's device and brings per-token numbers back."""

    def __init__(self, model: Any, head: Head, chunk: int, recompute: bool) -> None:
        """`recompute`: forget the activations of every decoder layer and make them again in the backward pass."""
        self.model, self.chunk = model, chunk
        self.head: Head = head
        self.decoder: nn.Module = model.get_decoder()
        self.name = type(model).__name__
        self.lm_head = model.get_output_embeddings()
        if self.lm_head is None:
            raise ModelError(f"{self.name} has no language-model head")
        self.settings: dict[str, Any] = model.config.get_text_config().to_dict()
        self.rule = LogitRule.of(self.settings)
        weight = self.lm_head.weight
        self.accurate = accurate_dtype(weight.dtype)
        self.value_head: nn.Linear | None = None
        if head == "value":  # starts at zero: at first every state is worth the same
            self.value_head = nn.Linear(weight.shape[1], 1, dtype=self.accurate, device=weight.device)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        layers: list[Any] = [m for m in self.decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
        self.recomputed = layers if recompute else []
        if recompute and not self.recomputed:
            raise ModelError(f"{self.name} cannot recompute its layers; set activation_checkpointing=false")
        model.eval()

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the objective reaches, by name, tied ones once. A value head leaves the language-model head alone."""
        if self.value_head is None:
            return dict(self.model.named_parameters())
        reached = set(self.decoder.parameters())
        inside = {name: p for name, p in self.model.named_parameters() if p in reached}
        return inside | {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}

    def outputs(self, batch: Batch, needs: Set[Quantity]) -> Outputs:
        """What the model says about the trained tokens of these rows, all in one pass."""
        if not needs <= QUANTITIES[self.head]:
            raise ValueError(f"a {self.head} head gives {sorted(QUANTITIES[self.head])}, not {sorted(needs)}")
        # Token t is chosen in the state after token t - 1.
        chosen_ME = self.hidden(batch)[self._trained(batch).to(self.device) - 1]
        if self.value_head is not None:
            return Outputs(value_T=self._value(chosen_ME).to(batch.token_T.device))
        temperature_M = batch.temperature_N[batch.row_T][batch.mask_T]
        if (temperature_M <= 0).any():
            raise ValueError("a greedily sampled trajectory (temperature 0) has no log-prob and cannot be trained")
        found = quantities(
            chosen_ME,
            self.lm_head.weight,
            self.lm_head.bias,
            batch.token_T[batch.mask_T].to(self.device),
            batch.extras_T["given_id_T"][batch.mask_T].to(self.device) if "given" in needs else None,
            temperature_M.to(self.device, self.accurate),
            needs,
            self.rule,
            self.chunk,
        )
        home = batch.token_T.device
        found = (found.logprob_T, found.entropy_T, found.sum_p2_T, found.given_T)
        return Outputs(*(None if x is None else x.to(home) for x in found))

    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value of the state in which each trained token was chosen, [M], and of the state after each trajectory's
        last token, [N], 0 unless truncated."""
        hidden_SE = self.hidden(batch)
        value_M = self._value(hidden_SE[self._trained(batch).to(self.device) - 1])
        last_N = self._value(hidden_SE[batch.offset_N1[1:].to(self.device) - 1])
        home = batch.token_T.device
        return value_M.to(home), torch.where(batch.truncated_N, last_N.to(home), 0.0)

    def hidden(self, batch: Batch) -> Tensor:
        """Last hidden states, [S, E]."""
        with self._recomputing() if torch.is_grad_enabled() else nullcontext():
            return self._decode(batch.token_T, batch.length_N.tolist())

    def _decode(self, token_S: Tensor, lengths: Sequence[int]) -> Tensor:
        position_S = torch.cat([torch.arange(length) for length in lengths])
        return self.decoder(
            input_ids=token_S[None].to(self.device),
            position_ids=position_S[None].to(self.device),
            use_cache=False,
            plan=PackedAttention(lengths, self.device),
        ).last_hidden_state[0]

    def _value(self, hidden_ME: Tensor) -> Tensor:
        if self.value_head is None:
            raise ValueError("this engine has no value head")
        return self.value_head(hidden_ME.to(self.accurate))[:, 0]

    @staticmethod
    def _trained(batch: Batch) -> Tensor:
        """Positions of the trained tokens, [M]."""
        if batch.mask_T[batch.offset_N1[:-1]].any():
            raise ValueError("the first token of a trajectory has nothing before it and cannot be trained")
        return batch.mask_T.nonzero()[:, 0]

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """transformers recomputes layers in training mode only, so a layer is put in it, alone, for the moment of
        being called: nothing inside ever runs in training mode, and a rollout engine that shares the model sees none
        of it."""
        for layer in self.recomputed:
            layer.training = layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(_recompute, layer)
        try:
            yield
        finally:
            for layer in self.recomputed:
                layer.training = layer.gradient_checkpointing = False

    @torch.no_grad()
    def prove(self) -> None:
        """Two packed sequences must give the logits that the model itself gives for each alone.

        That finds an architecture that does not pass the plan on, or that does to its logits what `LogitRule` does not
        know. Layers that mix neighbours in another way (convolutions, state spaces) leak too little for numbers to
        tell, so they are refused by what they are called. Raises `ModelError`.
        """
        kinds = set(self.settings.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ModelError(
                f"{self.name} has {sorted(kinds)} layers, which cannot run packed; use another architecture"
            )
        vocabulary = self.lm_head.weight.shape[0]
        sequences = [torch.randint(vocabulary, (n,), generator=torch.Generator().manual_seed(n)) for n in (6, 9)]
        packed_SE = self._decode(torch.cat(sequences), [6, 9])
        packed_SV = logits(packed_SE, self.lm_head.weight, self.lm_head.bias, self.rule)
        self.model.set_attn_implementation("eager")
        try:
            alone = [self.model(input_ids=s[None].to(self.device), use_cache=False).logits[0] for s in sequences]
        finally:
            install(self.model)
        if not all(theirs_SV.isfinite().all() for theirs_SV in alone):
            raise ModelError(
                f"{self.name}: the model's own logits are not finite, so its weights are damaged or too large for "
                f"{self.model.dtype}; download or export it again"
            )
        tolerance = 0.1 if self.model.dtype.itemsize < 4 else 1e-3
        for ours_SV, theirs_SV in zip(packed_SV.split([6, 9]), alone, strict=True):
            error_S = (ours_SV - theirs_SV).norm(dim=-1) / theirs_SV.norm(dim=-1).clamp(min=1e-6)
            # The median: rounding may send one token to another expert, a real fault touches most of them.
            if not error_S.median() <= tolerance:
                raise ModelError(
                    f"{self.name} cannot be trained packed: its logits are off by {float(error_S.median()):.1%} "
                    "against its own forward pass; use another architecture"
                )


def _recompute(layer: nn.Module, function: Any, *args: Any) -> Any:
    layer.training = False
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
