"""The loop's rules, under a virtual clock: bounded staleness, no deadlock, no starvation, a failure ends the run.

The collaborators are fakes of the protocols in `treadle.handles`; `tests/test_train.py` runs it on real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import virtual_clock
from treadle.algorithms.base import Algorithm, AlgorithmConfig
from treadle.batch import Batch
from treadle.errors import RewardError, TrainingError
from treadle.handles import Learned
from treadle.recipes.config import EvaluationConfig, RLConfig
from treadle.recipes.rl import train
from treadle.recipes.system import System
from treadle.runs.progress import Progress
from treadle.types import Ended, Group, Mean, Prompt, Provenance, Request, Reward, Sample, Trajectory

GROUP = 2


class Plain(Algorithm):
    """Reward as advantage; nothing else."""

    Config = AlgorithmConfig
    drop: Callable[[Group], bool] = staticmethod(lambda _: False)

    def keep(self, group: Group) -> str | None:
        return "dropped by the test" if self.drop(group) else None

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantage_T=batch.reward_N[batch.row_T].float())


class WarmedUp(Plain):
    """Has a critic, and the policy learns only from the third step on."""

    uses = frozenset({"critic"})
    skips_no_signal = False

    def first_step(self, role: str) -> int:
        return 2 if role == "policy" else 0


@dataclass
class World:
    """All fakes at once, and what they saw."""

    seconds: Callable[[int], float] = lambda _: 1.0  # of generating a group, by prompt index
    learning: float = 5.0
    prompts: int = 1 << 30
    raises: dict[str, BaseException] = field(default_factory=dict)
    not_finite: frozenset[int] = frozenset()  # optimizer steps that are skipped
    skipped: dict[str, int] = field(default_factory=dict)  # PromptSource
    fed_back: list[int] = field(default_factory=list)
    version: int = 0
    updates: int = 0
    trained: list[tuple[int, list[int], int]] = field(default_factory=list)  # step, groups, staleness
    filtered: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    saved: list[tuple[int, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    handed_out: int = 0
    restored: Any = None
    every: int = 0  # steps between checkpoints
    issued: set[str] = field(default_factory=set)

    def _fail(self, where: str) -> None:
        if where in self.raises:
            raise self.raises[where]

    # PromptSource
    def next(self) -> Prompt | None:
        if self.handed_out >= self.prompts:
            return None
        self.handed_out += 1
        index = self.handed_out - 1
        return Prompt(str(index), index, (), (1, 2))

    def feedback(self, group: Group) -> None:
        self.fed_back.append(group.index)

    def state(self) -> Mapping[str, Any]:
        return {"handed_out": self.handed_out}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.handed_out = state["handed_out"]

    # RolloutHandle
    def stats(self) -> Mapping[str, float]:
        return {}

    # Agent: two tokens, the second half of the generation after the first; each carries its version
    async def agent(self, request: Request, sample_id: str, rollout: Any) -> list[Trajectory]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        first = self.version
        self._fail("agent")
        await asyncio.sleep(self.seconds(request.prompt.index))
        self.in_flight -= 1
        tokens = np.array([1, 2, 3, 4])
        return [
            Trajectory(
                prompt=request.prompt,
                token_T=tokens,
                provenance_T=np.array([Provenance.PROMPT] * 2 + [Provenance.SAMPLED] * 2, np.uint8),
                logprob_T=np.array([np.nan, np.nan, -1, -1], np.float32),
                version_T=np.array([-1, -1, first, self.version], np.int32),
                turn_ends=(3,),
                ended=Ended.TERMINATED,
            )
        ]

    async def scorer(self, trajectory: Trajectory) -> Reward:
        self._fail("scorer")
        return Reward(1.0)

    async def publish(self, version: int) -> dict[str, Any]:
        self._fail("publish")
        await asyncio.sleep(0.5)
        self.version = version
        self.versions.append(version)
        return {}

    # TrainedHandle
    async def annotate(self, batch: Batch) -> Mapping[str, Any]:
        return {}

    async def step(self, batch: Batch, state: Mapping[str, Any]) -> Learned:
        self._fail("step")
        await asyncio.sleep(self.learning)
        self.updates += 1
        return Learned({"policy/updated": Mean(float(self.updates not in self.not_finite))})

    async def save(self, path: Path) -> None: ...
    async def load(self, path: Path) -> None: ...

    def system(self, algorithm: Algorithm) -> System:
        models: Any = {role: self if role == "policy" else Critic(self) for role in algorithm.trains}
        me: Any = self
        return System(
            algorithm=algorithm,
            prompts=me,
            held_out=[],
            agent=self.agent,
            evaluator=self.agent,
            scorer=self.scorer,
            rollout=me,
            publish=self.publish,
            observers=models,
            learners=models,
            record=FakeRecord(self),  # type: ignore[arg-type]
        )


@dataclass
class Critic:
    """A second trained role."""

    world: World

    async def annotate(self, batch: Batch) -> Mapping[str, Any]:
        return {}

    async def step(self, batch: Batch, state: Mapping[str, Any]) -> Learned:
        await asyncio.sleep(1.0)
        return Learned({"critic/updated": Mean(1.0)})

    async def save(self, path: Path) -> None: ...
    async def load(self, path: Path) -> None: ...


@dataclass
class FakeRecord:
    """Stands for `treadle.runs.recorder.Recorder` (tested for itself)."""

    world: World

    def __post_init__(self) -> None:
        self.progress = Progress()  # silent before `start`

    def restore(self) -> Any:
        return self.world.restored

    def issued(self, prompt: Prompt, samples: list[tuple[str, Any]], step: int) -> None:
        ids = {sample for sample, _ in samples}
        assert not ids & self.world.issued, "issued twice"
        self.world.issued |= ids

    def evaluated(self, step: int, groups: Any, statistics: Any) -> None: ...

    def filtered(self, group: Group, step: int, why: str) -> None:
        self.world.filtered.append(group.index)

    def trained(self, step: int, groups: list[Group], batch: Batch, statistics: Any, seconds: Any) -> None:
        self.world.trained.append((step, [g.index for g in groups], int(statistics["staleness/max"].value)))

    def checkpoint_due(self, step: int) -> bool:
        return self.world.every > 0 and step % self.world.every == 0

    @contextmanager
    def checkpoint(self, step: int, state: Any) -> Iterator[Path]:
        yield Path("unused")
        assert step not in [s for s, _ in self.world.saved], "a whole checkpoint is never replaced"
        self.world.saved.append((step, state))


def config(steps: int, staleness: int, prompts_per_step: int, **more: Any) -> RLConfig:
    return RLConfig.model_validate(
        {
            "model": "nowhere",
            "steps": steps,
            "max_staleness": staleness,
            "prompts_per_step": prompts_per_step,
            "data": {"train": {"name": "jsonl", "path": "nowhere.jsonl"}},
            "reward": {"functions": {"number": 1.0}, "max_failed": 0.0},
            "run": {"dir": "nowhere"},
            **more,
        }
    )


def loop(world: World, steps: int = 6, staleness: int = 0, n: int = 3, algorithm: Algorithm | None = None) -> float:
    """Run to the end; virtual seconds taken."""

    async def main() -> float:
        chosen = algorithm or Plain(AlgorithmConfig(group_size=GROUP))
        await train(config(steps, staleness, n), world.system(chosen))
        return asyncio.get_running_loop().time()

    return virtual_clock.run(main())


@settings(deadline=None, max_examples=60)
@given(
    staleness=st.integers(0, 4),
    n=st.integers(1, 4),
    slow=st.dictionaries(st.integers(0, 30), st.sampled_from([7.0, 40.0, 300.0]), max_size=8),
    learning=st.sampled_from([0.0, 1.0, 20.0]),
    dropped=st.sets(st.integers(0, 40), max_size=10),
)
def test_staleness_is_bounded_and_every_group_trains_in_start_order(
    staleness: int, n: int, slow: dict[int, float], learning: float, dropped: set[int]
) -> None:
    world = World(seconds=lambda i: slow.get(i, 1.0), learning=learning)
    algorithm = Plain(AlgorithmConfig(group_size=GROUP))
    algorithm.drop = lambda group: group.index in dropped
    steps = 8
    loop(world, steps, staleness, n, algorithm)

    order = [g for _, groups, _ in world.trained for g in groups]
    assert [step for step, *_ in world.trained] == list(range(1, steps + 1))
    assert order == [g for g in range(order[-1] + 1) if g not in dropped]  # none lost, none twice, none overtaken
    assert max(stale for *_, stale in world.trained) <= staleness
    assert world.most_in_flight <= (staleness + 1) * n * GROUP
    assert world.versions == list(range(steps + 1))


def test_the_bound_is_reached_so_that_the_test_above_can_fail() -> None:
    world = World(seconds=lambda i: 60.0 if i % 5 == 0 else 1.0, learning=1.0)
    loop(world, steps=12, staleness=3, n=1)
    assert max(stale for *_, stale in world.trained) == 3


def test_synchronous_generates_nothing_while_it_learns_and_staleness_hides_the_shorter_of_the_two() -> None:
    together = loop(World(seconds=lambda _: 5.0), steps=10)
    overlapped = loop(World(seconds=lambda _: 5.0), steps=10, staleness=1)
    assert together == pytest.approx(0.5 + 10 * (5 + 5 + 0.5))
    assert overlapped == pytest.approx(0.5 + 5 + 10 * (5 + 0.5), abs=1)


def test_finite_data_ends_with_a_smaller_step() -> None:
    world = World(prompts=7)
    loop(world, steps=100, staleness=1, n=3)
    assert [len(groups) for _, groups, _ in world.trained] == [3, 3, 1]


@pytest.mark.parametrize("steps", [3, 100])
def test_a_restart_with_nothing_left_to_do_ends(steps: int) -> None:
    """At the last step, or at the end of the data, which falls on a step that has its checkpoint."""
    before = World(prompts=9, every=1)
    loop(before, steps=3)
    for _ in range(2):
        after = World(prompts=9, every=1, restored=(Path("unused"), before.saved[-1][1]))
        loop(after, steps=steps)
        assert not after.trained
    whole = World(prompts=9, every=1)
    loop(whole, steps=100)
    assert [step for step, _ in whole.saved] == [1, 2, 3]


def test_a_source_hears_of_every_group_in_start_order_before_its_state_is_saved() -> None:
    world = World(seconds=lambda i: 9.0 if i % 3 else 1.0)
    algorithm = Plain(AlgorithmConfig(group_size=GROUP))
    algorithm.drop = lambda group: group.index % 4 == 1
    loop(world, steps=4, staleness=2, algorithm=algorithm)
    assert world.fed_back == list(range(len(world.fed_back)))


def test_max_filtered_groups_counts_groups_in_a_row() -> None:
    async def main() -> None:
        algorithm = Plain(AlgorithmConfig(group_size=GROUP))
        algorithm.drop = lambda group: group.index % 2 == 0
        await train(config(2, 0, 20, max_filtered_groups=3), World().system(algorithm))

    virtual_clock.run(main())


@pytest.mark.parametrize("wrong", [None, [], ["prompt"]])
def test_what_an_algorithm_asks_for_is_checked(wrong: Any) -> None:
    algorithm = Plain(AlgorithmConfig(group_size=GROUP))
    algorithm.requests = lambda prompt: wrong
    with pytest.raises(TrainingError, match=r"Plain\.requests"):
        loop(World(), algorithm=algorithm)


def test_what_an_algorithm_says_of_a_group_is_checked() -> None:
    algorithm = Plain(AlgorithmConfig(group_size=GROUP))
    algorithm.keep = lambda group: False  # type: ignore[assignment]
    with pytest.raises(TrainingError, match=r"Plain\.keep returned False"):
        loop(World(), algorithm=algorithm)


def test_data_of_which_nothing_trains_are_an_error_and_no_finished_run() -> None:
    algorithm = Plain(AlgorithmConfig(group_size=GROUP))
    algorithm.drop = lambda group: True
    with pytest.raises(TrainingError, match="no step was trained"):
        loop(World(prompts=7), algorithm=algorithm)


def test_filters_that_starve_the_trainer_end_the_run_loudly() -> None:
    algorithm = Plain(AlgorithmConfig(group_size=GROUP))
    algorithm.drop = lambda group: group.index >= 4
    with pytest.raises(TrainingError, match=r"filtered .* 1 of 3 .* step 2"):
        loop(World(), algorithm=algorithm)


@pytest.mark.parametrize("where", ["agent", "scorer", "step", "publish"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_first_failure_ends_the_run_at_once_with_its_own_traceback(where: str, staleness: int) -> None:
    class BoomError(RewardError):
        pass

    world = World(seconds=lambda i: 1e6 if i == 1 else 1.0, raises={where: BoomError(where)})
    if where == "step":
        world.seconds = lambda _: 1.0
    with pytest.raises(BoomError, match=where) as caught:
        loop(world, staleness=staleness)
    assert any(entry.name == "_fail" for entry in caught.traceback)
    assert not world.trained


def test_failed_samples_within_the_bound_are_no_reward_of_zero() -> None:
    world = World()

    async def scorer(trajectory: Trajectory) -> Reward:
        if trajectory.prompt.index % 2:
            raise RewardError("the judge is down")
        return Reward(1.0)

    world.scorer = scorer  # type: ignore[method-assign]

    async def main() -> None:
        settings = config(4, 0, 3, reward={"functions": {"number": 1.0}, "max_failed": 1.0})
        await train(settings, world.system(Plain(AlgorithmConfig(group_size=GROUP))))

    virtual_clock.run(main())
    assert [g for _, groups, _ in world.trained for g in groups] == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]
    assert {1, 3, 5, 7, 9} <= set(world.filtered)


def test_a_step_that_moves_no_policy_weights_publishes_nothing_and_keeps_the_version() -> None:
    world = World()
    loop(world, steps=5, algorithm=WarmedUp(AlgorithmConfig(group_size=GROUP)))
    assert world.versions == [0, 1, 2, 3]  # two steps of critic warm-up
    world = World(not_finite=frozenset({2}))
    loop(world, steps=4)
    assert world.versions == [0, 1, 2, 3]  # the second step was not finite


def test_a_restart_begins_with_the_prompts_that_were_in_flight() -> None:
    before = World()
    loop(before, steps=3, staleness=2, n=2)
    (step, state), trained = before.saved[-1], [g for _, groups, _ in before.trained for g in groups]
    assert step == 3
    state = json.loads(json.dumps(state))
    assert any(int(i.split(".")[0]) >= 6 for i in before.issued)  # something was in flight
    after = World(restored=(Path("unused"), state))
    loop(after, steps=6, staleness=2, n=2)
    trained += [g for _, groups, _ in after.trained for g in groups]
    assert trained == list(range(12))  # no prompt lost, none trained twice
    assert after.versions == [3, 4, 5, 6]


def test_evaluation_runs_at_its_steps_and_before_slots_are_given_back() -> None:
    world, seen = World(), []

    async def main() -> None:
        system = replace(world.system(Plain(AlgorithmConfig(group_size=GROUP))), held_out=[Prompt("h", 0, (), (1, 2))])

        def evaluated(step: int, groups: Mapping[str, list[Group]], _: Any) -> None:
            seen.append((step, {way: len(g[0].samples) for way, g in groups.items()}, world.in_flight))

        system.record.evaluated = evaluated  # type: ignore[method-assign]
        evaluation = EvaluationConfig(every=2, samples=3)
        await train(config(5, 0, 2, evaluation=evaluation.model_dump()), system)

    virtual_clock.run(main())
    assert seen == [(s, {"sampled": 3, "greedy": 1}, 0) for s in (0, 2, 4, 5)]


def test_several_trajectories_of_a_sample_share_its_reward() -> None:
    world = World()
    plain_agent = world.agent

    async def branching(request: Request, sample_id: str, rollout: Any) -> list[Trajectory]:
        return await plain_agent(request, sample_id, rollout) * 2

    world.agent = branching  # type: ignore[method-assign]
    seen: list[Sample] = []
    algorithm = Plain(AlgorithmConfig(group_size=GROUP))
    algorithm.drop = lambda group: seen.extend(group.samples) or False
    loop(world, steps=1, algorithm=algorithm)
    assert all(t.reward == Reward(1.0) for sample in seen for t in sample.trajectories)
    assert {len(sample.trajectories) for sample in seen} == {2}
