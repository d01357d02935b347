"""GRPO, PPO and the pure functions they are made of: values by hand, gradients, and the laws of the contract."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.batches import annotated, batches, flat, group, quick, rewarded, rewards, trajectory
from treadle.algorithms.advantages import group_relative, whiten
from treadle.algorithms.aggregate import aggregate
from treadle.algorithms.base import Algorithm
from treadle.algorithms.clipping import clipped_surrogate, clipped_value_error
from treadle.algorithms.grpo import GRPO, GRPOConfig
from treadle.algorithms.kl import Estimator, adapted, kl
from treadle.algorithms.ppo import PPO, PPOConfig
from treadle.algorithms.ratio import ratio
from treadle.batch import Batch
from treadle.handles import Aggregate, Loss, Outputs
from treadle.types import Kind, Prompt, Reward, Sample

STD = math.sqrt(1 / 3)  # of (1, 0, 0, 1), unbiased
ESTIMATORS: list[Estimator] = ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
AGGREGATES: list[Aggregate] = ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def total(loss: Loss, batch: Batch) -> Tensor:
    return torch.stack([aggregate(term, batch, batch.count()) for term in loss.terms]).sum()


def advantages_of(batch: Batch) -> list[float]:
    done = GRPO().advantages(batch.compact())
    assert done.advantage_T is not None
    return done.advantage_T.tolist()


def prepared(algorithm: Algorithm, batch: Batch) -> Batch:
    """The compact batch that `loss` sees, in float64."""
    compact = algorithm.advantages(batch.compact())
    return compact.replace(
        **{n: v.double() for n, v in flat(compact).items() if n.endswith("_T") and v.is_floating_point()}
    )


def moved(batch: Batch, seed: int = 1) -> tuple[Outputs, list[Tensor]]:
    """Outputs of a policy and a critic that have moved from the old ones, and the tensors to differentiate."""
    noise = torch.Generator().manual_seed(seed)
    assert batch.old_logprob_T is not None
    tokens = len(batch.token_T)
    logprob_T = batch.old_logprob_T + 0.3 * torch.randn(tokens, generator=noise, dtype=torch.float64)
    entropy_T, value_T = torch.rand(2, tokens, generator=noise, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (logprob_T, entropy_T, value_T)]
    return Outputs(logprob_T=leaves[0], entropy_T=leaves[1], value_T=leaves[2]), leaves


# ---------------------------------------------------------------------- group advantages


def test_grpo_advantages_by_hand() -> None:
    high = 0.5 / (STD + 1e-6)
    assert advantages_of(rewarded([1, 0, 0, 1])) == pytest.approx([high, high, -high, -high, -high, -high, high, high])


def test_unscaled_advantages_by_hand() -> None:
    algorithm = GRPO(GRPOConfig(scale="none"))
    done = algorithm.advantages(rewarded([3, 0], [1, 1, 4], layout="ps").compact())
    assert done.advantage_T is not None
    assert done.advantage_T.tolist() == [1.5, -1.5, -1, -1, 2]
    assert done.advantage_T.dtype == torch.float32
    assert done.reward_N.tolist() == [3, 0, 1, 1, 4], "rewards stay"


@quick
@given(batches())
def test_groups_are_found_by_identity_and_samples_count_once(batch: Batch) -> None:
    samples = dict(
        zip(batch.sample_N.tolist(), zip(batch.group_N.tolist(), batch.reward_N.tolist(), strict=True), strict=True)
    )
    found_N = group_relative(batch.reward_N, batch.group_N, batch.sample_N)
    for own, reward, found in zip(batch.group_N.tolist(), batch.reward_N.tolist(), found_N.tolist(), strict=True):
        members = [r for g, r in samples.values() if g == own]
        if max(members) == min(members):
            assert found == 0.0
        else:
            expected = (reward - statistics.fmean(members)) / (statistics.stdev(members) + 1e-6)
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@quick
@given(batches(), st.data())
def test_the_order_of_rows_does_not_matter(batch: Batch, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    for algorithm in (GRPO(), PPO()):
        straight = algorithm.advantages(annotated(batch).compact())
        shuffled = algorithm.advantages(annotated(batch).select(order).compact())
        torch.testing.assert_close(shuffled.advantage_T, straight.select(order).advantage_T, rtol=1e-5, atol=1e-5)


@quick
@given(rewards, st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    batch = GRPO().advantages(rewarded([reward] * size, [0, 1]).compact())
    assert batch.advantage_T is not None
    assert batch.advantage_T[: 2 * size].tolist() == [0.0] * (2 * size)
    assert batch.mark_signal().signal_N.tolist() == [False] * size + [True, True]


@pytest.mark.parametrize("residue", [0.1 + 0.2 - 0.3, 1e-17, 1e-12])
def test_a_tiny_spread_does_not_explode(residue: float) -> None:
    assert all(abs(a) < 1e-5 for a in advantages_of(rewarded([0.0, residue, 0.0])))


@quick
@given(st.lists(st.integers(0, 20), min_size=2, max_size=8), st.floats(-50, 50), st.floats(0.1, 50))
def test_shift_and_scale(values: list[int], shift: float, scale: float) -> None:
    reward_N = torch.tensor(values, dtype=torch.float64)
    group_N, sample_N = torch.zeros(len(values), dtype=torch.int64), torch.arange(len(values))
    plain_N = group_relative(reward_N, group_N, sample_N)
    if min(values) < max(values):  # else the rounding of scale and shift could part what is equal
        torch.testing.assert_close(
            group_relative(scale * reward_N + shift, group_N, sample_N), plain_N, rtol=1e-4, atol=1e-9
        )
    centred_N = group_relative(scale * reward_N + shift, group_N, sample_N, "none")
    torch.testing.assert_close(centred_N, scale * group_relative(reward_N, group_N, sample_N, "none"))


def test_several_trajectories_of_a_sample_count_once() -> None:
    one = [trajectory("ps", 1.0), trajectory("ps", 0.0), trajectory("ps", 0.0)]
    many = [[trajectory("ps", 1.0)] * 3, *one[1:]]
    split = advantages_of(Batch.pack([group(0, many)]))
    whole = advantages_of(Batch.pack([group(0, one)]))
    assert split == pytest.approx([whole[0]] * 3 + whole[1:])


def test_baseline_samples_enter_the_baseline_and_are_not_trained() -> None:
    greedy = Sample("0.2", Kind.BASELINE, (trajectory("pss", 2.0),))
    batch = Batch.pack([group(0, [trajectory("ps", 1.0), trajectory("ps", 0.0), greedy])])
    assert advantages_of(batch) == pytest.approx([0.0, -1.0], abs=1e-5)


def test_a_sample_without_tokens_is_in_the_baseline_and_in_no_denominator() -> None:
    batch = Batch.pack([group(0, [trajectory("ps", 1.0), trajectory("p", 0.0)])])
    assert advantages_of(batch) == pytest.approx([math.sqrt(0.5)], rel=1e-5)
    assert batch.count().sequences == 1


def test_rewards_by_turn_count_by_their_sum() -> None:
    rows = [trajectory("psses", Reward(1.0, turns=(0.25, 0.75))), trajectory("ps", 0.0)]
    assert advantages_of(Batch.pack([group(0, rows)])) == pytest.approx(
        [math.sqrt(0.5)] * 3 + [-math.sqrt(0.5)], rel=1e-5
    )


def test_whiten_by_hand() -> None:
    assert whiten(torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1, 0, 1], abs=1e-5)
    assert whiten(torch.tensor([0.1] * 7)).tolist() == [0.0] * 7
    assert whiten(torch.tensor([5.0])).tolist() == [0.0]
    assert whiten(torch.zeros(0)).tolist() == []


# ---------------------------------------------------------------------- ratio and clipping


def test_the_clip_by_hand() -> None:
    ratio_T = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.25, 0.9], requires_grad=True)
    advantage_T = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, 0.0])
    term_T, cut_T = clipped_surrogate(ratio_T, advantage_T, low=0.2, high=0.3)
    assert term_T.tolist() == pytest.approx([-2.6, 3.0, -1.0, 1.6, -2.5, 0.0])
    assert cut_T.tolist() == [True, False, False, True, False, False]
    term_T.sum().backward()
    assert ratio_T.grad is not None
    assert ratio_T.grad.tolist() == pytest.approx([0, 2, -2, 0, -2, 0])


@quick
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(-3, 3)), min_size=1, max_size=8))
def test_the_clip_is_the_papers_minimum(rows: list[tuple[float, float]]) -> None:
    ratio_T, advantage_T = torch.tensor(rows, dtype=torch.float64).unbind(1)
    term_T, _ = clipped_surrogate(ratio_T, advantage_T, low=0.2, high=0.28)
    torch.testing.assert_close(term_T, -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(0.8, 1.28) * advantage_T))


@quick
@given(st.lists(st.tuples(finite, finite, st.floats(-100, 100, width=32)), min_size=1, max_size=5))
def test_everything_is_finite_on_any_finite_input(rows: list[tuple[float, float, float]]) -> None:
    now_T, old_T, advantage_T = torch.tensor(rows, dtype=torch.float32).unbind(1)
    now_T = now_T.clone().requires_grad_()
    term_T, _ = clipped_surrogate(ratio(now_T, old_T), advantage_T, 0.2, 0.2)
    terms = [term_T, *(kl(now_T, old_T, estimator) for estimator in ESTIMATORS)]
    for each_T in terms:
        assert bool(each_T.isfinite().all())
        [gradient_T] = torch.autograd.grad(each_T.sum(), now_T, retain_graph=True)
        assert bool(gradient_T.isfinite().all())


def test_the_ratio_of_equal_policies_is_exactly_one() -> None:
    logprob_T = -torch.rand(100).exp()
    assert torch.equal(ratio(logprob_T, logprob_T.clone()), torch.ones(100))


def test_the_value_clip_by_hand() -> None:
    old_T, return_T = torch.zeros(5), torch.tensor([1.0, 1.0, -1.0, 0.4, 1.0])
    value_T = torch.tensor([0.1, 0.5, 0.5, 0.5, -0.5], requires_grad=True)
    term_T, cut_T = clipped_value_error(value_T, old_T, return_T, clip=0.2)
    # Near enough · moved to the return, held at 0.2 · moved away, pays in full · past it: the worse of 0.1² and 0.2².
    assert term_T.tolist() == pytest.approx([0.81 / 2, 0.64 / 2, 2.25 / 2, 0.04 / 2, 2.25 / 2])
    assert cut_T.tolist() == [False, True, False, True, False]
    term_T.sum().backward()
    assert value_T.grad is not None
    assert value_T.grad.tolist() == pytest.approx([-0.9, 0, 1.5, 0, -1.5])


def test_values_within_the_clip_are_never_cut() -> None:
    noise = torch.Generator().manual_seed(0)
    old_T, return_T = torch.randn(2, 1000, generator=noise)
    value_T = old_T + 0.19 * (2 * torch.rand(1000, generator=noise) - 1)
    term_T, cut_T = clipped_value_error(value_T, old_T, return_T, clip=0.2)
    assert not bool(cut_T.any())
    assert torch.equal(term_T, (value_T - return_T).square() / 2)


# ---------------------------------------------------------------------- KL


def test_kl_values_by_hand() -> None:
    x = 0.5
    expected = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x, "abs": x}
    for estimator in ESTIMATORS:
        for sign in (1, -1):
            found = kl(torch.tensor([-1.0 + sign * x]), torch.tensor([-1.0]), estimator).item()
            name = estimator.removesuffix("+")
            value = {"k1": sign * x, "k3": math.exp(-sign * x) - 1 + sign * x}.get(name, expected[name])
            assert found == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_of_equal_policies_is_exactly_zero(estimator: Estimator) -> None:
    logprob_T = -torch.rand(100)
    assert torch.equal(kl(logprob_T, logprob_T.clone(), estimator), torch.zeros(100))


def exact_kl(logits_V: Tensor, other_V: Tensor) -> Tensor:
    logprob_V = logits_V.log_softmax(0)
    return (logprob_V.exp() * (logprob_V - other_V.log_softmax(0))).sum()


def test_kl_expectations_over_a_whole_vocabulary() -> None:
    """The expected value and the expected gradient of each estimate, every token enumerated."""
    noise = torch.Generator().manual_seed(0)
    logits_V = torch.randn(6, dtype=torch.float64, generator=noise, requires_grad=True)
    reference_V = torch.randn(6, dtype=torch.float64, generator=noise)
    [right_V] = torch.autograd.grad(exact_kl(logits_V, reference_V), logits_V)
    [other_V] = torch.autograd.grad(exact_kl(reference_V, logits_V), logits_V)
    for estimator in ESTIMATORS:
        logprob_V = logits_V.log_softmax(0)
        estimate = (logprob_V.exp().detach() * kl(logprob_V, reference_V.log_softmax(0), estimator)).sum()
        [gradient_V] = torch.autograd.grad(estimate, logits_V)
        if estimator[:2] in ("k1", "k3"):
            torch.testing.assert_close(estimate, exact_kl(logits_V, reference_V))
        if estimator == "k2" or estimator.endswith("+"):
            torch.testing.assert_close(gradient_V, right_V)
        elif estimator == "k3":
            torch.testing.assert_close(gradient_V, other_V)
        elif estimator == "k1":
            torch.testing.assert_close(gradient_V, torch.zeros(6, dtype=torch.float64))


def test_the_adaptive_coefficient_by_hand() -> None:
    assert adapted(0.1, measured=0.06, target=0.06) == pytest.approx(0.1)
    assert adapted(0.1, measured=0.066, target=0.06) == pytest.approx(0.1 * 1.01)
    assert adapted(0.1, measured=6.0, target=0.06) == pytest.approx(0.1 * 1.02)
    assert adapted(0.1, measured=-1.0, target=0.06) == pytest.approx(0.1 * 0.98)


# ---------------------------------------------------------------------- GRPO and PPO


def test_grpo_loss_by_hand() -> None:
    config = GRPOConfig(kl_coefficient=0.5, entropy_coefficient=0.25, kl_estimator="k1+")
    algorithm, batch = GRPO(config), rewarded([1, 0, 0, 1], layout="ps")
    old_T = torch.full((4,), -1.0)
    full = batch.replace(old_logprob_T=batch.expand(old_T), reference_logprob_T=batch.expand(old_T - 1))
    compact = algorithm.advantages(full.compact())
    now_T = old_T + torch.tensor([2.0, 1.0, 1.0, 0.5]).log()
    loss = algorithm.loss(compact, Outputs(logprob_T=now_T, entropy_T=torch.full((4,), 3.0)))
    high = 0.5 / (STD + 1e-6)
    surrogate = (-1.2 + 1 + 1 - 0.5) * high / 4
    kl_mean = (4 + math.log(2.0 * 0.5)) / 4
    assert total(loss, compact).item() == pytest.approx(surrogate + 0.5 * kl_mean - 0.25 * 3.0, rel=1e-5)
    assert loss.metrics["clip_fraction"].tolist() == [1, 0, 0, 0]
    assert loss.metrics["ratio"].tolist() == pytest.approx([2, 1, 1, 0.5])
    assert loss.metrics["kl_old"].tolist() == pytest.approx([r - 1 - math.log(r) for r in (2, 1, 1, 0.5)], abs=1e-6)
    assert loss.metrics["kl_reference"].mean().item() == pytest.approx(kl_mean)
    assert loss.metrics["entropy"].tolist() == [3, 3, 3, 3]
    assert loss.peaks["ratio_max"].max().item() == pytest.approx(2)


def test_with_one_step_old_is_the_present_and_nothing_moves() -> None:
    batch = GRPO().advantages(rewarded([1, 0]).compact())
    now_T = torch.tensor([-0.2, -0.3, -0.25, -0.3], requires_grad=True)
    loss = GRPO().loss(batch, Outputs(logprob_T=now_T, entropy_T=torch.ones(4)))
    assert loss.metrics["ratio"].tolist() == [1, 1, 1, 1]
    assert loss.metrics["kl_old"].tolist() == [0, 0, 0, 0]
    assert loss.peaks["ratio_max"].max().item() == 1
    total(loss, batch).backward()
    assert now_T.grad is not None
    assert batch.advantage_T is not None
    torch.testing.assert_close(now_T.grad, -batch.advantage_T / 4)
    assert not any(t.requires_grad for t in (*loss.metrics.values(), *loss.peaks.values()))


ALGORITHMS: list[Callable[[Aggregate], Algorithm]] = [
    lambda a: GRPO(GRPOConfig(aggregate=a, constant_length=7)),
    lambda a: GRPO(GRPOConfig(aggregate=a, clip_high=0.28, kl_coefficient=0.3, entropy_coefficient=0.1)),
    lambda a: PPO(PPOConfig(aggregate=a, kl_coefficient=0.3)),
    lambda a: PPO(PPOConfig(aggregate=a, kl_coefficient=0.3, kl_in="loss")),
]


@pytest.mark.parametrize("make", ALGORITHMS)
@pytest.mark.parametrize("how", AGGREGATES)
def test_gradients_are_those_of_finite_differences(make: Callable[[Aggregate], Algorithm], how: Aggregate) -> None:
    algorithm = make(how)
    rows = [trajectory("pssees", 1.0), trajectory("pss", 0.0), trajectory("p", 0.5), trajectory("ps", 0.2)]
    batch = prepared(algorithm, annotated(Batch.pack([group(0, rows)])))
    _, leaves = moved(batch)
    names = ("logprob_T", "entropy_T", "value_T")
    # Straight-through values are not what their gradient is of, so k3 and k1+ are checked over the vocabulary above.
    plain = algorithm.config.model_copy(update={"kl_estimator": "k3"})
    algorithm = type(algorithm)(plain)

    def policy(*tensors: Tensor) -> Tensor:
        return total(algorithm.loss(batch, Outputs(**dict(zip(names, tensors, strict=True)))), batch)

    def critic(*tensors: Tensor) -> Tensor:
        return total(algorithm.value_loss(batch, Outputs(**dict(zip(names, tensors, strict=True)))), batch)

    assert torch.autograd.gradcheck(policy, leaves)
    if "critic" in algorithm.uses:
        assert torch.autograd.gradcheck(critic, leaves)


@pytest.mark.parametrize("make", ALGORITHMS)
@quick
@given(batches(), st.sampled_from(AGGREGATES), st.data())
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(
    make: Callable[[Aggregate], Algorithm], batch: Batch, how: Aggregate, data: st.DataObject
) -> None:
    algorithm = make(how)
    batch = prepared(algorithm, annotated(batch))
    outputs, leaves = moved(batch)
    order = data.draw(st.permutations(range(len(batch))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]

    def run(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        part = batch.select(rows)
        token_T = batch.replace(extras_T={"at": torch.arange(len(batch.token_T))}).select(rows).extras_T["at"]
        cut = Outputs(**{n: getattr(outputs, n)[token_T] for n in ("logprob_T", "entropy_T", "value_T")})
        losses = [algorithm.loss(part, cut)]
        if "critic" in algorithm.uses:
            losses.append(algorithm.value_loss(part, cut))
        metrics = {name: value.sum() for loss in losses for name, value in loss.metrics.items()}
        return torch.stack([total(loss, part) for loss in losses]).sum(), metrics

    loss, metrics = run(list(range(len(batch))))
    gradient = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    losses, found = zip(*map(run, parts), strict=True)
    torch.testing.assert_close(torch.stack(losses).sum(), loss)
    again = torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(again, gradient)
    for name in metrics:
        torch.testing.assert_close(torch.stack([f[name] for f in found]).sum(), metrics[name])


def test_rows_without_signal_may_be_left_out() -> None:
    batch = annotated(rewarded([1, 1], [1, 0]))
    full = prepared(GRPO(), batch)
    outputs, [logprob_T, *_] = moved(full)
    [gradient_T] = torch.autograd.grad(total(GRPO().loss(full, outputs), full), logprob_T)
    assert gradient_T[:4].tolist() == [0.0] * 4
    assert bool((gradient_T[4:] != 0).any())


def test_what_an_algorithm_declares_follows_from_its_configuration() -> None:
    plain, pulled = GRPO(), GRPO(GRPOConfig(kl_coefficient=0.1))
    assert (plain.uses, plain.before_loss, plain.skips_no_signal) == (frozenset(), frozenset(), True)
    assert (pulled.uses, pulled.before_loss, pulled.skips_no_signal) == ({"reference"}, {"reference"}, False)
    assert not GRPO(GRPOConfig(entropy_coefficient=0.1)).skips_no_signal
    assert (PPO().uses, PPO().before_advantages, PPO().before_loss) == ({"critic"}, {"critic"}, frozenset())
    in_reward = PPO(PPOConfig(kl_coefficient=0.1))
    assert in_reward.uses == {"critic", "reference"}
    assert in_reward.before_advantages == {"critic", "policy", "reference"}
    assert in_reward.passes_before_loss == frozenset()
    in_loss = PPO(PPOConfig(kl_coefficient=0.1, kl_in="loss", minibatches=1))
    assert (in_loss.before_advantages, in_loss.before_loss) == ({"critic"}, {"reference"})
    assert in_loss.passes_before_loss == {"reference"}
    warm = PPO(PPOConfig(critic_warmup_steps=5))
    assert (warm.first_step("policy"), warm.first_step("critic")) == (5, 0)


def test_ppo_takes_the_kl_off_the_reward_and_leaves_the_reward_alone() -> None:
    algorithm = PPO(PPOConfig(kl_coefficient=0.5, lam=1.0))
    batch = Batch.pack([group(0, [trajectory("psses", 1.0)])])
    batch = batch.replace(
        old_logprob_T=batch.expand(torch.tensor([-1.0, -2.0, -3.0])),
        reference_logprob_T=batch.expand(torch.tensor([-1.5, -2.0, -2.0])),
        value_T=batch.expand(torch.zeros(3)),
        bootstrap_N=torch.zeros(1),
    )
    done = algorithm.estimate(batch).compact()
    assert done.return_T is not None
    # Token rewards -0.5·(0.5, 0, -1) + (0, 0, 1) = (-0.25, 0, 1.5), summed from the end.
    assert done.return_T.tolist() == pytest.approx([1.25, 1.5, 1.5])
    assert done.reward_T.tolist() == [0, 0, 1]


def test_ppo_adapts_its_kl_coefficient_and_goes_on_after_a_restart() -> None:
    config = PPOConfig(kl_coefficient=0.1, kl_target=0.01)
    algorithm = PPO(config)
    algorithm.after_step({"critic/loss": 1.0})
    algorithm.after_step({"policy/kl_reference": math.nan})
    assert algorithm.kl_coefficient == 0.1
    algorithm.after_step({"policy/kl_reference": 1.0})
    assert algorithm.kl_coefficient == pytest.approx(0.102)
    again = PPO(config)
    again.restore(algorithm.state())
    assert again.kl_coefficient == algorithm.kl_coefficient
    fixed = PPO(PPOConfig(kl_coefficient=0.1))
    fixed.after_step({"policy/kl_reference": 1.0})
    assert fixed.kl_coefficient == 0.1


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: GRPOConfig(group_size=1), ["group_size", "2 or more", "ppo"]),
        (lambda: GRPOConfig(kl_coefficient=0.1, kl_estimator="k1"), ["kl_estimator", "k1\\+", "kl_coefficient=0"]),
        (lambda: GRPOConfig(clip_low=-0.1), ["clip_low", "greater than 0"]),
        (lambda: GRPOConfig(clip_high=0.0), ["clip_high", "greater than 0"]),
        (lambda: PPOConfig(kl_coefficient=0.1, kl_estimator="k1", kl_in="loss"), ["kl_estimator", "kl_in=reward"]),
        (lambda: PPOConfig(kl_target=0.1), ["kl_target", "kl_coefficient above 0"]),
        (lambda: PPOConfig(gamma=1.5), ["gamma", "less than or equal to 1"]),
        (lambda: PPOConfig(value_clip=0.0), ["value_clip", "greater than 0"]),
    ],
)
def test_rules_between_keys_are_checked_and_named(make: Callable[[], object], names: list[str]) -> None:
    for name in names:
        with pytest.raises(ValueError, match=name):
            make()


def test_requests_ask_for_the_group() -> None:
    prompt = Prompt("test:1", 0, (), (1,))
    assert len(GRPO(GRPOConfig(group_size=5)).requests(prompt)) == 5
    assert len(PPO().requests(prompt)) == 1
