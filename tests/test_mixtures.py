"""Sources made of sources: mixtures by weight, and the curriculum that revisits what can be learnt from."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treadle
from tests import runs
from tests.data_help import after_restart, group, renderer, source, take, write_lines
from treadle.config import key
from treadle.data.config import make_source
from treadle.data.source import TOO_LONG, Order, Row, RowSource, SourceConfig, prompts
from treadle.errors import DataError
from treadle.runs.metrics import read_rows
from treadle.types import Group, Prompt


class Levels(RowSource):
    """A curriculum of one's own: rows of `level`, which rises when half of a group is right."""

    class Config(SourceConfig):
        name: str = key("where prompts come from", default="tests.test_mixtures:Levels")
        size: int = key("rows of each level", default=5, ge=1)

    def __init__(self, config: Levels.Config, renderer: Any, order: Order) -> None:
        super().__init__(renderer, order)
        self._size = config.size
        self.level = 0

    def __len__(self) -> int:
        return self._size

    @property
    def fingerprint(self) -> str:
        return f"{self._size} rows a level"

    def row(self, number: int) -> Row:
        return Row(f"{self.level}.{number}", f"level {self.level}, {number}:", answer=self.level)

    def feedback(self, group: Group) -> None:
        rewards = [s.reward.value for s in group.usable if s.reward is not None]
        solved = bool(rewards) and sum(rewards) / len(rewards) >= 0.5
        self.level += solved and group.prompt.id.startswith(f"{self.level}.")

    def state(self) -> dict[str, Any]:
        return {**super().state(), "level": self.level}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.level = state["level"]


def files(tmp_path: Path, **sizes: int) -> dict[str, Path]:
    return {
        name: write_lines(tmp_path / f"{name}.jsonl", *({"prompt": f"{name} {i}", "answer": i} for i in range(size)))
        for name, size in sizes.items()
    }


def mixture(tmp_path: Path, weights: Mapping[str, float], order: Order | None = None, **sizes: int) -> Any:
    paths = files(tmp_path, **sizes) if sizes else {name: tmp_path / f"{name}.jsonl" for name in weights}
    parts = {name: {"weight": weight, "source": str(paths[name])} for name, weight in weights.items()}
    return source(json.dumps({"name": "mixture", "sources": parts}), order)


def names(found: list[Prompt]) -> list[str]:
    return [prompt.id.partition("/")[0] for prompt in found]


# ---------------------------------------------------------------------- mixtures


@given(weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0, 7.3, 1e9]), min_size=1, max_size=5))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_source_has_its_share_to_within_one_prompt(tmp_path: Path, weights: list[float]) -> None:
    named = {f"s{i}": Fraction(str(weight)) for i, weight in enumerate(weights)}
    total = sum(named.values())
    one = mixture(tmp_path, dict(zip(named, weights, strict=True)), Order(epochs=None), **dict.fromkeys(named, 3))
    given = Counter[str]()
    for draw in range(1, 121):
        given.update(names(take(one, 1)))
        for name, weight in named.items():
            assert abs(given[name] - draw * weight / total) < 1


def test_ids_are_unique_and_the_source_is_in_the_metadata(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = write_lines(tmp_path / "a" / "t.jsonl", {"prompt": "x", "data_source": "mine"}, {"prompt": "y"})
    two = write_lines(tmp_path / "b" / "t.jsonl", {"prompt": "z"})
    found = prompts(source(f"{{name: mixture, sources: {{one: {{source: {one}}}, two: {{source: {two}}}}}}}"))
    assert [(p.id, p.index, p.metadata) for p in found] == [
        ("one/t.jsonl:1", 0, {"data_source": "mine"}),
        ("two/t.jsonl:1", 1, {"data_source": "two"}),
        ("one/t.jsonl:2", 2, {"data_source": "one"}),
    ]


def test_a_source_that_ends_leaves_the_others_in_proportion(tmp_path: Path) -> None:
    found = prompts(mixture(tmp_path, {"a": 2, "b": 1, "c": 1}, Order(1, True, 2), a=2, b=40, c=20))
    assert Counter(p.id for p in found) == Counter({p.id: 2 for p in found})  # each row twice
    assert Counter(names(found)) == {"a": 4, "b": 80, "c": 40}
    assert Counter(names(found[8:84])) == {"b": 38, "c": 38}
    assert set(names(found[84:])) == {"b"}
    assert [p.index for p in found] == list(range(124))


def test_equal_files_are_not_read_in_equal_order(tmp_path: Path) -> None:
    found = prompts(mixture(tmp_path, {"a": 1, "b": 1}, Order(0, True, 1), a=30, b=30))
    order = {name: [p.answer for p in found if p.id.startswith(name)] for name in "ab"}
    assert order["a"] != order["b"]
    assert sorted(order["a"]) == sorted(order["b"])


@pytest.mark.parametrize("taken", [0, 1, 5, 9, 10, 17, 30])
def test_a_restored_mixture_goes_on_with_the_next_prompt(tmp_path: Path, taken: int) -> None:
    weights, order = {"a": 3, "b": 1, "c": 0.7}, Order(4, True, 2)
    whole = mixture(tmp_path, weights, order, a=3, b=5, c=4)
    take(whole, taken)
    restored = after_restart(whole, mixture(tmp_path, weights, order))
    assert restored.state() == whole.state()
    assert take(restored, 40) == take(whole, 40)


def test_other_sources_are_refused_on_restore(tmp_path: Path) -> None:
    one = mixture(tmp_path, {"a": 1, "b": 1}, a=3, b=3)
    with pytest.raises(DataError, match="the sources have changed since the checkpoint"):
        after_restart(one, mixture(tmp_path, {"a": 1, "c": 1}, a=3, c=3))
    with pytest.raises(DataError, match="the data have changed since the checkpoint"):
        after_restart(one, mixture(tmp_path, {"a": 1, "b": 1}, a=3, b=4))


def test_feedback_goes_to_the_source_that_the_group_came_from() -> None:
    level = "{source: {name: 'tests.test_mixtures:Levels'}}"
    one = source(f"{{name: mixture, sources: {{x: {level}, y: {level}}}}}", Order(epochs=None))
    heard: dict[str, list[str]] = {"x": [], "y": []}
    for name, inner in one._sources.items():
        inner.feedback = lambda group, name=name: heard[name].append(group.prompt.id)
    for prompt in take(one, 4):
        one.feedback(group(prompt, 1.0))
    assert heard == {"x": ["0.0", "0.1"], "y": ["0.0", "0.1"]}


def test_mixtures_hold_mixtures_and_count_what_is_kept_out(tmp_path: Path) -> None:
    paths = files(tmp_path, a=12, b=12)
    inner = f"{{source: {{name: mixture, sources: {{a: {{source: {paths['a']}}}}}}}}}"
    one = source(f"{{name: mixture, sources: {{in: {inner}, b: {{source: {paths['b']}}}}}}}", max_tokens=10)
    assert not prompts(source(str(paths["a"]), max_tokens=len("user: a 0\n")))[10:]
    with pytest.raises(DataError, match="all 12 prompts"):
        prompts(source(str(paths["a"]), max_tokens=5))
    found = prompts(one)
    assert {p.id for p in found} == {f"{name}.jsonl:{i}" for name in ("in/a/a", "b/b") for i in range(1, 11)}
    assert one.skipped == {TOO_LONG: 4}


def test_a_missing_file_in_a_mixture_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.jsonl: the data file cannot be read: No such file"):
        source(f"{{name: mixture, sources: {{a: {{source: {tmp_path / 'none.jsonl'}}}}}}}")


# ---------------------------------------------------------------------- curricula


def curriculum(tmp_path: Path, rows: int = 100, order: Order | None = None, **keys: Any) -> Any:
    path = tmp_path / "t.jsonl" if (tmp_path / "t.jsonl").exists() else files(tmp_path, t=rows)["t"]
    return source(json.dumps({"name": "curriculum", "source": str(path), **keys}), order or Order(3, True, None))


def answered(prompt: Prompt, noise: random.Random) -> Group:
    """A policy that solves easy rows always, hard ones never, and those between as their number says."""
    chance = min(1.0, max(0.0, (prompt.answer - 40) / 20))
    return group(prompt, *(float(noise.random() < chance) for _ in range(8)))


def test_the_curriculum_revisits_what_is_sometimes_solved(tmp_path: Path) -> None:
    noise, one, found = random.Random(0), curriculum(tmp_path), []
    for _ in range(150):
        step = take(one, 8)
        assert len({p.id for p in step}) >= 7  # twice in flight only where a revisited prompt is the next fresh one too
        found += step
        for prompt in step:
            one.feedback(answered(prompt, noise))
    assert [p.index for p in found] == list(range(1200))
    middle = sum(40 < p.answer < 60 for p in found) / 1200
    assert 0.5 < middle < 0.75  # of fresh prompts 0.19
    assert {p.answer for p in found} == set(range(100))
    often = Counter(p.answer for p in found)
    assert sum(often[n] for n in range(47, 54)) / 7 > 1.2 * sum(often[n] for n in (41, 42, 58, 59)) / 4


def test_only_groups_with_variance_enter_the_pool_and_the_least_learnable_leave_it(tmp_path: Path) -> None:
    one = curriculum(tmp_path, pool=2)
    a, b, c, d, e = take(one, 5)
    for prompt, rewards in ((a, [1, 1]), (b, [0.1, 0.1, 0.1]), (c, [1, 0]), (d, [1, 0, 0]), (e, [0, 0, 0, 1])):
        one.feedback(group(prompt, *rewards))
    assert list(one._pool) == [c.id, d.id]
    one.feedback(group(c, 1, 1))
    one.feedback(group(d, failed=3))
    assert one._pool == {}


@pytest.mark.parametrize("taken", [0, 3, 40])
def test_a_restored_curriculum_goes_on_bit_for_bit(tmp_path: Path, taken: int) -> None:
    def run(one: Any, steps: int, noise: random.Random) -> list[Prompt]:
        found: list[Prompt] = []
        for _ in range(steps):
            step = take(one, 4)
            for prompt in step:
                one.feedback(answered(prompt, noise))
            found += step
        return found

    whole = curriculum(tmp_path)
    run(whole, taken, random.Random(1))
    restored = after_restart(whole, curriculum(tmp_path))
    assert restored.state() == whole.state()
    assert run(restored, 30, random.Random(2)) == run(whole, 30, random.Random(2))


def test_the_data_end_with_the_fresh_prompts(tmp_path: Path) -> None:
    one = curriculum(tmp_path, rows=10, order=Order(0, True, 1))
    found = []
    while (prompt := one.next()) is not None:
        found.append(prompt)
        one.feedback(group(prompt, 0, 1))
    assert {p.answer for p in found} == set(range(10))
    assert 12 < len(found) < 40
    assert one.next() is None


def test_held_out_prompts_come_once_and_in_order_whatever_the_source(tmp_path: Path) -> None:
    assert [p.answer for p in prompts(curriculum(tmp_path, rows=6, order=Order()))] == list(range(6))


def test_a_curriculum_of_ones_own_hears_of_every_group(tmp_path: Path) -> None:
    own = "{name: 'tests.test_mixtures:Levels', size: 2}"
    mixed, twice = f"{{name: mixture, sources: {{own: {{source: {own}}}}}}}", f"{{name: curriculum, source: {own}}}"
    for config in (own, mixed, twice):
        one = source(config, Order(epochs=None))
        levels = []
        for reward in (0.0, 1.0, 0.0, 1.0, 1.0, 0.0):
            (prompt,) = take(one, 1)
            levels.append(prompt.answer)
            one.feedback(group(prompt, reward, reward))
            one = after_restart(one, source(config, Order(epochs=None)))
        assert levels == [0, 0, 1, 1, 2, 3]


# ---------------------------------------------------------------------- whole runs


async def by_number(trajectory: treadle.Trajectory) -> float:
    """Some prompts give every answer the same reward, others do not."""
    return float(trajectory.prompt.answer % 2 and len(set(trajectory.response)) > 6)


def adaptive(tmp_path: Path, model: Path, **more: Any) -> dict[str, Any]:
    paths = files(tmp_path, a=12, b=13)
    sources = {name: {"weight": 1.0, "source": str(path)} for name, path in paths.items()}
    train = {"name": "curriculum", "revisit": 0.6, "source": {"name": "mixture", "sources": sources}}
    return runs.settings(
        tmp_path,
        model,
        steps=8,
        data={"train": train, "chat": False},
        reward="tests.test_mixtures:by_number",
        max_filtered_groups=100,
        **more,
    )


@pytest.mark.slow
def test_a_curriculum_run_that_was_killed_goes_on_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    config = adaptive(tmp_path, tiny_model)
    treadle.train({**config, "run": {"dir": str(tmp_path / "whole"), "checkpoint_every": 2}})
    broken = runs.write(tmp_path, {**config, "run": {"dir": str(tmp_path / "broken"), "checkpoint_every": 2}})
    process = runs.command("train", broken)
    while len(read_rows(tmp_path / "broken" / "metrics.jsonl")) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    code, _, err = runs.finish("train", broken)
    assert code == 0, err
    assert runs.metrics(tmp_path / "broken") == runs.metrics(tmp_path / "whole")
    assert runs.samples(tmp_path / "broken") == runs.samples(tmp_path / "whole")
    steps = [rows for name, rows in runs.samples(tmp_path / "whole").items() if name.startswith("step")]
    trained = Counter(row["prompt"] for rows in steps for row in rows)
    assert max(trained.values()) >= 2 * 4  # of more rows than prompts: something was revisited


def test_an_asynchronous_curriculum_run_balances_its_books(tiny_model: Path, tmp_path: Path) -> None:
    config = adaptive(tmp_path, tiny_model, max_staleness=2)
    treadle.train({**config, "steps": 3})
    treadle.train({**config, "steps": 6})
    assert runs.books(tmp_path / "run").get(None, 0) == 0
    assert [row["step"] for row in runs.metrics(tmp_path / "run")] == list(range(1, 7))


def test_custom_sources_need_no_registry() -> None:
    one = make_source(Levels.Config(size=3), renderer(), Order())
    assert [p.id for p in prompts(one)] == ["0.0", "0.1", "0.2"]
