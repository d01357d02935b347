"""What a step is measured by, beside what the engines report. Every mean is over samples or tokens, never of means."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import RewardError
from treadle.runs.metrics import TIME
from treadle.types import Correlation, Ended, Group, Kind, Max, Mean, Provenance, Sample, Spread, Statistic, Statistics

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.algorithms.base import Algorithm, Role
    from treadle.batch import Batch
    from treadle.controller.config import Place
    from treadle.handles import Cost, RolloutHandle
    from treadle.runs.progress import Progress


class Stopwatch:
    """Seconds by stage of one step: `with watch("update"): …`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._progress.stage(stage, 0, 1)
        begin = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - begin
        self._progress.stage(stage, 1, 1)


_OF_POOLS = ("fenced", "continued", "waiting", "turns", "turn_seconds")


def measure_rollout(rollout: RolloutHandle) -> Statistics:
    """What a pool of engines says of itself, and of each of them; nothing for an engine of this process."""
    found = rollout.stats().items()
    return {f"rollout/{name}": Max(value) for name, value in found if name in _OF_POOLS or "/" in name}


def measure_batch(groups: Sequence[Group], batch: Batch, version: int) -> Statistics:
    """Rewards, lengths, signal, staleness, advantages and log-prob discrepancy of the groups of one step, trained under
    weights `version`; `batch` packs them, as it is after learning."""
    samples = [s for g in groups for s in g.usable if s.kind is Kind.TRAIN]
    trajectories = [t for s in samples for t in s.trajectories]
    failed = sum(s.failure is not None for g in groups for s in g.samples)
    asked = sum(len(g.samples) for g in groups)
    age = version - np.concatenate([t.version_T[t.version_T >= 0] for t in trajectories] or [np.empty(0, np.int32)])
    reward, parts = _rewards(samples)
    return {
        "reward/mean": reward,
        **{f"reward/{name}": part for name, part in parts.items()},
        **{f"reward/pass@{k}": share for k, share in pass_at(groups, Kind.TRAIN).items()},
        "reward/equal_groups": Mean(sum(_equal(g) for g in groups), len(groups)),
        "response/tokens": Mean(sum(t.sampled_tokens for t in trajectories), len(trajectories)),
        "response/tokens_max": Max(max((t.sampled_tokens for t in trajectories), default=0)),
        "response/truncated": Mean(sum(t.ended is Ended.TRUNCATED for t in trajectories), len(trajectories)),
        "response/with_signal": Mean(int(batch.signal_N.sum()), int((~batch.baseline_N).sum())),
        "samples/failed": Mean(failed, asked),
        "staleness/mean": Mean(int(age.sum()), age.size),
        "staleness/max": Max(int(age.max()) if age.size else 0),
        **_advantages(batch),
        **_discrepancy(batch),
        **_rejected(batch),
    }


def measure_evaluation(groups: Mapping[str, Sequence[Group]]) -> Statistics:
    """Reward, pass@k and length over held-out samples, for each way of sampling: "sampled", "greedy"."""
    statistics: dict[str, Statistic] = {}
    for way, found in groups.items():
        samples = [s for g in found for s in g.usable]
        trajectories = [t for s in samples for t in s.trajectories]
        asked = sum(len(g.samples) for g in found)
        statistics[f"evaluation/{way}_failed"] = Mean(asked - len(samples), asked)
        mean, parts = _rewards(samples)
        statistics[f"evaluation/{way}"] = mean
        statistics |= {f"evaluation/{way}/{name}": part for name, part in parts.items()}
        passed = pass_at(found, Kind.EVALUATION)
        statistics |= {f"evaluation/{way}/pass@{k}": share for k, share in passed.items()}
        statistics[f"evaluation/{way}_tokens"] = Mean(sum(t.sampled_tokens for t in trajectories), len(trajectories))
    return statistics


PASSED = 1.0 - 1e-6
"""The reward from which an answer counts as passed: 1, less the rounding of a weighted sum."""


def pass_at(groups: Sequence[Group], kind: Kind) -> dict[int, Mean]:
    """pass@k for k = 1, 2, 4, … up to the samples asked of a prompt: the mean over prompts of the unbiased estimate
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374), of `c` passed among `n` that did not fail. A prompt
    with fewer than k of these is left out."""
    asked = max((sum(s.kind is kind for s in g.samples) for g in groups), default=0)
    counts = []
    for group in groups:
        rewards = [s.reward.value for s in group.usable if s.kind is kind and s.reward is not None]
        counts.append((len(rewards), sum(r >= PASSED for r in rewards)))
    shares: dict[int, Mean] = {}
    for k in (1 << i for i in range(asked.bit_length())):
        found = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k]
        shares[k] = Mean(math.fsum(found), len(found))
    return shares


_OURS = re.compile(r"mean|equal_groups|pass@.*")


def _rewards(samples: Sequence[Sample]) -> tuple[Mean, dict[str, Mean]]:
    """Mean reward over samples, and those of its parts where it has several."""
    rewards = [s.reward for s in samples if s.reward is not None]
    names = sorted({name for r in rewards for name in r.parts})
    for name in filter(_OURS.fullmatch, names):
        raise RewardError(f"a reward has a part {name!r}, but reward/{name} is a metric of ours; give it another name")
    parts = {name: [r.parts[name] for r in rewards if name in r.parts] for name in names}
    whole = Mean(sum(r.value for r in rewards), len(rewards))
    return whole, {name: Mean(sum(found), len(found)) for name, found in parts.items() if len(names) > 1}


def _equal(group: Group) -> bool:
    """Whether a group's rewards say nothing about which sample was better."""
    values = [s.reward.value for s in group.usable if s.reward is not None]
    return not values or max(values) == min(values)


def _advantages(batch: Batch) -> Statistics:
    """Of the trained tokens."""
    if batch.advantage_T is None:
        return {}
    advantage_T = batch.advantage_T[batch.mask_T].double().numpy(force=True)
    return {
        "advantage/mean": Mean(float(advantage_T.sum()), advantage_T.size),
        "advantage/std": Spread.of(advantage_T),
        "advantage/max": Max(float(np.abs(advantage_T).max(initial=0.0))),
    }


def _discrepancy(batch: Batch) -> Statistics:
    """The trainer's log-probs against those that the rollout engine sampled by, over trained tokens that a pass of the
    trainer has seen."""
    if batch.old_logprob_T is None:
        return {}
    import torch

    seen_T = batch.mask_T & ~batch.old_logprob_T.isnan()
    [at_M] = seen_T.nonzero(as_tuple=True)
    trainer_M, sampler_M = (x[at_M].double() for x in (batch.old_logprob_T, batch.sampling_logprob_T))
    x_M, tokens = trainer_M - sampler_M, len(at_M)
    low_M = x_M.clamp(max=FAR)
    near_M = low_M.clamp(min=-FAR)
    r_M = near_M.exp()
    square = float(r_M.square().sum())
    # Of whole trajectories that were seen.
    x_N = batch.sum_N(torch.zeros(len(seen_T), dtype=torch.float64).index_copy_(0, at_M, x_M))
    r_N = x_N.clamp(-FAR, FAR).exp()[batch.count_N(seen_T) > 0]
    total, reverse = float(r_M.sum()), float((r_M * near_M - near_M.expm1()).sum())
    return {
        "discrepancy/mean": Mean(float(x_M.abs().sum()), tokens),
        "discrepancy/max": Max(float(x_M.abs().max()) if tokens else 0.0),
        "discrepancy/kl": Mean(float((low_M.expm1() - low_M).sum()), tokens),
        "discrepancy/kl_reverse": Mean(reverse, tokens),
        "discrepancy/chi2": Mean(float((r_M - 1).square().sum()), tokens),
        "discrepancy/chi2_sequence": Mean(float((r_N - 1).square().sum()), len(r_N)),
        "discrepancy/perplexity_trainer": Mean(_perplexity(trainer_M), float(tokens > 0)),
        "discrepancy/perplexity_sampler": Mean(_perplexity(sampler_M), float(tokens > 0)),
        "discrepancy/effective_share": Mean(total**2 / square if square else 0.0, tokens),
        "discrepancy/correlation": Correlation.of(trainer_M.numpy(), sampler_M.numpy()),
    }


def _perplexity(logprob_M: Tensor) -> float:
    return float((-logprob_M.mean()).clamp(max=700.0).exp()) if len(logprob_M) else 0.0


def _rejected(batch: Batch) -> Statistics:
    """What was sampled to train and is in no loss."""
    before_N = batch.count_N(batch.provenance_T == Provenance.SAMPLED).masked_fill(batch.baseline_N, 0)
    after_N = batch.trained_N
    lost = int(((before_N > 0) & (after_N == 0)).sum())
    return {
        "correction/rejected_tokens": Mean(int(before_N.sum() - after_N.sum()), int(before_N.sum())),
        "correction/rejected": Mean(lost, int((before_N > 0).sum())),
    }


FAR = 20.0
"""Nats. In an exponent, log-probs further apart count as this far: ratios and estimates of them stay finite."""


# ---------------------------------------------------------------------- speed


def measure_speed(
    batch: Batch, seconds: Mapping[str, float], algorithm: Algorithm, roles: Sequence[Role], speed: Speed, overlap: bool
) -> Statistics:
    """Tokens a second by stage and, where operations are known, the share of the matrix rate of the devices at work;
    `roles` were updated.

    `overlap`: generation goes on during other stages, so its own seconds say nothing.
    """
    tokens_N = batch.trained_N > 0
    observed = algorithm.before_advantages | algorithm.passes_before_loss
    whole, run = Work.of(batch, tokens_N | batch.baseline_N), Work.of(batch, tokens_N)
    learned = Work.of(batch, tokens_N & batch.signal_N)
    # Forward passes of each role, a backward pass is as much as two; and where they are made.
    stages: dict[str, tuple[Work, dict[Role, int], Collection[Place]]] = {
        "generate": (whole, {"policy": 1}, ["rollout"]),
        "observe": (run, dict.fromkeys(observed, 1), observed),
        "update": (learned, dict.fromkeys(roles, 3 * algorithm.config.epochs), roles),
    }
    statistics: dict[str, Statistic] = {}
    counted = [s for s in stages if stages[s][1] and seconds[s] > 0 and not (s == "generate" and overlap)]
    for stage in counted:
        work, passes, _ = stages[stage]
        models = len(passes) * (algorithm.config.epochs if stage == "update" else 1)
        passed = work.sampled if stage == "generate" else work.tokens * models
        statistics[f"{TIME}{stage}/tokens_per_second"] = Mean(passed, seconds[stage])
    if speed.costs is None:
        return statistics
    operations = {stage: speed.operations(work, passes) for stage, (work, passes, _) in stages.items()}
    for stage in counted:
        speed.correct(stages[stage][2], operations[stage] / seconds[stage])
    for stage in counted:
        possible = seconds[stage] * speed.rate(stages[stage][2])
        statistics[f"{TIME}{stage}/matrix_share"] = Mean(operations[stage], possible)
    possible = sum(seconds.values()) * speed.rate(place for *_, places in stages.values() for place in places)
    statistics[f"{TIME}step/matrix_share"] = Mean(sum(operations.values()), possible)
    return statistics


@dataclass(frozen=True, slots=True)
class Work:
    """What some rows make a model compute where nothing is computed twice: the prompt of a group once."""

    tokens: int
    sampled: int
    pairs: int  # of a token and one that it looks at

    @classmethod
    def of(cls, batch: Batch, keep_N: Tensor) -> Work:
        prompt_N = batch.count_N(batch.provenance_T == Provenance.PROMPT)[keep_N]
        sampled_N = batch.count_N(batch.provenance_T == Provenance.SAMPLED)[keep_N]
        length_N = batch.length_N[keep_N]
        prompts: dict[int, int] = {}
        for group, length in zip(batch.group_N[keep_N].tolist(), prompt_N.tolist(), strict=True):
            prompts[group] = max(prompts.get(group, 0), length)
        pairs_N = length_N * (length_N + 1) - prompt_N * (prompt_N + 1)
        return cls(
            tokens=sum(prompts.values()) + int((length_N - prompt_N).sum()),
            sampled=int(sampled_N.sum()),
            pairs=(sum(p * (p + 1) for p in prompts.values()) + int(pairs_N.sum())) // 2,
        )


@dataclass(slots=True)
class Speed:
    """What operations are counted by, and the rates (operations a second) that they are compared with: of each pool of
    devices that of a large matrix product at the start, or of the fastest stage since."""

    rates: dict[str, float]
    pools: Mapping[Place, str]  # where the roles work
    costs: Mapping[Role, Cost] | None  # None: a model's operations do not follow from its shapes

    def rate(self, places: Iterable[Place]) -> float:
        """Of all devices that these roles work on."""
        return sum(self.rates[pool] for pool in {self.pools[place] for place in places})

    def correct(self, places: Collection[Place], reached: float) -> None:
        """A stage that did more than was measured shows that other work was in the way then."""
        if places and reached > (known := self.rate(places)):
            self.rates |= {pool: self.rates[pool] * reached / known for pool in {self.pools[p] for p in places}}

    def operations(self, work: Work, passes: Mapping[Role, int]) -> float:
        """In the forward passes of each role."""
        assert self.costs is not None
        costs = [(self.costs[role], times) for role, times in passes.items()]
        return sum(
            times * (work.tokens * cost.token + work.sampled * cost.logits + work.pairs * cost.pair)
            for cost, times in costs
        )
