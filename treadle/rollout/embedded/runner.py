"""The passes over the model: prompts, one token for every row, new weights; all on the device's thread.

Suffixes: R rows · S new tokens of this pass laid end to end · V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.attention import NAME
from treadle.errors import ModelError, RolloutError, WeightSyncError
from treadle.rollout.embedded.cache import DecodePlan, KeyValueCache, PackedPlan, Span
from treadle.rollout.embedded.generation import Generation, PrefixKey
from treadle.rollout.embedded.sampling import sample, uniforms

Sampled = list[tuple[int, float]]
"""Token and log-prob for each generation, in the order asked."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt that was computed once: its keys and values by layer, and the logits after its last token."""

    states: list[tuple[int, Tensor, Tensor]]
    logit_V: Tensor


class Runner:
    """A causal LM with a cache. Rows are dense: the i-th running generation owns row i."""

    def __init__(self, model: Any, max_sequences: int) -> None:
        self.model = model
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.context = _context(model)
        self.cache = KeyValueCache(max_sequences)
        self.prefixes: dict[PrefixKey, Prefix] = {}
        self.prompt_tokens = self.prefix_hits = self.decode_steps = 0

    def forget(self) -> None:
        """Drop all that was computed with the weights."""
        self.cache.drop()
        self.prefixes.clear()

    # ------------------------------------------------------------------ passes

    def admit(self, new: Sequence[Generation], first_row: int) -> Sampled:
        """Give rows to `new`, from `first_row` on, and sample the next token of each.

        Every prompt that is not in `prefixes` is computed, all of them in one packed pass; generations with the same
        key copy it. A second pass adds the tokens that a preempted generation had sampled.
        """
        self.cache.reserve(first_row + len(new), max(g.length for g in new))
        logits: dict[Generation, Tensor] = {}
        row_of = {g: first_row + i for i, g in enumerate(new)}
        leaders = self._leaders(new)
        spans = [Span(row_of[g], 0, g.length if g.key is None else len(g.request.token_ids)) for g in leaders]
        for g, span, logit_V in zip(leaders, spans, self._extend(leaders, spans), strict=True):
            self.prompt_tokens += span.stop
            if g.key is None:
                logits[g] = logit_V
            else:
                self.prefixes[g.key] = Prefix(self.cache.read(span.row, span.stop), logit_V)

        led = set(leaders)
        for g in new:
            if g.key is not None and g not in led:
                self.cache.write(row_of[g], self.prefixes[g.key].states)
                self.prefix_hits += 1
        partial = [g for g in new if g.key is not None and g.token_C]
        spans = [Span(row_of[g], len(g.request.token_ids), g.length) for g in partial]
        self.prompt_tokens += sum(len(g.token_C) for g in partial)
        logits.update(zip(partial, self._extend(partial, spans), strict=True))
        logits.update({g: self.prefixes[g.key].logit_V for g in new if g.key is not None and g not in logits})
        return self._sample(new, torch.stack([logits[g] for g in new]))

    def decode(self, rows: Sequence[Generation]) -> Sampled:
        """One more token for every row: the last one goes in, the next one comes out."""
        length_R = [g.length - 1 for g in rows]  # the last token is not in the cache yet
        self.cache.reserve(len(rows), max(length_R) + 1)
        self.decode_steps += 1
        position_R = torch.tensor(length_R, device=self.model.device)
        token_R = [g.token_C[-1] for g in rows]
        logit_RV = self._forward(DecodePlan(self.cache, position_R), token_R, position_R, None)
        return self._sample(rows, logit_RV)

    def cost(self, new: Generation, beside: Iterable[Generation]) -> int:
        """Tokens that admitting `new` together with `beside` adds to the pass."""
        shared = new.key is not None and (new.key in self.prefixes or any(new.key == g.key for g in beside))
        return len(new.token_C) if shared else new.length

    def _leaders(self, new: Sequence[Generation]) -> list[Generation]:
        """Those whose prompt must be computed: one for each key, and everyone without a key."""
        keyed = {g.key: g for g in reversed(new) if g.key is not None and g.key not in self.prefixes}
        return [g for g in new if g.key is None or keyed.get(g.key) is g]

    def _extend(self, generations: Sequence[Generation], spans: Sequence[Span]) -> list[Tensor]:
        """Compute each span of each generation's tokens; the logits after its last one, [V] each."""
        if not spans:
            return []
        token_S, last, device = [], [], self.model.device
        for g, span in zip(generations, spans, strict=True):
            token_S += (*g.request.token_ids, *g.token_C)[span.start : span.stop]
            last.append(len(token_S) - 1)
        position_S = torch.cat([torch.arange(s.start, s.stop, device=device) for s in spans])
        plan = PackedPlan(self.cache, spans)
        return list(self._forward(plan, token_S, position_S, torch.tensor(last, device=device)))

    def _forward(
        self, plan: PackedPlan | DecodePlan, token_S: list[int], position_S: Tensor, keep_R: Tensor | None
    ) -> Tensor:
        """float32 logits at `keep_R` (None: everywhere), by the model's own head: its caps and scales included."""
        # no_grad, not inference_mode: a buffer made here would poison the next backward pass of a shared model.
        with torch.no_grad(), _evaluating(self.model):
            logit_1RV = self.model(
                input_ids=torch.tensor([token_S], device=position_S.device),
                position_ids=position_S[None],
                use_cache=False,
                logits_to_keep=0 if keep_R is None else keep_R,
                plan=plan,
            ).logits
        layers: int = self.model.config.num_hidden_layers
        if len(plan.layers) != layers:
            raise ModelError(
                f"{len(plan.layers)} of {layers} layers of {type(self.model).__name__} keep their state in keys and "
                "values; recurrent or convolutional layers are not supported here"
            )
        return logit_1RV[0].float()

    def _sample(self, generations: Sequence[Generation], logit_RV: Tensor) -> Sampled:
        uniform_R = uniforms([g.request.noise for g in generations], [g.position for g in generations])
        token_R, logprob_R = sample(logit_RV, [g.request.params for g in generations], uniform_R)
        bad_R = ~logprob_R.isfinite()
        if bool(bad_R.any()):
            name = generations[int(bad_R.nonzero()[0])].request.id
            raise RolloutError(f"sample '{name}': the model's logits are not finite numbers; are its weights sound?")
        return list(zip(token_R.tolist(), logprob_R.tolist(), strict=True))

    # ------------------------------------------------------------------ weights

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every tensor into its place, in the names of `model.state_dict()`; tied ones may come once or twice."""
        own = self.model.state_dict(keep_vars=True)  # keep_vars: tied names give one and the same object
        missing = {id(tensor): name for name, tensor in reversed(own.items())}
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise WeightSyncError(
                        f"'{name}' was sent, but {type(self.model).__name__} has no tensor of this name"
                    )
                target = own[name]
                if target.shape != tensor.shape:
                    raise WeightSyncError(
                        f"'{name}' was sent with shape {list(tensor.shape)}, the model has {list(target.shape)}"
                    )
                if missing.pop(id(target), None) is not None:
                    target.copy_(tensor)
                elif not torch.equal(target, tensor.to(target)):
                    raise WeightSyncError(f"'{name}' is tied to, or repeats, a tensor that was sent with other values")
        if missing:
            first, *others = missing.values()
            raise WeightSyncError(f"'{first}' was not sent" + (f", nor were {len(others)} more" if others else ""))


def _context(model: Any) -> int:
    """Positions that the model can attend over; refuses a model that the engine cannot drive."""
    config, kind = model.config, type(model).__name__
    if config._attn_implementation != NAME:
        raise ModelError(f"{kind} has no attention hook; call treadle.attention.install(model) first")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{kind}.forward takes no logits_to_keep, so the engine cannot ask it for single logits")
    settings: dict[str, Any] = config.to_dict()
    if "max_position_embeddings" not in settings:
        raise ModelError(f"the configuration of {kind} does not say how long its context is (max_position_embeddings)")
    window: int | None = settings.get("sliding_window")
    slides = "sliding_attention" in (settings.get("layer_types") or ["sliding_attention"])
    limit: int = settings["max_position_embeddings"]
    return min(limit, window) if window is not None and slides else limit


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Dropout and the like off; a trainer that shares the model finds it as it was."""
    training = [m for m in model.modules() if m.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
