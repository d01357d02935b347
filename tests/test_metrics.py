"""What a run writes is defined, what is defined is written, and the numbers are what their definitions say."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from tests.run_writer import group
from tests.runs import settings as run_settings
from treadle.algorithms.grpo import GRPO
from treadle.algorithms.ppo import PPO
from treadle.batch import Batch
from treadle.engines.speed import cost_of, matrix_rate
from treadle.errors import ConfigError, RewardError, TrainingError
from treadle.metrics import OURS, Metric, Registry, pattern
from treadle.recipes.measure import Speed, Work, measure_batch, measure_evaluation, measure_speed, pass_at
from treadle.runs.metrics import read_rows
from treadle.runs.samples import read_samples
from treadle.types import Correlation, Group, Kind, Mean, Reward, Sample, Spread, Trajectory, merge

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------------- the registry and what runs write


async def two_parts(trajectory: Trajectory) -> Reward:
    share = len(set(trajectory.response)) / 8
    return Reward(share, parts={"variety": share, "first": float(trajectory.response[:1] == "a")})


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_what_runs_write_is_defined_and_what_is_defined_is_written(tiny_model: Path, tmp_path: Path) -> None:
    data = {"chat": False}
    small = {"samples": 2}
    grpo = {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1}
    ppo = {"name": "ppo", "group_size": 2, "minibatches": 2, "kl_coefficient": 0.1}
    written: set[str] = set()
    for name, change in {
        "grpo": {"algorithm": grpo, "reward": "tests.test_metrics:two_parts", "evaluation": small},
        "ppo": {"algorithm": ppo},
        "ahead": {
            "max_staleness": 1,
            "algorithm": {"name": "rloo", "group_size": 4, "correction": {"weight": "token"}},
        },
        "engines": {"rollout": {"name": "vllm", "weights": {"delta": True}}},
        "turns": {"controller": {"backend": "ray", "pools": {"all": {"cpus": 0.5, "offload": True}}}},
    }.items():
        config = run_settings(tmp_path, tiny_model, steps=2, run={"dir": str(tmp_path / name)}, **change)
        held_out = config["data"]["train"] if name == "grpo" else None
        config["data"] |= data | {"evaluation": held_out}
        treadle.train(config)
        for file in ("metrics.jsonl", "evaluations.jsonl"):
            written |= {key for row in read_rows(tmp_path / name / file) for key in row} - {"step"}
    declared = {m.name: m for m in (*GRPO.metrics, *PPO.metrics)}
    registry = Registry(declared.values())
    assert [name for name in sorted(written) if registry.find(name) is None] == []
    dead = [m.name for m in (*OURS, *declared.values()) if not any(registry.find(name) == m for name in written)]
    assert dead == []


class Undeclared(GRPO):
    def loss(self, batch: Batch, outputs: treadle.Outputs) -> treadle.Loss:
        found = super().loss(batch, outputs)
        return treadle.Loss(found.terms, {**found.metrics, "surprise": -outputs.logprob_T.detach()}, found.peaks)  # type: ignore[union-attr]


class Declared(Undeclared):
    metrics = (*Undeclared.metrics, treadle.Metric("policy/surprise", unit="nats", definition="−log π of a token"))


def test_a_metric_without_a_definition_ends_the_first_step_and_names_the_line_to_add(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = run_settings(tmp_path, tiny_model, steps=1)
    del config["algorithm"]
    with pytest.raises(TrainingError) as caught:
        treadle.train(config, algorithm=Undeclared())
    text = str(caught.value)
    assert "'policy/surprise' has no definition" in text
    assert "class Undeclared" in text
    assert 'metrics = (*GRPO.metrics, treadle.Metric("policy/surprise", unit="…", definition="…"))' in text
    treadle.train(config, algorithm=Declared())
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert row["policy/surprise"] > 4  # a random model of 258 bytes


@pytest.mark.parametrize("metric", ["policy/x", Metric("surprise", "nats", "…"), Metric("reward/mean", "1", "…")])
def test_a_declaration_that_no_objective_could_report_is_refused_before_anything_is_loaded(metric: Any) -> None:
    with pytest.raises(ConfigError, match=r"Mine.metrics declares .*begins with policy/"):
        Registry([metric], type("Mine", (GRPO,), {}))


def test_the_line_to_add_fits_the_class_that_lacks_it() -> None:
    metric = 'treadle.Metric("policy/x", unit="…", definition="…")'
    for owner, line in {
        type("Alone", (treadle.Algorithm,), {}): f"to class Alone:\n    metrics = ({metric},)",
        type("Child", (GRPO,), {}): f"to class Child:\n    metrics = (*GRPO.metrics, {metric})",
        type("Own", (GRPO,), {"metrics": GRPO.metrics}): f"to Own.metrics:\n    {metric}",
    }.items():
        with pytest.raises(TrainingError) as caught:
            Registry(owner.metrics, owner).check(["reward/mean", "policy/x"])
        assert str(caught.value).endswith(line)


def test_the_more_telling_name_is_meant() -> None:
    registry = Registry()
    for name, found in {
        "reward/mean": "reward/mean",
        "reward/pass@8": "reward/pass@{k}",
        "reward/pass@all": "reward/{part}",
        "reward/my.module:fn/with a slash": "reward/{part}",
        "time/step": "time/step",
        "time/generate": "time/{stage}",
        "time/update/matrix_share": "time/{stage}/matrix_share",
        "evaluation/greedy": "evaluation/{way}",
        "evaluation/greedy_tokens": "evaluation/{way}_tokens",
        "evaluation/greedy/pass@1": "evaluation/{way}/pass@{k}",
        "evaluation/greedy/math": "evaluation/{way}/{part}",
        "critic/grad_norm": "{role}/grad_norm",
    }.items():
        metric = registry.find(name)
        assert metric is not None
        assert metric.name == found
    assert registry.find("reference/grad_norm") is None
    assert registry.find("policy/entropy") is None  # an algorithm's to declare
    assert pattern("a.b/{stage}").fullmatch("axb/c") is None


def test_every_definition_says_something_and_stands_once() -> None:
    names = [m.name for m in OURS]
    assert len(set(names)) == len(names)
    assert [m.name for m in OURS if not (m.unit and len(m.definition) > 10)] == []


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "docs" / "metrics_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run `make docs-metrics`"


# ---------------------------------------------------------------------- statistics that merge


numbers = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), max_size=30)


@given(st.lists(numbers, min_size=1, max_size=5))
def test_a_spread_does_not_depend_on_how_it_was_cut(parts: list[list[float]]) -> None:
    whole = np.array(list(itertools.chain(*parts)))
    merged = merge(*({"x": Spread.of(np.array(p))} for p in parts))["x"]
    assert merged.count == len(whole)
    if len(whole):
        assert merged.value == pytest.approx(whole.std(), rel=1e-9, abs=1e-6)
    else:
        assert math.isnan(merged.value)


def test_a_spread_far_from_zero_keeps_its_digits() -> None:
    values = 1e8 + np.array([0.0, 1.0, 2.0, 3.0])  # sums of squares would lose all of it
    assert (Spread.of(values[:1]) + Spread.of(values[1:])).value == pytest.approx(math.sqrt(1.25), rel=1e-12)


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_a_correlation_does_not_depend_on_how_it_was_cut(cuts: list[int], seed: int) -> None:
    dice = np.random.default_rng(seed)
    x = dice.normal(-3, 2, 40)
    y = x + dice.normal(0, 0.5, 40)
    edges = [0, *sorted(cuts), 40]
    merged = merge(*({"r": Correlation.of(x[a:b], y[a:b])} for a, b in itertools.pairwise(edges)))["r"]
    assert merged.value == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-9)


def test_a_correlation_of_what_never_varies_is_no_number() -> None:
    assert math.isnan(Correlation.of(np.ones(3), np.arange(3.0)).value)
    assert Correlation.of(np.arange(3.0), 2 * np.arange(3.0)).value == pytest.approx(1.0)


# ---------------------------------------------------------------------- pass@k


def answered(rewards: list[float | None], kind: Kind = Kind.TRAIN) -> Group:
    """A group of samples with these rewards; None failed."""
    whole = group(0, (kind,) * len(rewards), [n for n, r in enumerate(rewards) if r is None])
    samples = []
    for sample, reward in zip(whole.samples, rewards, strict=True):
        t = sample.trajectories[0]
        given_reward = None if reward is None else Reward(reward)
        trajectory = Trajectory(
            t.prompt, t.token_T, t.provenance_T, t.logprob_T, t.version_T, t.turn_ends, t.ended, reward=given_reward
        )
        samples.append(Sample(sample.id, kind, (trajectory,), sample.failure))
    return Group(0, whole.prompt, tuple(samples))


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(passed: list[bool]) -> None:
    found = pass_at([answered([float(p) for p in passed])], Kind.TRAIN)
    assert list(found) == [k for k in (1, 2, 4, 8) if k <= len(passed)]
    for k, share in found.items():
        subsets = list(itertools.combinations(passed, k))
        assert share.value == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_counts_prompts_and_leaves_out_those_with_too_few_answers() -> None:
    groups = [answered([1.0, 0.0, 0.0, 0.0]), answered([1.2, None, 0.9999999, 0.5]), answered([-1.0, -1.0, 0.2, 0.999])]
    found = pass_at(groups, Kind.TRAIN)
    assert found[1].value == pytest.approx((1 / 4 + 2 / 3 + 0) / 3)
    assert found[2].value == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert found[4] == Mean(1.0, 2)  # the second has three answers
    assert math.isnan(pass_at([answered([1.0, None])], Kind.TRAIN)[2].value)


def test_a_sample_that_only_a_baseline_needs_does_not_count_as_an_answer() -> None:
    one, two = answered([1.0, 0.0]), answered([1.0], Kind.BASELINE)
    both = Group(0, one.prompt, (*one.samples, *two.samples))
    assert pass_at([both], Kind.TRAIN)[2].value == 1.0
    assert pass_at([both], Kind.TRAIN)[1].value == 0.5


def test_a_part_of_a_reward_cannot_take_the_name_of_a_metric() -> None:
    trajectory = group(0).samples[0].trajectories[0]
    for name in ("mean", "equal_groups", "pass@2"):
        named = Trajectory(
            trajectory.prompt,
            trajectory.token_T,
            trajectory.provenance_T,
            trajectory.logprob_T,
            trajectory.version_T,
            trajectory.turn_ends,
            trajectory.ended,
            reward=Reward(1.0, parts={name: 1.0}),
        )
        answers = {"greedy": [Group(0, trajectory.prompt, (Sample("0.0", Kind.EVALUATION, (named,)),))]}
        with pytest.raises(RewardError, match=f"a part '{name}'"):
            measure_evaluation(answers)


# ---------------------------------------------------------------------- discrepancy, advantages


def test_discrepancy_by_hand() -> None:
    groups = [group(1)]  # responses of 2, 3 and 4 tokens, each sampled at log-prob -2/7
    batch = Batch.pack(groups)
    gap_T = torch.tensor([0.1, -0.2, 0.3, 0.0, float("nan"), 0.5, 0.1, 0.1, 0.1])  # one token that no pass has seen
    full_T = batch.expand(batch.sampling_logprob_T[batch.mask_T] + gap_T)
    found = measure_batch(groups, batch.replace(old_logprob_T=full_T), version=0)
    seen = np.array([0.1, -0.2, 0.3, 0.0, 0.5, 0.1, 0.1, 0.1])
    assert found["discrepancy/mean"].value == pytest.approx(np.abs(seen).mean(), rel=1e-5)
    assert found["discrepancy/max"].value == pytest.approx(0.5, rel=1e-5)
    assert found["discrepancy/kl"].value == pytest.approx((np.exp(seen) - 1 - seen).mean(), rel=1e-4)
    assert math.isnan(found["discrepancy/correlation"].value)  # the sampler's never varies here
    assert "discrepancy/mean" not in measure_batch(groups, batch, version=0)  # nothing to compare with


def test_discrepancy_of_a_run_is_that_of_its_recorded_log_probs(tiny_model: Path, tmp_path: Path) -> None:
    """With one update no pass of its own is made; the log-probs are those that the update saw, token by token."""
    treadle.train(run_settings(tmp_path, tiny_model, steps=2, trainer={"dtype": "float32", "learning_rate": 1e-2}))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        samples = read_samples(tmp_path / "run" / "samples" / f"step_{row['step']:06d}.parquet")
        pairs = [
            (old, sampled)
            for s in samples
            for old, sampled, trained in zip(s["old_logprobs"], s["sampling_logprobs"], s["trained"], strict=True)
            if trained and not math.isnan(old)
        ]
        old, sampled = np.array(pairs).T
        assert len(pairs) == row["policy/tokens"] > 0
        assert row["discrepancy/max"] == pytest.approx(np.abs(old - sampled).max(), rel=1e-6)
        assert 0 < row["discrepancy/max"] < 1e-5
        assert row["discrepancy/correlation"] > 0.999
        advantages = np.array([a for s in samples for a, t in zip(s["advantages"], s["trained"], strict=True) if t])
        assert row["advantage/std"] == pytest.approx(advantages.std(), rel=1e-5)
        assert row["advantage/max"] == pytest.approx(np.abs(advantages).max())


def test_log_probs_noted_on_the_way_are_those_of_a_pass_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    """Under the same plan, bit for bit: whether a step has one update or a pass before it."""
    seen = {}
    for name, algorithm in {"noted": {"kl_coefficient": 0.1, "minibatches": 1}, "passed": {"epochs": 2}}.items():
        path = tmp_path / name
        grpo = {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1, **algorithm}
        treadle.train(run_settings(tmp_path, tiny_model, steps=1, algorithm=grpo, run={"dir": str(path)}))
        seen[name] = json.dumps([s["old_logprobs"] for s in read_samples(path / "samples" / "step_000001.parquet")])
    assert seen["noted"] == seen["passed"]


# ---------------------------------------------------------------------- speed


def test_operations_are_those_that_torch_counts(tiny_model: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    cost = cost_of(model)
    assert cost is not None
    for length in (4, 24):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.arange(length)[None])
        # eager attention makes the whole square of pairs
        expected = length * (cost.token + cost.logits) + length**2 * cost.pair
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_experts_have_no_known_cost(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.register_parameter("experts", torch.nn.Parameter(torch.zeros(4, 8, 8)))
    assert cost_of(model) is None


def test_the_matrix_rate_is_a_rate() -> None:
    rate = matrix_rate(torch.float32, torch.device("cpu"))
    assert 1e8 < rate < 1e16


def test_a_prompt_of_a_group_is_computed_once() -> None:
    groups = [group(1), group(2)]  # prompts of 2 tokens; responses of 2, 3, 4 and 3, 4, 1
    batch = Batch.pack(groups)
    work = Work.of(batch, torch.ones(len(batch), dtype=torch.bool))
    assert (work.tokens, work.sampled) == (2 + 9 + 2 + 8, 17)
    looked = 0
    for responses in ((2, 3, 4), (3, 4, 1)):
        looked += 1 + 2  # the prompt's two tokens
        looked += sum(position + 1 for r in responses for position in range(2, 2 + r))
    assert work.pairs == looked
    speed = Speed({}, {}, {"policy": treadle_cost(10, 100, 1)})
    assert speed.operations(work, {"policy": 3}) == 3 * (10 * work.tokens + 100 * work.sampled + work.pairs)
    first = Work.of(batch, torch.tensor([True, False, False, False, False, False]))
    assert (first.tokens, first.sampled) == (4, 2)


SECONDS = {"generate": 2.0, "observe": 1.0, "update": 4.0, "publish": 1.0}


def measured(speed: Speed, seconds: dict[str, float], overlap: bool = False) -> dict[str, float]:
    """Of one step of PPO on the batch above."""
    batch = Batch.pack([group(1), group(2)])
    batch = batch.replace(advantage_T=batch.mask_T.float()).mark_signal()
    found = measure_speed(batch, seconds, PPO(), ["policy", "critic"], speed, overlap)
    return {name: statistic.value for name, statistic in found.items()}


def test_shares_are_of_the_devices_at_work() -> None:
    """21 tokens pass through each of two models of 10 operations a token: forward once, and thrice in the update."""
    costs: Any = {role: treadle_cost(10, 0, 0) for role in ("policy", "critic")}
    pools: Any = {"policy": "train", "critic": "look", "rollout": "generate"}
    found = measured(Speed({"train": 400.0, "look": 100.0, "generate": 200.0}, pools, costs), SECONDS)
    assert found["time/generate/tokens_per_second"] == 17 / 2
    assert found["time/generate/matrix_share"] == pytest.approx(210 / (2 * 200))
    assert found["time/observe/matrix_share"] == pytest.approx(2 * 210 / (1 * 500))
    assert found["time/update/tokens_per_second"] == 2 * 21 / 4
    assert found["time/update/matrix_share"] == pytest.approx(2 * 630 / (4 * 500))


def test_a_rate_that_was_measured_beside_other_work_is_corrected() -> None:
    costs: Any = {role: treadle_cost(10, 0, 0) for role in ("policy", "critic")}
    pools: Any = dict.fromkeys(("policy", "critic", "rollout"), "here")
    speed = Speed({"here": 50.0}, pools, costs)
    found = measured(speed, SECONDS)
    assert speed.rates == {"here": pytest.approx(2 * 210 / 1)}  # of the fastest stage
    assert found["time/observe/matrix_share"] == pytest.approx(1.0)
    assert found["time/update/matrix_share"] == pytest.approx(2 * 630 / 4 / 420)
    assert found["time/generate/matrix_share"] == pytest.approx(210 / 2 / 420)  # by the same rate, though it came first
    assert measured(speed, SECONDS) == found
    # Generation that went on during other stages was waited for a moment only, and says nothing of the rate.
    overlapped = measured(speed, SECONDS | {"generate": 1e-6}, overlap=True)
    assert speed.rates == {"here": pytest.approx(2 * 210 / 1)}
    assert "time/generate/tokens_per_second" not in overlapped


def test_tokens_are_counted_where_operations_are_not_known() -> None:
    pools: Any = dict.fromkeys(("policy", "critic", "rollout"), "here")
    found = measured(Speed({"here": 1.0}, pools, None), SECONDS)
    assert set(found) == {f"time/{stage}/tokens_per_second" for stage in ("generate", "observe", "update")}


def treadle_cost(token: float, logits: float, pair: float) -> Any:
    from treadle.handles import Cost

    return Cost(token, logits, pair)
