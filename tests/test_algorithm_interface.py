"""The interface carries what comes next: five throw-away algorithms, each with values by hand on a small batch.

An extra greedy sample (ReMax), a group filter and a narrowed mask (DAPO), a selection over the whole mini-batch
(Clip-Cov), ratios of whole sequences (GSPO), several components of a reward (GDPO).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import group, rewarded, trajectory
from treadle.algorithms.advantages import group_relative, whiten
from treadle.algorithms.aggregate import aggregate
from treadle.algorithms.base import Algorithm, AlgorithmConfig
from treadle.algorithms.clipping import clipped_surrogate
from treadle.algorithms.grpo import GRPO, GRPOConfig
from treadle.algorithms.ratio import ratio
from treadle.batch import Batch, Counts
from treadle.errors import TrainingError
from treadle.handles import Loss, Outputs
from treadle.types import Ended, Group, Kind, Prompt, Request, Reward, Sample


class ReMax(Algorithm):
    """The baseline of a prompt is the reward of its greedy answer (Li et al. 2023, arXiv 2310.10505)."""

    def requests(self, prompt: Prompt) -> list[Request]:
        return [*super().requests(prompt), Request(prompt, Kind.BASELINE, greedy=True)]

    def advantages(self, batch: Batch) -> Batch:
        known_G, group_N = batch.group_N.unique(return_inverse=True)
        greedy_N = batch.baseline_N
        baseline_G = batch.reward_N.new_zeros(len(known_G)).scatter(0, group_N[greedy_N], batch.reward_N[greedy_N])
        advantage_N = batch.reward_N - baseline_G[group_N]
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert batch.advantage_T is not None
        assert outputs.logprob_T is not None
        return Loss([self.term(-outputs.logprob_T * batch.advantage_T)])


class DAPO(GRPO):
    """Groups without signal are dropped, overlong samples not trained (Yu et al. 2025, arXiv 2503.14476)."""

    def keep(self, group: Group) -> str | None:
        values = {s.reward.value for s in group.usable if s.reward is not None}
        return "equal rewards" if len(values) < 2 else None

    def advantages(self, batch: Batch) -> Batch:
        batch = super().advantages(batch)
        return batch.replace(mask_T=batch.mask_T & ~batch.truncated_N[batch.row_T])


class ClipCov(GRPO):
    """Tokens of the highest covariance of log-prob and advantage get no gradient (Cui et al. 2025, 2505.22617)."""

    two_pass = True

    def select(self, batch: Batch, outputs: Outputs) -> Batch:
        assert batch.advantage_T is not None
        assert outputs.logprob_T is not None
        centred_T = outputs.logprob_T - outputs.logprob_T.mean()
        covariance_T = centred_T * (batch.advantage_T - batch.advantage_T.mean())
        return batch.replace(weight_T=torch.ones_like(covariance_T).scatter(0, covariance_T.topk(1).indices, 0.0))

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert batch.weight_T is not None
        plain = super().loss(batch, outputs)
        return dataclasses.replace(plain, terms=[self.term(plain.terms[0].term_T * batch.weight_T)])


class GSPO(GRPO):
    """One ratio per sequence, the geometric mean of its tokens' (Zheng et al. 2025, arXiv 2507.18071)."""

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert batch.advantage_T is not None
        assert outputs.logprob_T is not None
        moved_N = batch.sum_N(outputs.logprob_T - self.old_logprob(batch, outputs)) / batch.trained_N.clamp(min=1)
        ratio_T = ratio(moved_N, torch.zeros_like(moved_N))[batch.row_T]
        term_T, cut_T = clipped_surrogate(ratio_T, batch.advantage_T, self.config.clip_low, self.config.clip_high)
        return Loss([self.term(term_T)], {"clip_fraction": cut_T.float()})


class GDPO(GRPO):
    """Every component of the reward is standardised in its group before they are added (Liu et al. 2026)."""

    def advantages(self, batch: Batch) -> Batch:
        parts = [group_relative(part_N, batch.group_N, batch.sample_N) for part_N in batch.reward_parts_N.values()]
        return batch.replace(advantage_T=whiten(torch.stack(parts).sum(0).float()[batch.row_T]))


def step(algorithm: Algorithm, batch: Batch, logprob_T: Tensor, parts: list[list[int]]) -> Tensor:
    """The gradient of one optimizer step, as an engine makes it: select on the whole, then losses of the parts.

    `logprob_T` lies on the full tokens of `batch`.
    """
    [whole] = batch.minibatches()
    if algorithm.two_pass:
        seen = Outputs(logprob_T=logprob_T.detach()[batch.mask_T])
        whole = whole.expanded(algorithm.select(whole.compact(), seen))
    placed = whole.replace(extras_T={"now": logprob_T})
    losses = []
    for rows in parts:
        part = placed.select(rows).compact()
        now_T = part.extras_T["now"]
        loss = algorithm.loss(part, Outputs(logprob_T=now_T, entropy_T=torch.ones_like(now_T)))
        losses += [aggregate(term, part, part.count()) for term in loss.terms]
    [gradient_T] = torch.autograd.grad(torch.stack(losses).sum(), logprob_T)
    return gradient_T[whole.mask_T]


def estimated(algorithm: Algorithm, batch: Batch) -> Batch:
    """As the loop does it."""
    batch = batch.expanded(algorithm.advantages(batch.compact()))
    return batch.mark_signal() if algorithm.skips_no_signal else batch


def current(batch: Batch, values: list[float]) -> Tensor:
    return batch.expand(torch.tensor(values)).requires_grad_()


def test_remax_asks_for_a_greedy_sample_and_does_not_train_it() -> None:
    algorithm = ReMax(AlgorithmConfig(group_size=2))
    prompt = Prompt("test:1", 0, (), (1,))
    assert [(r.kind, r.greedy) for r in algorithm.requests(prompt)] == [
        (Kind.TRAIN, False),
        (Kind.TRAIN, False),
        (Kind.BASELINE, True),
    ]
    greedy = [Sample(f"{i}.2", Kind.BASELINE, (trajectory("pssss", value),)) for i, value in enumerate((0.5, 3.0))]
    packed = [group(i, [trajectory("ps", 1.0), trajectory("pss", 0.0), greedy[i]]) for i in range(2)]
    batch = estimated(algorithm, Batch.pack(packed).select([5, 0, 3, 2, 1, 4]))
    assert batch.compact().advantage_T.tolist() == [0.5, -2, -0.5, -0.5, -3, -3]  # type: ignore[union-attr]
    assert batch.signal_N.tolist() == [False, True, True, False, True, True]
    assert batch.count() == Counts(tokens=6, sequences=4)
    logprob_T = current(batch, [-1.0] * 6)
    rows = [[0, 1, 2], [3, 4, 5]]
    assert step(algorithm, batch, logprob_T, rows).tolist() == pytest.approx(
        [-0.5 / 6, 2 / 6, *[0.5 / 6] * 2, *[0.5] * 2]
    )


def test_dapo_filters_groups_and_keeps_overlong_samples_out_of_loss_and_denominator() -> None:
    algorithm = DAPO(GRPOConfig(aggregate="token-mean", scale="none"))
    assert algorithm.keep(group(0, [trajectory("ps", 1.0), trajectory("ps", 1.0)])) == "equal rewards"
    kept = group(0, [trajectory("ps", 1.0), trajectory("pss", 0.0), trajectory("pssss", 0.0, Ended.TRUNCATED)])
    assert algorithm.keep(kept) is None
    batch = estimated(algorithm, Batch.pack([kept]))
    assert batch.count() == Counts(tokens=3, sequences=2)
    assert batch.signal_N.tolist() == [True, True, False]
    gradient_T = step(algorithm, batch, current(batch, [-1.0] * 3), [[0], [1, 2]])
    third = 1 / 3
    assert gradient_T.tolist() == pytest.approx([-2 * third / 3, third / 3, third / 3])


@pytest.mark.parametrize("parts", [[[0, 1]], [[1], [0]]])
def test_clip_cov_selects_over_the_whole_minibatch_however_it_is_cut(parts: list[list[int]]) -> None:
    algorithm = ClipCov(GRPOConfig(aggregate="token-mean", scale="none"))
    batch = estimated(algorithm, rewarded([1, 0]))
    # Advantages ±0.5, mean log-prob -1: covariances 0.45, -0.1, 0.05, 0.3; the first token is let go.
    gradient_T = step(algorithm, batch, current(batch, [-0.1, -1.2, -1.1, -1.6]), parts)
    assert gradient_T.tolist() == pytest.approx([0, -0.125, 0.125, 0.125])


@pytest.mark.parametrize("parts", [[[0, 1]], [[1], [0]]])
def test_gspo_has_one_ratio_per_sequence(parts: list[list[int]]) -> None:
    algorithm = GSPO(GRPOConfig(scale="none"))
    batch = rewarded([1, 0])
    batch = estimated(algorithm, batch.replace(old_logprob_T=batch.expand(torch.full((4,), -1.0))))
    log = math.log
    now_T = current(batch, [-1 + log(1.1), -1.0, -1 + log(0.25), -1.0])
    # Ratios sqrt(1.1), and sqrt(0.25) = 0.5, which is below 0.8 with a negative advantage: cut.
    gradient_T = step(algorithm, batch, now_T, parts)
    each = -0.5 * math.sqrt(1.1) / 2 / 2  # advantage · ratio · share of a token in its mean · share of a sequence
    assert gradient_T.tolist() == pytest.approx([each, each, 0, 0])


def test_gdpo_standardises_each_component_apart() -> None:
    parts = [(1.0, 0.0), (0.0, 10.0), (0.0, 0.0), (1.0, 10.0)]
    rows = [trajectory("ps", Reward(a + b, parts={"correct": a, "brief": b})) for a, b in parts]
    batch = estimated(GDPO(), Batch.pack([group(0, rows)]))
    assert batch.advantage_T is not None
    # Each component is ±0.866 however it is scaled; the sums 0, 0, -1.73, 1.73 are whitened over the batch.
    assert batch.compact().advantage_T.tolist() == pytest.approx(  # type: ignore[union-attr]
        [0, 0, -math.sqrt(1.5), math.sqrt(1.5)], abs=1e-5
    )


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda batch: None, "a NoneType"),
        (lambda batch: batch.reward_N, "a Tensor"),
        (lambda batch: batch, "a Batch without advantage_T"),
        (lambda batch: batch.replace(advantage_T=batch.reward_N), r"a Batch whose advantage_T has shape \(2,\)"),
        (lambda batch: batch.replace(advantage_T=[1.0] * 4), "a Batch whose advantage_T is a list"),
        (lambda batch: batch.replace(advantage_T=torch.ones(4), weight_T=torch.ones(4, 1)), r"weight_T has .*\(4, 1\)"),
    ],
)
def test_advantages_that_cannot_be_used_name_their_class(made: Any, match: str) -> None:
    class Mine(Algorithm):
        def advantages(self, batch: Batch) -> Batch:
            return made(batch)

    with pytest.raises(TrainingError, match=rf"Mine\.advantages returned .*{match}; allowed: .* each of the 4 tokens"):
        Mine().estimate(rewarded([1, 0]))


def test_an_algorithm_without_its_methods_says_which() -> None:
    batch = rewarded([1, 0])
    with pytest.raises(TrainingError, match=r"Algorithm does not define advantages\(batch\)"):
        Algorithm().estimate(batch)
    for name in ("loss", "value_loss"):
        with pytest.raises(TrainingError, match=rf"Algorithm does not define {name}\(batch, outputs\)"):
            getattr(Algorithm(), name)(batch, Outputs())
