"""A Hugging Face causal LM run over packed trajectories, with the head that turns states into per-token quantities.

Suffixes: S packed tokens of one pass · M trained ones among them · E hidden size · N trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from treadle.attention import install
from treadle.engines.torch.attention import TreeAttention
from treadle.engines.torch.head import LogitRule, accurate_dtype, logits, quantities
from treadle.engines.torch.layout import Layout, lay_out
from treadle.errors import ModelError
from treadle.handles import Outputs

if TYPE_CHECKING:
    from collections.abc import Set

    from torch.distributed.device_mesh import DeviceMesh

    from treadle.batch import Batch
    from treadle.handles import Quantity

Head = Literal["lm", "value"]
QUANTITIES: dict[Head, frozenset[Quantity]] = {
    "lm": frozenset({"logprob", "entropy", "sum_p2", "given"}),
    "value": frozenset({"value"}),
}


class Root(nn.Module):
    """Everything that has weights. Passes run inside of its call: that is where sharded weights come together."""

    def __init__(self, model: nn.Module, value_head: nn.Linear | None) -> None:
        super().__init__()
        self.model, self.value_head = model, value_head

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """`run(*args)`: a tensor, or a tuple of tensors and None."""
        return run(*args)


class Network:
    """Batches live on the CPU; a pass takes their tokens to the model's device and brings per-token numbers back."""

    mesh: DeviceMesh | None = None  # over which the weights are spread (sharding.py)
    fused = False  # whether layers take the way of fused.py

    def __init__(self, model: Any, head: Head, chunk: int, recompute: bool) -> None:
        """`recompute`: forget the activations of every decoder layer and make them again in the backward pass."""
        self.model, self.chunk = model, chunk
        self.head: Head = head
        self.decoder: nn.Module = model.get_decoder()
        self.name = type(model).__name__
        self.lm_head = model.get_output_embeddings()
        if self.lm_head is None and head == "lm":
            raise ModelError(f"{self.name} has no language-model head")
        self.settings: dict[str, Any] = model.config.get_text_config().to_dict()
        self.rule = LogitRule.of(self.settings)
        weight = model.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype  # that compute
        self.accurate = accurate_dtype(self.dtype)
        self.value_head: nn.Linear | None = None
        if head == "value":
            self.value_head = _value_head(model, weight.shape[1], self.accurate, self.device)
        self.root = Root(model, self.value_head)
        self.layers: list[Any] = [m for m in self.decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
        self.recomputed = self.layers if recompute else []
        if recompute and not self.recomputed:
            raise ModelError(f"{self.name} cannot recompute its layers; set activation_checkpointing=false")
        model.eval()

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the objective reaches, by name, tied ones once. A value head leaves the language-model head alone."""
        if self.value_head is None:
            return dict(self.model.named_parameters())
        reached = set(self.decoder.parameters())
        inside = {name: p for name, p in self.model.named_parameters() if p in reached}
        return inside | {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}

    def outputs(self, batch: Batch, needs: Set[Quantity], layout: Layout | None = None) -> Outputs:
        """What the model says about the trained tokens of these rows, all in one pass over `layout(batch)`."""
        if not needs <= QUANTITIES[self.head]:
            raise ValueError(f"a {self.head} head gives {sorted(QUANTITIES[self.head])}, not {sorted(needs)}")
        layout = layout or self.layout(batch)
        temperature_M = batch.temperature_N[batch.row_T][batch.mask_T]
        if self.value_head is None and (temperature_M <= 0).any():
            raise ValueError("a greedily sampled trajectory (temperature 0) has no log-prob and cannot be trained")
        found = self.root(self._outputs, batch, needs, layout, self._states(batch, layout), temperature_M)
        home = batch.token_T.device
        return Outputs(*(None if x is None else x.to(home) for x in found))

    def _outputs(
        self, batch: Batch, needs: Set[Quantity], layout: Layout, state_M: Tensor, temperature_M: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The fields of `Outputs`, in order."""
        chosen_ME = self.hidden(layout).index_select(0, state_M)
        if self.value_head is not None:
            return None, None, None, None, self._value(chosen_ME)
        found = quantities(
            chosen_ME,
            self.lm_head.weight,
            self.lm_head.bias,
            batch.token_T[batch.mask_T].to(self.device),
            batch.extras_T["given_id_T"][batch.mask_T].to(self.device) if "given" in needs else None,
            None if (temperature_M == 1).all() else temperature_M.to(self.device, self.accurate),
            needs,
            self.rule,
            self.chunk,
        )
        return found.logprob_T, found.entropy_T, found.sum_p2_T, found.given_T

    def idle(self) -> Tensor:
        """A pass over one token in which every weight takes part: 0, with a gradient of 0."""
        return self.root(self._idle)

    def _idle(self) -> Tensor:
        layout = lay_out([torch.zeros(1, dtype=torch.int64)], [0])
        if self.value_head is not None:
            return 0 * self._value(self.hidden(layout)).sum()
        return 0 * self._logits(layout).sum()

    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value of the state in which each trained token was chosen, [M], and of the state after each trajectory's
        last token, [N], 0 unless truncated."""
        layout = self.layout(batch)
        value_M, last_N = self.root(self._values, batch, layout, self._states(batch, layout))
        home = batch.token_T.device
        return value_M.to(home), torch.where(batch.truncated_N, last_N.to(home), 0.0)

    def _values(self, batch: Batch, layout: Layout, state_M: Tensor) -> tuple[Tensor, Tensor]:
        hidden_SE = self.hidden(layout)
        last_N = layout.place_T[batch.offset_N1[1:] - 1].to(self.device)
        return self._value(hidden_SE.index_select(0, state_M)), self._value(hidden_SE.index_select(0, last_N))

    def score(self, token_S: Tensor) -> Tensor:
        """Value of the state after the last of these tokens that is no padding, []."""
        padding = self.settings.get("pad_token_id")
        said = [] if padding is None else (token_S != padding).nonzero().flatten().tolist()
        layout = lay_out([token_S[: said[-1] + 1] if said else token_S], [0])
        return self.root(self._score, layout)[0].to(token_S.device)

    def _score(self, layout: Layout) -> Tensor:
        return self._value(self.hidden(layout)[-1:])

    def layout(self, batch: Batch) -> Layout:
        """How these rows go through the model: what a group's rows begin with once, and nothing behind the last state
        that is looked at. A value head looks at the state after the last token, too."""
        rows = batch.token_T.split(batch.length_N.tolist())
        if self.head == "lm":
            rows = [row[:stop] for row, stop in zip(rows, _last_trained(batch).tolist(), strict=True)]
        return lay_out(rows, batch.group_N.tolist())

    def hidden(self, layout: Layout) -> Tensor:
        """Last hidden states, [S, E]; inside of a call of `root`.

        Half-precision weights multiply in half precision, but what layers add up is kept in float32, and so are the
        norms: otherwise rounding is a quarter of the gradient (measured; 6 % this way).
        """
        token_1S = layout.token_S[None].to(self.device)
        half = self.dtype if self.dtype.itemsize < 4 else None
        with (
            self._recomputing() if torch.is_grad_enabled() else nullcontext(),
            nullcontext() if half is None else torch.autocast(self.device.type, half),
        ):
            return self.decoder(
                inputs_embeds=self.model.get_input_embeddings()(token_1S).to(self.accurate),
                position_ids=layout.position_S[None].to(self.device),
                use_cache=False,
                plan=TreeAttention(layout, self.device, self.fused),
            ).last_hidden_state[0]

    def _value(self, hidden_ME: Tensor) -> Tensor:
        if self.value_head is None:
            raise ValueError("this engine has no value head")
        return self.value_head(hidden_ME.to(self.accurate))[:, 0].clone()  # FSDP wants no views to come out of a unit

    def _states(self, batch: Batch, layout: Layout) -> Tensor:
        """Where the state lies in which each trained token was chosen: that of the token before, [M]."""
        if batch.mask_T[batch.offset_N1[:-1]].any():
            raise ValueError("the first token of a trajectory has nothing before it and cannot be trained")
        trained_M = batch.mask_T.nonzero()[:, 0]
        offset_N1 = F.pad(torch.tensor(layout.lengths).cumsum(0), (1, 0))
        shift_N = offset_N1[:-1] - batch.offset_N1[:-1]
        return layout.place_T[trained_M - 1 + shift_N[batch.row_T[trained_M]]].to(self.device)

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
        """Laid-out sequences, two of which share what they begin with, must give the logits that the model itself gives
        for each alone; of a model that has none, the last hidden states.

        That finds an architecture that does not pass the plan on, or that does to its logits what `LogitRule` does not
        know. Layers that mix neighbours in another way (convolutions, state spaces) leak too little for numbers to
        tell, so they are refused by what they are called. Raises `ModelError`.
        """
        kinds = set(self.settings.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ModelError(
                f"{self.name} has {sorted(kinds)} layers, which cannot run packed; use another architecture"
            )
        told = "logits" if self.lm_head is not None else "last hidden states"
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        random = torch.Generator().manual_seed(0)
        shared, *ends, other = (torch.randint(vocabulary, (n,), generator=random) for n in (5, 3, 6, 9))
        sequences = [*(torch.cat([shared, end]) for end in ends), other]
        layout = lay_out(sequences, [0, 0, 1])
        packed_SV = self.root(self._logits, layout)
        ours = packed_SV[layout.place_T.to(self.device)].split(list(layout.lengths))
        self.model.set_attn_implementation("eager")
        try:
            alone = [self.root(self._alone, token_S) for token_S in sequences]
        finally:
            install(self.model)
        if not all(theirs_SV.isfinite().all() for theirs_SV in alone):
            raise ModelError(
                f"{self.name}: the model's own {told} are not finite, so its weights are damaged or too large for "
                f"{self.dtype}; download or export it again"
            )
        tolerance = 0.1 if self.dtype.itemsize < 4 else 1e-3
        for ours_SV, theirs_SV in zip(ours, alone, strict=True):
            error_S = (ours_SV - theirs_SV).norm(dim=-1) / theirs_SV.norm(dim=-1).clamp(min=1e-6)
            # The median: rounding may send one token to another expert, a real fault touches most of them.
            if not error_S.median() <= tolerance:
                raise ModelError(
                    f"{self.name} cannot be run packed: its {told} are off by {float(error_S.median()):.1%} "
                    "against its own forward pass; use another architecture"
                )

    def _logits(self, layout: Layout) -> Tensor:
        hidden_SE, head = self.hidden(layout), self.lm_head
        return hidden_SE if head is None else logits(hidden_SE, head.weight, head.bias, self.rule)

    def _alone(self, token_S: Tensor) -> Tensor:
        """The model's own logits, [S, V], or last hidden states, [S, E]."""
        given: dict[str, Any] = {"input_ids": token_S[None].to(self.device), "use_cache": False}
        return self.decoder(**given).last_hidden_state[0] if self.lm_head is None else self.model(**given).logits[0]


def _value_head(model: Any, width: int, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """That of a reward model; elsewhere a new one, all zeros: at first every state is worth the same."""
    score = dict(model.named_children()).get("score")
    head = nn.Linear(width, 1, bias=score is None or score.bias is not None, dtype=dtype, device=device)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.zero_() if score is None else parameter.copy_(score.get_parameter(name))
    return head


def _recompute(layer: nn.Module, function: Any, *args: Any) -> Any:
    layer.training = False
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _last_trained(batch: Batch) -> Tensor:
    """Tokens before the last trained one of each row, [N]; 0 where none is trained."""
    before_T = torch.where(batch.mask_T, torch.arange(len(batch.token_T)) - batch.offset_N1[batch.row_T], 0)
    return before_T.new_zeros(len(batch)).scatter_reduce(0, batch.row_T, before_T, "amax")
