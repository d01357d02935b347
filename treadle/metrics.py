"""Every metric that a run writes: its name, unit, weighting and definition. `docs/metrics.md` is made from it.

`OURS` lists what the loop, the engines and the roles measure; an algorithm declares its own beside its code, in
`Algorithm.metrics`. A name may hold a placeholder, as in `{role}/grad_norm` and `reward/{part}`. A metric that is not
defined is not written: the step that first reports it ends the run with an error that says which line to add.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from treadle.errors import ConfigError, TrainingError

Weighting = Literal["token", "sequence", "sample", "group", "update", "step", "max"]
"""What each of counts once: a trained token · a trajectory · a sample · a group · an optimizer step · (step) there
is one number a step · (max) the largest counts. A mean is one sum over one count, never one of means."""


@dataclass(frozen=True, slots=True)
class Metric:
    """`Metric("policy/surprise", "nats", "−log π of the token")`: a mean over trained tokens unless `weighting` says
    otherwise."""

    name: str
    unit: str
    definition: str
    weighting: Weighting = "token"


class Registry:
    """The metrics that a run may write: `OURS` and those that its algorithm declares."""

    def __init__(self, declared: Iterable[Metric] = (), owner: type = object) -> None:
        """`owner`: the class that declares them. Raises ConfigError for what is no metric of an objective."""
        declared = tuple(declared)
        for metric in declared:
            if not isinstance(metric, Metric) or not metric.name.startswith(("policy/", "critic/")):
                name = repr(metric.name if isinstance(metric, Metric) else metric)
                raise ConfigError(
                    f"{owner.__qualname__}.metrics declares {name:.80}; allowed: Metric(name, unit, definition) with a "
                    'name that begins with policy/ (what `loss` reports) or critic/ (`value_loss`), as "policy/entropy"'
                )
        self._owner, self._declared = owner, declared
        self._exact = {m.name: m for m in (*OURS, *declared) if "{" not in m.name}
        patterns = [m for m in (*OURS, *declared) if "{" in m.name]
        self._patterns = [(pattern(m.name), m) for m in sorted(patterns, key=_literal, reverse=True)]

    def find(self, name: str) -> Metric | None:
        """The definition of a metric by the name under which it is written."""
        if name in self._exact:
            return self._exact[name]
        return next((metric for matches, metric in self._patterns if matches.fullmatch(name)), None)

    def check(self, names: Iterable[str]) -> None:
        """Raises TrainingError for the first that has no definition, with the line to add."""
        for name in names:
            if self.find(name) is None:
                where = self._line(name) if name.startswith(("policy/", "critic/")) else "to OURS in treadle/metrics.py"
                raise TrainingError(f"the metric {name!r} has no definition, so nobody could read it. Add one {where}")

    def _line(self, name: str) -> str:
        """What to write into the algorithm's class, which cannot name itself there."""
        metric = f'treadle.Metric("{name}", unit="…", definition="…")'
        if "metrics" in vars(self._owner):
            return f"to {self._owner.__qualname__}.metrics:\n    {metric}"
        base = self._owner.__mro__[1]
        inherited = f"*{base.__qualname__}.metrics, {metric}" if self._declared else f"{metric},"
        return f"to class {self._owner.__qualname__}:\n    metrics = ({inherited})"


def _literal(metric: Metric) -> int:
    """Characters of a name outside of placeholders: of two names that fit, the more telling is meant."""
    return len(re.sub(r"\{\w+\}", "", metric.name))


def pattern(name: str) -> re.Pattern[str]:
    """What a name with placeholders stands for. A reward's part is whatever its function called it."""
    parts = re.split(r"(\{\w+\})", name)
    return re.compile("".join(_PLACEHOLDERS.get(p, "[^/]+") if p.startswith("{") else re.escape(p) for p in parts))


_PLACEHOLDERS = {"{part}": r"(?s:.+)", "{k}": r"\d+", "{role}": "(?:policy|critic)"}

_PASS = (
    "probability that at least one of k answers passes, where passing is a reward of at least 1 (what rewards of 0 or "
    "1, or of -1 or 1, call right): mean over prompts of 1 - C(n - c, k) / C(n, k) for c of n answers that pass, the "
    "unbiased estimator (Chen et al. 2021, arXiv 2107.03374); k = 1, 2, 4, … up to the answers asked for"
)

OURS: tuple[Metric, ...] = (
    # rewards and answers of the groups that the step trained
    Metric("reward/mean", "reward", "reward of a sample", "sample"),
    Metric("reward/{part}", "reward", "one part of the reward, before weighting, where there are several", "sample"),
    Metric("reward/pass@{k}", "share", _PASS, "group"),
    Metric("reward/equal_groups", "share", "groups whose samples all have the same reward", "group"),
    Metric("response/tokens", "tokens", "sampled tokens of a trajectory", "sequence"),
    Metric("response/tokens_max", "tokens", "sampled tokens of the longest trajectory", "max"),
    Metric("response/truncated", "share", "trajectories that a limit cut", "sequence"),
    Metric(
        "response/with_signal", "share", "trajectories that can move the weights (advantages not all zero)", "sequence"
    ),
    Metric("samples/failed", "share", "samples that failed (reward, tool or engine) and train nothing", "sample"),
    Metric("staleness/mean", "versions", "how many publishes ago the weights were made that sampled a token"),
    Metric("staleness/max", "versions", "the largest of these", "max"),
    Metric("advantage/mean", "advantage", "advantage of a trained token"),
    Metric("advantage/std", "advantage", "standard deviation of the advantages of trained tokens"),
    Metric("advantage/max", "advantage", "the largest absolute advantage", "max"),
    Metric("data/skipped_prompts", "prompts", "rows kept out so far: too long, malformed", "max"),
    # trainer against rollout engine
    Metric(
        "discrepancy/mean",
        "nats",
        "|log π_trainer - log π_sampler| of a token, the trainer's at the weights that the step started with. At "
        "staleness 0 both are the same weights and this is how far the two implementations differ; otherwise what the "
        "weights have moved since sampling comes on top. Over tokens that the step ran: rows without signal may have "
        "been left out",
    ),
    Metric("discrepancy/max", "nats", "the largest of these", "max"),
    Metric("discrepancy/kl", "nats", "k3 estimate of KL(π_sampler ‖ π_trainer) over the same tokens"),
    Metric("discrepancy/correlation", "1", "Pearson's correlation of the two log-probs over the same tokens"),
    Metric(
        "discrepancy/kl_reverse",
        "nats",
        "estimate r·log r - r + 1 of KL(π_trainer ‖ π_sampler) over the same tokens, r = π_trainer / π_sampler",
    ),
    Metric("discrepancy/chi2", "1", "estimate (r - 1)² of the χ² divergence of π_trainer from π_sampler, by token"),
    Metric("discrepancy/chi2_sequence", "1", "the same with r of whole trajectories", "sequence"),
    Metric("discrepancy/perplexity_trainer", "1", "exp of the mean of -log π_trainer over the same tokens", "step"),
    Metric("discrepancy/perplexity_sampler", "1", "exp of the mean of -log π_sampler over them", "step"),
    Metric(
        "discrepancy/effective_share",
        "share",
        "effective sample size (Σ r)² / Σ r² of the same tokens over their number: 1 where all ratios are equal",
        "step",
    ),
    Metric(
        "correction/rejected_tokens", "share", "sampled tokens that no loss counts: `correction`, `truncated=reject`"
    ),
    Metric("correction/rejected", "share", "trajectories of which no token is left by that", "sequence"),
    # publishes
    Metric("publish/probe_gap", "nats", "largest difference of the two log-probs on the probe after a publish", "max"),
    Metric("publish/seconds", "seconds", "a whole publish to engines in other processes, its probe included", "step"),
    Metric("publish/assembly", "seconds", "of it, gathering and casting weights and finding what changed", "step"),
    Metric("publish/wire", "seconds", "handing them to the transport, and waiting for receivers that are full", "step"),
    Metric("publish/pause", "seconds", "generation stood still", "step"),
    Metric("publish/load", "seconds", "the engines loaded what had arrived", "step"),
    Metric("publish/readback", "seconds", "they read it back out of their layers", "step"),
    Metric("publish/probe", "seconds", "they answered the probe, and the policy scored it", "step"),
    Metric("publish/digest", "seconds", "they digested what arrived, beside the wire", "step"),
    Metric("publish/megabytes", "MB", "bytes sent, once for all engines", "step"),
    Metric("publish/unchanged", "share", "weights with the bits of the publish before (weights.delta)", "step"),
    # engines in processes of their own
    Metric("rollout/fenced", "engines", "rollout engines given up so far, because they died or hung", "max"),
    Metric("rollout/continued", "requests", "requests that went on elsewhere after that, so far", "max"),
    Metric("rollout/waiting", "requests", "requests that no engine serves yet, at the end of the step", "max"),
    Metric("rollout/turns", "hand-overs", "times that training and generation handed devices over, so far", "max"),
    Metric("rollout/turn_seconds", "seconds", "what that took, so far", "max"),
    Metric("rollout/{engine}/queue", "requests", "requests that wait inside an engine, at the end of the step", "max"),
    Metric("rollout/{engine}/running", "requests", "requests that an engine serves, at the end of the step", "max"),
    Metric("rollout/{engine}/tokens_per_second", "tokens/s", "tokens of an engine since the step before", "max"),
    Metric("rollout/{engine}/prefix_hits", "share", "prompt tokens that an engine found in its cache, so far", "max"),
    Metric("rollout/{engine}/preemptions", "requests", "requests that an engine put off for want of cache", "max"),
    # what a training engine says of each role; role: policy, critic
    Metric("{role}/loss", "1", "the loss, normalised over the mini-batch", "update"),
    Metric("{role}/tokens", "tokens", "trained tokens of a mini-batch", "update"),
    Metric(
        "{role}/useful_tokens",
        "share",
        "tokens of the rows that were run, what all of a group begin with counted once, by tokens that went through "
        "the model",
        "token",
    ),
    Metric("{role}/grad_norm", "1", "global norm of the gradient before clipping, skipped steps left out", "update"),
    Metric("{role}/learning_rate", "1", "learning rate", "update"),
    Metric("{role}/updated", "share", "optimizer steps that changed the weights", "update"),
    Metric("{role}/skipped_steps", "steps", "optimizer steps skipped for a gradient not finite, so far", "max"),
    # the clock; stage: generate, observe, update, publish
    Metric("time/{stage}", "seconds", "what the loop waited for this stage", "step"),
    Metric("time/step", "seconds", "all stages together", "step"),
    Metric("time/tokens_per_second", "tokens/s", "sampled tokens that the step trained, by time/step", "step"),
    Metric(
        "time/{stage}/tokens_per_second",
        "tokens/s",
        "generate: sampled tokens; observe, update: tokens passed over, a prompt once for its group, once for each "
        "model and epoch. By the stage's seconds. Not for generate where it goes on during other stages "
        "(max_staleness above 0)",
        "step",
    ),
    Metric(
        "time/{stage}/matrix_share",
        "share",
        "of the rate at which the devices of the roles at work multiply large matrices in the policy's precision "
        "(measured at the start, all at once; the fastest stage's, if that was more) that the stage reached: "
        "multiplications that its distinct tokens need, a backward pass counted as two forward ones, nothing "
        "recomputed. Stages as above, and the whole step, by the devices of all these roles (a reward model counts for "
        "nothing). Not for models with experts",
        "step",
    ),
    # evaluations.jsonl; way: sampled, greedy
    Metric("evaluation/{way}", "reward", "reward of a held-out sample", "sample"),
    Metric("evaluation/{way}/{part}", "reward", "one part of the reward, where there are several", "sample"),
    Metric("evaluation/{way}/pass@{k}", "share", _PASS, "group"),
    Metric("evaluation/{way}_tokens", "tokens", "sampled tokens of a trajectory", "sequence"),
    Metric("evaluation/{way}_failed", "share", "held-out samples that failed", "sample"),
)
"""All but what algorithms declare."""
