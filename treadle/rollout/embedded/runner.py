"""The passes over the model: prompts, one token for every row, new weights; all on the device's thread.

Suffixes: R rows · S new tokens of this pass laid end to end · V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treadle.attention import NAME, sliding_window
from treadle.errors import ModelError, RolloutError, WeightSyncError
from treadle.rollout.embedded.cache import Row, Shelves, Slot
from treadle.rollout.embedded.decoder import Decoder, disagreement
from treadle.rollout.embedded.generation import Generation, PrefixKey
from treadle.rollout.embedded.kernels import Kernels
from treadle.rollout.embedded.plans import Plan, PromptPlan, Span
from treadle.rollout.embedded.sampling import uniforms

logger = logging.getLogger(__name__)
Sampled = list[tuple[int, float]]
"""Token and log-prob for each generation, in the order asked."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt that was computed once: where its keys and values are, and the logits after its last token."""

    slot: Slot
    logit_V: Tensor


@dataclass(slots=True)
class Work:
    """What was done so far: passes, their tokens, their seconds and the operations of their linear layers."""

    decode_steps: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_flops: float = 0.0
    prompt_passes: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    prompt_flops: float = 0.0
    prefix_hits: int = 0


class Runner:
    """A causal LM with a cache: rows of running generations, and prompts that they share."""

    def __init__(self, model: Any, kernels: Kernels) -> None:
        self.model, self.kernels = model, kernels
        self._device = model.device
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.context = _context(model)
        self.prefixes: dict[PrefixKey, Prefix] = {}
        self.work = Work()
        self.decoder: Decoder | None = None  # None: passes go through the model's own modules
        self._candidate = Decoder(model, kernels) if Decoder.knows(model) else None
        self._rows: dict[Generation, Row] = {}
        self._slots, self._prompts = Shelves(kernels.cache_dtype), Shelves(kernels.cache_dtype)
        head = model.get_output_embeddings()
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        self._flops = 2.0 * sum(
            m.weight.numel() for m in linears
        )  # of one token; Mixture experts are not linear layers
        self._head_flops = 2.0 * head.weight.numel()

    @property
    def cache_bytes(self) -> int:
        return self._slots.nbytes + self._prompts.nbytes

    def leave(self) -> None:
        """Take the rows of everyone; their memory stays for the next ones."""
        self._rows.clear()

    def forget(self) -> None:
        """Drop all that was computed with the weights, and its memory."""
        self._rows.clear()
        self.prefixes.clear()
        self._slots.drop()
        self._prompts.drop()

    # ------------------------------------------------------------------ passes

    def admit(self, new: Sequence[Generation], beside: Sequence[Generation]) -> Sampled:
        """Give rows to `new`, `beside` those that run, and sample the next token of each.

        Every prompt that is not in `prefixes` is computed, all of them in one packed pass, and generations with the
        same key share it. A second pass adds the tokens that a preempted generation had sampled.
        """
        began = time.perf_counter()
        self._retain(beside)
        logits = self._prompt_pass(new)
        partial = [g for g in new if g.key is not None and g.token_C]
        spans = [Span(self._rows[g], len(g.request.token_ids), g.length) for g in partial]
        logits.update(zip(partial, self._extend(partial, spans), strict=True))
        logits.update({g: self.prefixes[g.key].logit_V for g in new if g.key is not None and g not in logits})
        sampled = self._sample(new, torch.stack([logits[g] for g in new]))
        self.work.prompt_passes += 1
        self.work.prompt_seconds += time.perf_counter() - began
        return sampled

    def decode(self, rows: Sequence[Generation]) -> Sampled:
        """One more token for every row: the last one goes in, the next one comes out."""
        began = time.perf_counter()
        self._retain(rows)
        length = {g: g.length - 1 for g in rows}  # the last token is not in the cache yet
        self._slots.make_room({row.own: length[g] + 1 - row.shared for g, row in self._rows.items()})
        order = sorted(rows, key=lambda g: self.kernels.order(self._rows[g]))
        lengths = [length[g] for g in order]
        plan = self.kernels.decode_plan([self._rows[g] for g in order], lengths, self.model.device)
        logit_RV = self._forward(plan, [g.token_C[-1] for g in order], torch.tensor(lengths), None)
        drawn = dict(zip(order, self._sample(order, logit_RV), strict=True))
        self.work.decode_steps += 1
        self.work.decode_tokens += len(rows)
        self.work.decode_flops += len(rows) * (self._flops + self._head_flops)
        self.work.decode_seconds += time.perf_counter() - began
        return [drawn[g] for g in rows]

    def cost(self, new: Generation, beside: Iterable[Generation]) -> int:
        """Tokens that admitting `new` together with `beside` adds to the pass."""
        shared = new.key is not None and (new.key in self.prefixes or any(new.key == g.key for g in beside))
        return len(new.token_C) if shared else new.length

    def _retain(self, running: Sequence[Generation]) -> None:
        """Free the slots of rows that have ended, and of prompts that nobody needs."""
        self._rows = {g: self._rows[g] for g in running}
        self._slots.retain({row.own for row in self._rows.values()})
        used = {row.prompt for row in self._rows.values() if row.prompt is not None}
        self._prompts.retain(used | {prefix.slot for prefix in self.prefixes.values()})

    def _prompt_pass(self, new: Sequence[Generation]) -> dict[Generation, Tensor]:
        """Make the rows of `new` and compute the prompts that are not there; the logits after those without a key."""
        keyed = {g.key: g for g in reversed(new) if g.key is not None and g.key not in self.prefixes}
        leaders = [g for g in new if g.key is None or keyed.get(g.key) is g]
        apart = {g: len(g.request.token_ids) if g.key and self.kernels.shares_prompts else 0 for g in new}
        own = self._slots.add([g.length + 1 - apart[g] for g in new])
        self._rows.update({g: Row(slot) for g, slot in zip(new, own, strict=True)})
        slots = iter(self._prompts.add([len(g.request.token_ids) for g in leaders if g.key is not None]))
        spans = [
            Span(self._rows[g], 0, g.length) if g.key is None else Span(Row(next(slots)), 0, len(g.request.token_ids))
            for g in leaders
        ]
        logits: dict[Generation, Tensor] = {}
        for g, span, logit_V in zip(leaders, spans, self._extend(leaders, spans), strict=True):
            if g.key is None:
                logits[g] = logit_V
            else:
                self.prefixes[g.key] = Prefix(span.row.own, logit_V)
        self.work.prefix_hits += len(new) - len(leaders)
        for g in new:
            if g.key is None:
                continue
            row, slot = self._rows[g], self.prefixes[g.key].slot
            if self.kernels.shares_prompts:
                row.prompt, row.shared = slot, apart[g]
            else:
                row.own.copy_from(slot, len(g.request.token_ids))
        return logits

    def _extend(self, generations: Sequence[Generation], spans: Sequence[Span]) -> list[Tensor]:
        """Compute each span of each generation's tokens; the logits after its last one, [V] each."""
        if not spans:
            return []
        token_S, last = [], []
        for g, span in zip(generations, spans, strict=True):
            token_S += (*g.request.token_ids, *g.token_C)[span.start : span.stop]
            last.append(len(token_S) - 1)
        position_S = torch.cat([torch.arange(s.start, s.stop) for s in spans])
        self.work.prompt_tokens += len(token_S)
        self.work.prompt_flops += len(token_S) * self._flops + len(spans) * self._head_flops
        return list(self._forward(PromptPlan(spans), token_S, position_S, torch.tensor(last)))

    def _forward(self, plan: Plan, token_S: list[int], position_S: Tensor, keep_R: Tensor | None) -> Tensor:
        """Logits [R, V] at `keep_R` (None: everywhere)."""
        device = self.model.device
        keep_R = None if keep_R is None else keep_R.to(device)
        # no_grad, not inference_mode: a buffer made here would poison the next backward pass of a shared model.
        with torch.no_grad(), _evaluating(self.model):
            if self._candidate is not None:
                self._prove(self._candidate)
            run = self.decoder or self._modules
            return run(plan, torch.tensor(token_S, device=device), position_S.to(device), keep_R)

    def _modules(self, plan: Plan, token_S: Tensor, position_S: Tensor, keep_R: Tensor | None) -> Tensor:
        """A pass through the model's own modules and head: its caps and scales included."""
        logit_1RV = self.model(
            input_ids=token_S[None],
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
        return logit_1RV[0]

    def _sample(self, generations: Sequence[Generation], logit_RV: Tensor) -> Sampled:
        uniform_R = uniforms([g.request.noise for g in generations], [g.position for g in generations])
        token_R, logprob_R = self.kernels.sample(logit_RV, [g.request.params for g in generations], uniform_R)
        bad_R = ~logprob_R.isfinite()
        if bool(bad_R.any()):
            name = generations[int(bad_R.nonzero()[0])].request.id
            raise RolloutError(f"sample '{name}': the model's logits are not finite numbers; are its weights sound?")
        return list(zip(token_R.tolist(), logprob_R.tolist(), strict=True))

    # ------------------------------------------------------------------ the own decoder

    def _prove(self, candidate: Decoder) -> None:
        """Take the own decoder if it gives the model's logits: after a prompt of its own, and after a shared one."""
        name, device = type(self.model).__name__, self.model.device
        lengths = [7, 4]
        noise = torch.Generator().manual_seed(0)
        token_S = torch.randint(self.vocabulary, (sum(lengths),), generator=noise).to(device)
        position_S = torch.cat([torch.arange(n, device=device) for n in lengths])
        ends_R = torch.tensor(lengths, device=device).cumsum(0) - 1
        slots, prompts = Shelves(self.kernels.cache_dtype), Shelves(self.kernels.cache_dtype)

        def prompt_plan(lengths: list[int]) -> tuple[PromptPlan, list[Slot]]:
            own = prompts.add(lengths)
            return PromptPlan([Span(Row(slot), 0, n) for slot, n in zip(own, lengths, strict=True)]), own

        theirs_RV = self._modules(prompt_plan(lengths)[0], token_S, position_S, ends_R).float()
        if not bool(theirs_RV.isfinite().all()):
            return  # damaged weights show in this very pass
        before_S = torch.ones(len(token_S), dtype=torch.bool, device=device)
        before_S[ends_R] = False
        plan, filled = prompt_plan([n - 1 for n in lengths])
        candidate(plan, token_S[before_S], position_S[before_S], None)
        rows = [Row(slot) for slot in slots.add(lengths)]
        rows[0].own.copy_from(filled[0], lengths[0] - 1)
        if self.kernels.shares_prompts:
            rows[1].prompt, rows[1].shared = filled[1], lengths[1] - 1
        else:
            rows[1].own.copy_from(filled[1], lengths[1] - 1)
        decode_plan = self.kernels.decode_plan(rows, [n - 1 for n in lengths], device)
        ours_RV = candidate(decode_plan, token_S[ends_R], position_S[ends_R], None).float()
        gap = disagreement(ours_RV, theirs_RV)
        self._candidate = None
        if gap <= (0.1 if self.model.dtype.itemsize < 4 else 1e-3):
            self.decoder = candidate
            logger.info("%s is decoded by the engine's own pass, kernels: %s", name, self.kernels.name)
        else:
            logger.warning("%s is decoded through its own modules: the engine's pass is off by %.1g", name, gap)

    # ------------------------------------------------------------------ weights

    def load(
        self, weights: Iterable[tuple[str, Tensor]], places: Callable[[], Mapping[str, Tensor]] | None = None
    ) -> None:
        """Copy every tensor into its place; tied ones may come once or twice. `places`: by the names that are sent, if
        not those of `model.state_dict()`."""
        # keep_vars: tied names give one and the same object
        own: dict[str, Tensor] = dict(places()) if places is not None else self.model.state_dict(keep_vars=True)
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
        self.refresh()

    def refresh(self) -> None:
        """The model's weights have changed."""
        if self.decoder is not None:
            self.decoder.refresh()

    def offload(self) -> None:
        """Take the model to the host's memory. Where it is there already nothing moves."""
        self.refresh()
        self.model.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # others, in other processes, count on it

    def onload(self) -> None:
        self.model.to(self._device)


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
    limit: int = settings["max_position_embeddings"]
    return min(limit, sliding_window(settings) or limit)


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
