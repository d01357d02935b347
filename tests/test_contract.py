"""The laws of an algorithm: every one of ours keeps them, and each planted bug breaks the law that it should."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from treadle.algorithms.advantages import group_relative
from treadle.algorithms.base import Algorithm
from treadle.algorithms.clip import Clip
from treadle.algorithms.group_relative import GroupRelative, GroupRelativeConfig
from treadle.algorithms.grpo import GRPO, GRPOConfig
from treadle.algorithms.importance import Importance, ImportanceConfig
from treadle.algorithms.policy_gradient import Estimator, Surrogate
from treadle.algorithms.ppo import PPO
from treadle.algorithms.ratio import ratio
from treadle.batch import Batch
from treadle.cli import main
from treadle.config.plugins import Plugin
from treadle.contract import keys, laws
from treadle.contract.check import LAWS, check, verdicts
from treadle.contract.target import algorithm_of
from treadle.errors import ConfigError, TrainingError
from treadle.handles import Loss, Outputs
from treadle.types import Group, Prompt, Request

NAMES = sorted(Plugin("treadle.algorithms").choices())
VARIANTS = [
    *((name, []) for name in NAMES),
    ("clip", ["dual_clip=3", "clip_high=0.28"]),
    ("grpo", ["scale=none", "kl_coefficient=0.1", "entropy_coefficient=0.01"]),
    ("grpo", ["kl_coefficient=0.1", "kl_in=reward", "minibatches=2"]),
    ("gspo+rloo", []),
    ("gspo+critic", ["level=token"]),
    ("dppo", ["divergence=kl"]),
    ("dro", ["level=token"]),
    ("importance", ["truncate=2"]),
    ("importance+optimal_token", ["correction.weight=token"]),
    ("reinforce_plus_plus", ["kl_coefficient=0.1"]),
    *(
        ("grpo", [f"correction.{key}" for key in keys])
        for keys in (
            ["weight=token"],
            ["weight=token", "outside=zero", "weight_low=0.5"],
            ["weight=sequence", "normalize=true"],
            ["reject=token"],
            ["reject=sequence-sum"],
            ["reject=sequence-mean", "weight=token"],
            ["reject=sequence-max"],
            ["proximal=sampler"],
            ["proximal=interpolated", "weight=token"],
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_ours_keep_every_law(name: str, overrides: list[str]) -> None:
    check(algorithm_of(name, overrides), examples=8)


# ---------------------------------------------------------------------- planted bugs


class NeighboursAreTheGroup(GRPO):
    """Takes each pair of rows that stand together for a group."""

    def advantages(self, batch: Batch) -> Batch:
        group_N = torch.arange(len(batch)) // 2
        advantage_N = group_relative(batch.reward_N, group_N, batch.sample_N)
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])


class TrajectoriesAreSamples(GRPO):
    """Counts a sample as often as it has trajectories."""

    def advantages(self, batch: Batch) -> Batch:
        advantage_N = group_relative(batch.reward_N, batch.group_N, torch.arange(len(batch)))
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])


class BareDeviation(GRPO):
    """Divides by the deviation as it is."""

    def advantages(self, batch: Batch) -> Batch:
        known_G, group_N = batch.group_N.unique(return_inverse=True)
        advantage_N = batch.reward_N.clone()
        for group in range(len(known_G)):
            mine = group_N == group
            advantage_N[mine] = (batch.reward_N[mine] - batch.reward_N[mine].mean()) / batch.reward_N[mine].std()
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])


class SmallFloor(BareDeviation):
    """A floor far below the rounding of a mean."""

    def advantages(self, batch: Batch) -> Batch:
        known_G, group_N = batch.group_N.unique(return_inverse=True)
        advantage_N = batch.reward_N.clone()
        for group in range(len(known_G)):
            mine = batch.reward_N[group_N == group]
            spread = mine.std() if len(mine) > 1 else torch.zeros((), dtype=mine.dtype)
            advantage_N[group_N == group] = (mine - mine.mean()) / (spread + 1e-20)
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])


class WholeBatchIsTheGroup(GRPO):
    """One baseline for all prompts."""

    def advantages(self, batch: Batch) -> Batch:
        advantage_N = group_relative(batch.reward_N, batch.group_N * 0, batch.sample_N)
        return batch.replace(advantage_T=advantage_N.float()[batch.row_T])


class WorseIsBetter(GRPO):
    def advantages(self, batch: Batch) -> Batch:
        batch = super().advantages(batch)
        assert batch.advantage_T is not None
        return batch.replace(advantage_T=-batch.advantage_T)


class Ascends(GRPO):
    """Maximises what should be minimised."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        found = super().surrogate(batch, logprob_T, old_T)
        return Surrogate(-found.term_T, found.cut_T)


class Forgetful(GRPO):
    """Detaches the ratio, and nothing is learned from negative advantages."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        found = super().surrogate(batch, logprob_T, old_T)
        assert batch.advantage_T is not None
        return Surrogate(found.term_T.where(batch.advantage_T > 0, found.term_T.detach()), found.cut_T)


class OwnMean(GRPO):
    """Divides by the tokens of the part that it happens to see."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        found = super().surrogate(batch, logprob_T, old_T)
        return Surrogate(found.term_T / max(len(logprob_T), 1), found.cut_T)


class WhitensItsPart(GRPO):
    """Centres advantages inside the loss, over one micro-batch."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        centred_T = batch.advantage_T - (batch.advantage_T.mean() if len(logprob_T) else 0)
        return super().surrogate(batch.replace(advantage_T=centred_T), logprob_T, old_T)


class Unbounded(GRPO):
    """A ratio that is exponentiated as it is."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        return Surrogate(-(logprob_T - old_T).exp() * batch.advantage_T, batch.mask_T & False)


class WritesOver(GRPO):
    """Adds the advantages to the recorded rewards in place."""

    def advantages(self, batch: Batch) -> Batch:
        batch = super().advantages(batch)
        batch.reward_N.sub_(batch.reward_N.mean())
        return batch


class Dropout(GRPO):
    """A global generator's state decides."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        found = super().surrogate(batch, logprob_T, old_T)
        return Surrogate(found.term_T * (1 + random.random()), found.cut_T)


class SkipsTooMuch(GRPO):
    """Promises zero terms without an advantage, and pulls at the entropy all the same."""

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        found = super().loss(batch, outputs)
        assert outputs.entropy_T is not None
        return Loss([*found.terms, self.term(-outputs.entropy_T, 0.1)], found.metrics, found.peaks)


class LooksAtMasked(GRPO):
    """Its baseline counts what is masked."""

    def estimate(self, batch: Batch, version: int = 0) -> Batch:
        found = super().estimate(batch, version)
        assert found.advantage_T is not None
        return found.replace(advantage_T=found.advantage_T + batch.token_T.float().mean())


class KeepsRejected(GRPO):
    """Rejected samples stay in the baseline."""

    def estimate(self, batch: Batch, version: int = 0) -> Batch:
        whole = GRPO(self.config.model_copy(update={"truncated": "train"})).estimate(batch, version)
        if self.config.truncated == "reject":
            whole = whole.replace(mask_T=whole.mask_T & ~whole.truncated_N[whole.row_T])
        return whole


class NoDefinition(GRPO):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        found = super().loss(batch, outputs)
        return Loss(found.terms, {**found.metrics, "surprise": -outputs.logprob_T.detach()}, found.peaks)  # type: ignore[operator]


class Scalar(GRPO):
    """Averages by itself, and hands over one number."""

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        found = super().loss(batch, outputs)
        return Loss([self.term(found.terms[0].term_T.mean())], found.metrics, found.peaks)


class FirstTokenOnly(GRPO):
    """An index that is one too small where a row is empty."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        found = super().surrogate(batch, logprob_T, old_T)
        first_T = torch.zeros(len(logprob_T)).index_fill(0, batch.offset_N1[:-1], 1.0)
        return Surrogate(found.term_T * first_T, found.cut_T)


class Crowded(Importance, GroupRelative):
    """Scales advantages by the size of the batch that it sees."""

    Config = type("CrowdedConfig", (ImportanceConfig, GroupRelativeConfig), {"__module__": __name__})

    def advantages(self, batch: Batch) -> Batch:
        batch = super().advantages(batch)
        assert batch.advantage_T is not None
        return batch.replace(advantage_T=batch.advantage_T * len(batch))


class ClipsTheWrongSide(GRPO):
    """Cuts what has moved against its advantage."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        ratio_T = ratio(logprob_T, old_T)
        return Surrogate(-ratio_T.clamp(0.8, 1.2) * batch.advantage_T, batch.mask_T & False)


class Plain(Algorithm):
    """No promise is made, and the sign is wrong."""

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantage_T=batch.reward_N.float()[batch.row_T])

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert batch.advantage_T is not None
        assert outputs.logprob_T is not None
        return Loss([self.term(outputs.logprob_T * batch.advantage_T)])


class Leaky(GRPO):
    """Selects the largest ratios of the micro-batch instead of the mini-batch."""

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        ratio_T = ratio(logprob_T, old_T)
        keep_T = ratio_T <= ratio_T.detach().median() if len(ratio_T) else ratio_T > 0
        return Surrogate(-ratio_T * batch.advantage_T * keep_T, ~keep_T)


class SelectsInVain(GRPO):
    """Selects tokens, and does not say that it wants to."""

    def select(self, batch: Batch, outputs: Outputs) -> Batch:
        return batch


class AsksForNothing(Plain):
    """Looks at entropies that nobody was asked for."""

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert outputs.logprob_T is not None
        return Loss([self.term(-outputs.logprob_T * batch.advantage_T - outputs.entropy_T)])  # type: ignore[operator]


class LooksTooEarly(Plain):
    """Its advantages look at old log-probs that no pass has made yet."""

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantage_T=batch.reward_N.float()[batch.row_T] + batch.old_logprob_T)  # type: ignore[operator]


class TrustsTheConfiguration(GRPO):
    """Divides by the group size that was asked for, whoever failed."""

    def advantages(self, batch: Batch) -> Batch:
        size = self.config.group_size
        total_G = torch.zeros(size + len(batch), dtype=torch.float64).index_add(0, batch.group_N % size, batch.reward_N)
        return batch.replace(advantage_T=(batch.reward_N - total_G[batch.group_N % size] / size).float()[batch.row_T])


class ByWholeLength(GRPO):
    """Long prompts count less."""

    def estimate(self, batch: Batch, version: int = 0) -> Batch:
        found = super().estimate(batch, version)
        assert found.advantage_T is not None
        return found.replace(advantage_T=found.advantage_T / found.length_N[found.row_T])


class Forgets(GRPO):
    """Adapts its KL coefficient, which a restart undoes."""

    def __init__(self, config: GRPOConfig | None = None) -> None:
        super().__init__(config)
        self.times = 1.0

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.times *= 1.1

    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        found = super().surrogate(batch, logprob_T, old_T)
        return Surrogate(found.term_T * self.times, found.cut_T)


class TakesATensorAlong(GRPO):
    def state(self) -> dict[str, Any]:
        return {**super().state(), "mean": torch.zeros(1)}


class AlwaysBootstraps(PPO):
    def advantages(self, batch: Batch) -> Batch:
        return super().advantages(batch.replace(truncated_N=batch.truncated_N | True))


class FleesItsReturn(PPO):
    def value_loss(self, batch: Batch, outputs: Outputs) -> Loss:
        found = super().value_loss(batch, outputs)
        return Loss([self.term(-found.terms[0].term_T)], found.metrics)


class NoWeights(GRPO):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        return super().loss(batch.replace(weight_T=None), outputs)


class FleesTheReference(GRPO):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        found = super().loss(batch, outputs)
        first, *others = found.terms
        return Loss([first, *(self.term(-t.term_T, t.coefficient) for t in others)], found.metrics, found.peaks)


class KeepsTheDull(GRPO):
    def keep(self, group: Group) -> str | None:
        return "rewards differ" if super().keep(group) is None else None


class SeedsEverything(GRPO):
    def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
        torch.manual_seed(0)
        return super().surrogate(batch, logprob_T, old_T)


class OneTooFew(GRPO):
    def requests(self, prompt: Prompt) -> list[Request]:
        return super().requests(prompt)[1:]


class RatioToTheSampler(GRPO):
    """The ratio of an uncorrected objective is to the weights that the step started with."""

    def old_logprob(self, batch: Batch, outputs: Outputs) -> torch.Tensor:
        return batch.sampling_logprob_T


class WeighsTheKLToo(GRPO):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        found = super().loss(batch, outputs)
        first, *others = found.terms
        weight_T = 1.0 if batch.weight_T is None else batch.weight_T
        return Loss(
            [first, *(self.term(t.term_T * weight_T, t.coefficient) for t in others)], found.metrics, found.peaks
        )


PLANTED: list[tuple[type[Any], str]] = [
    (NeighboursAreTheGroup, "identity"),
    (TrajectoriesAreSamples, "counted_once"),
    (BareDeviation, "equal_groups"),
    (SmallFloor, "tiny_spread"),
    (WholeBatchIsTheGroup, "apart"),
    (WorseIsBetter, "order"),
    (Ascends, "direction"),
    (Forgetful, "direction"),
    (OwnMean, "split"),
    (WhitensItsPart, "split"),
    (Unbounded, "finite"),
    (WritesOver, "repeatable"),
    (Dropout, "repeatable"),
    (SkipsTooMuch, "skipping"),
    (LooksAtMasked, "masked"),
    (KeepsRejected, "rejected"),
    (NoDefinition, "defined"),
    (Scalar, "split"),
    (FirstTokenOnly, "direction"),
    (Crowded, "apart"),
    (Leaky, "split"),
    (ClipsTheWrongSide, "pulled_back"),
    (Plain, "direction"),
    (SelectsInVain, "declared"),
    (AsksForNothing, "finite"),
    (LooksTooEarly, "finite"),
    (TrustsTheConfiguration, "sizes"),
    (ByWholeLength, "prompts"),
    (Forgets, "remembers"),
    (TakesATensorAlong, "remembers"),
    (AlwaysBootstraps, "terminated"),
    (FleesItsReturn, "towards"),
    (NoWeights, "weighted"),
    (FleesTheReference, "kl_pulls"),
    (FleesTheReference, "entropy_bonus"),
    (KeepsTheDull, "keeps"),
    (SeedsEverything, "repeatable"),
    (OneTooFew, "requests"),
    (RatioToTheSampler, "sampler_unseen"),
    (WeighsTheKLToo, "weighted"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "law"), PLANTED, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_planted_bug_breaks_the_law_that_it_should(planted: type[Any], law: str) -> None:
    others = [other.name for other in LAWS if other.name != law]
    (verdict,) = verdicts(planted(), examples=30, without=others)
    assert verdict.broken is not None
    assert "group 0: p" in verdict.broken


def test_an_example_is_the_least_of_its_kind() -> None:
    (verdict,) = verdicts(WorseIsBetter(), without=[law.name for law in LAWS if law.name != "order"])
    assert verdict.broken == (
        "the better answer has the advantage -2.041, a worse one 0.4082\n"
        "  with\n"
        "    group 0: ps earns 1 | ps earns 0 | ps earns 0 | ps earns 0 | ps earns 0 | ps earns 0\n"
        "    log-probs 0 nats apart (seed 0)"
    )


def test_every_law_that_is_written_is_tried() -> None:
    written = {name for module in (laws, keys) for name, thing in vars(module).items() if isinstance(thing, laws.Law)}
    assert [law.name for law in LAWS] == list(dict.fromkeys(law.name for law in LAWS))
    assert {law.name for law in LAWS} == written


def test_every_law_is_broken_by_something() -> None:
    known = {law for _, law in PLANTED} | {"no_signal", "degenerate", "shift", "scale"}
    assert {law.name for law in LAWS} == known


class Drifts(Estimator):
    """Pulls also where no advantage is, depends on the absolute reward, and fails on a group of one."""

    Config = GRPOConfig
    config: GRPOConfig
    partner = "importance"
    on_shift = "same"
    on_scale = "linear"

    def advantages(self, batch: Batch) -> Batch:
        if len(batch) == 1:
            raise IndexError("a group of one")
        return batch.replace(advantage_T=batch.reward_N.square().float()[batch.row_T])

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        found = super().loss(batch, outputs)
        assert outputs.logprob_T is not None
        return Loss([*found.terms, self.term(outputs.logprob_T)], found.metrics, found.peaks)


def test_what_is_declared_is_held_to() -> None:
    broken = {v.law.name for v in verdicts(Drifts.joined()()) if v.broken is not None}  # type: ignore[operator]
    assert {"no_signal", "degenerate", "shift", "scale"} <= broken


def test_a_law_can_be_left_out(check_algorithm: Callable[..., None]) -> None:
    """Learning from positive advantages alone is no mistake where it is meant."""

    class Positive(GRPO):
        def surrogate(self, batch: Batch, logprob_T: torch.Tensor, old_T: torch.Tensor) -> Surrogate:
            found = super().surrogate(batch, logprob_T, old_T)
            assert batch.advantage_T is not None
            return Surrogate(found.term_T * (batch.advantage_T > 0), found.cut_T)

    with pytest.raises(TrainingError, match="direction"):
        check_algorithm(Positive(), examples=5)
    check_algorithm(Positive(), examples=5, without=["direction", "pulled_back"])
    with pytest.raises(ConfigError, match="there is no law 'directions'"):
        check_algorithm(Positive(), without=["directions"])


def test_the_fixture_names_the_law_and_the_least_example(check_algorithm: Callable[[Any], None]) -> None:
    check_algorithm(GRPO())
    with pytest.raises(TrainingError, match=r"Ascends breaks \d of the laws(.|\n)*direction:(.|\n)*group 0: ps earns"):
        check_algorithm(Ascends())


def test_a_baseline_sample_is_drawn_where_the_algorithm_asks_for_one() -> None:
    class Jealous(Clip, Estimator):
        Config = GRPOConfig
        config: GRPOConfig
        seen = 0

        def requests(self, prompt: Prompt) -> list[Request]:
            return algorithm_of("remax").requests(prompt)

        def advantages(self, batch: Batch) -> Batch:
            type(self).seen += int(batch.baseline_N.sum())
            return batch.replace(advantage_T=batch.reward_N.float()[batch.row_T])

    list(verdicts(Jealous(), examples=3))
    assert Jealous.seen > 0


# ---------------------------------------------------------------------- the command

MINE = """
from treadle.algorithms.grpo import GRPO

class Mine(GRPO):
    def advantages(self, batch):
        batch = super().advantages(batch)
        return batch.replace(advantage_T=batch.advantage_T{change})
"""


@pytest.mark.parametrize(("change", "code"), [("", 0), (" * -1", 1), (".nope()", 1)])
def test_the_command_checks_a_class_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, code: int
) -> None:
    name = f"mine_{code}_{len(change)}"
    (tmp_path / f"{name}.py").write_text(MINE.format(change=change))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["check", f"{name}:Mine", "clip_high=0.3", "--examples", "5"])
    assert result.exit_code == code, result.output
    assert "ok finite" in result.output if code == 0 else "✗" in result.output
    if change == ".nope()":
        assert "'Tensor' object has no attribute 'nope'" in result.output
        assert f"{name}.py:7" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no 'nothing' in treadle.algorithms"),
        (["rloo+opo"], "both say what the advantages are"),
        (["grpo", "clip_hihg=1"], "did you mean algorithm.clip_high"),
        (["gmpo+critic"], "each token an advantage of its own"),
    ],
)
def test_the_command_refuses_what_is_no_algorithm(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["check", *arguments])
    assert result.exit_code == 2
    assert said in result.output
