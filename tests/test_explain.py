"""`treadle explain`: every key with its meaning, range, default and readers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from tests.runs import ROOT, finish
from treadle.algorithms.base import AlgorithmConfig
from treadle.config import Config, config_class, key, plugin
from treadle.config.explain import explain, overview
from treadle.config.keys import Inside, find, keys, tree
from treadle.config.plugins import Plugin, available
from treadle.errors import ConfigError
from treadle.recipes.config import RLConfig

PATHS = list(dict.fromkeys(key.path for key in tree(RLConfig)))


class Item(Config):
    size: int = key("how large", default=1, ge=0)


class Nested(Config):
    items: tuple[Item, ...] = key("a list of sections", default=())
    named: dict[str, Item] = key("sections by name", default={})
    pair: tuple[int, float] | None = key("two numbers", default=None)
    algorithms: list[Annotated[AlgorithmConfig, plugin("treadle.algorithms")]] = key("several", default=[])
    other: Item | None = key("perhaps a section", default=None)


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What is said of every key."""
    return {path: explain(RLConfig, path) for path in PATHS}


def readers(text: str) -> set[str]:
    """`a.py:1, 7` as `{"a.py:1", "a.py:7"}`."""
    files = re.findall(r"(treadle/\S+\.py):([\d, ]+)", text)
    return {f"{file}:{line}" for file, lines in files for line in lines.split(", ")}


def test_every_key_is_told_with_meaning_default_and_a_place_that_reads_it(told: dict[str, str]) -> None:
    for path, text in told.items():
        found = find(RLConfig, path)
        assert text.startswith(f"{path}\n")
        assert all(k.field.description and k.field.description.split()[0] in text for k in found), path
        assert "  default  " in text or any(k.section for k in found), path
        assert text.count("read at  treadle/") == text.count("  allowed  ") or any(k.section for k in found), path
        assert readers(text), path


def test_what_is_said_to_read_a_key_does(told: dict[str, str]) -> None:
    for path, text in told.items():
        for place in readers(text):
            file, line = place.split(":")
            read = (ROOT / file).read_text().splitlines()[int(line) - 1]
            assert re.search(rf"\.{path.rpartition('.')[2]}\b", read), f"{path}: {place}"


def test_readers_are_told_from_other_things_of_the_same_name(told: dict[str, str]) -> None:
    assert "recipes/config.py" in told["evaluation.temperature"]
    assert "types.py" not in told["evaluation.temperature"]  # a trajectory has one, too
    assert readers(told["evaluation.temperature"]) != readers(told["sampling.temperature"])
    assert "engines/torch/optimizer.py" in told["critic.trainer.learning_rate"]
    files = ("clip.py", "gspo.py", "cispo.py", "gmpo.py")  # of the halves that read it, not of what is made of them
    assert {place.partition(":")[0] for place in readers(told["algorithm.clip_low"])} == {
        f"treadle/algorithms/{file}" for file in files
    }
    assert "algorithms/clip.py" not in told["algorithm.gamma"]
    assert "algorithms/correction.py" in told["algorithm.correction.weight_high"]
    assert not any("joining.py" in text for text in told.values())
    assert "data/mixture.py" in told["data.train.sources.*.weight"]  # read in a loop
    assert "runs/recorder.py" in told["run.trackers[].metrics"]  # read through a property


def test_a_key_that_several_names_bring() -> None:
    text = explain(RLConfig, "algorithm.group_size")
    assert "a whole number ≥ 1 and ≤ 65536" in text
    assert "default  8 (critic, ppo, reinforce_plus_plus: 1)" in text
    assert "with     name: all but remax\n" in text
    greedy = text.split("beside the greedy one")[1]  # means something else: a block of its own
    assert "name: remax" in greedy
    assert "with     name: critic (and with it ppo), reinforce_plus_plus" in explain(RLConfig, "algorithm.gamma")
    assert re.search(r"k3\+ \(.*grpo: k3;", explain(RLConfig, "algorithm.kl_estimator"))  # what most have comes first
    names = " ".join(explain(RLConfig, "algorithm.name").split())
    assert re.search(r"allowed grpo, .*ppo.*, two halves joined by \+, or your own my\.module:Class", names)
    assert "default  1e-05" in explain(RLConfig, "critic.trainer.learning_rate")
    assert "default  1e-06" in explain(RLConfig, "trainer.learning_rate")


def test_a_section_shows_who_may_be_chosen_and_its_keys() -> None:
    text = explain(RLConfig, "algorithm", 80)
    assert re.search(r"^  name: grpo +whole +GRPO: group relative", text, re.MULTILINE)
    wide = explain(RLConfig, "algorithm", 120)
    assert re.search(r"^  name: rloo +estimator  RLOO: REINFORCE with a leave-one-out baseline$", wide, re.MULTILINE)
    assert re.search(r"^  gamma +1\.0 +critic, reinforce_plus_plus: discount", text, re.MULTILINE)
    assert re.search(
        r"^  share .*clip_cov: tokens drawn.*; kl_cov: ", explain(RLConfig, "algorithm", 200), re.MULTILINE
    )
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^  temperature +1\.0 +divides the logits$", explain(RLConfig, "sampling"), re.MULTILINE)


@pytest.mark.parametrize("width", [80, 120, None])
def test_the_tree_of_all_keys_has_one_line_each(width: int | None) -> None:
    *lines, _, footer = overview(RLConfig, width).splitlines()
    assert "explain KEY" in footer
    names = [line.split()[0] for line in lines]
    assert {path.partition(".")[0] for path in PATHS} <= set(names)
    assert names.count("top_k") == 1
    assert "keys as in data.train" in overview(RLConfig)
    assert sum(line.startswith("  train ") for line in lines) == 1
    if width is not None:
        assert max(map(len, lines)) <= width
        assert len({line.rfind("  ", 0, 60) for line in lines if " required " in line}) == 1  # aligned


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("algorithm.clip", "algorithm.clip_low"),
        ("sampling.temprature", "sampling.temperature"),
        ("group_size", "algorithm.group_size"),
        ("trainer.learning_rat", "trainer.learning_rate"),
        ("data.train.pth", "data.train.path"),
        ("run.dir.x", "run.dir"),
    ],
)
def test_an_unknown_key_names_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(asked)}: there is no such key; did you mean {nearest}\?"):
        explain(RLConfig, asked)


@pytest.mark.parametrize("asked", ["", ".", "xyzzy", "ключ", "a" * 5000, "[0]", "\x1b[31m", "algorithm..", "🙂.🙂"])
def test_nonsense_is_no_key(asked: str) -> None:
    with pytest.raises(ConfigError, match="there is no such key"):
        explain(RLConfig, asked)


def test_items_of_lists_mappings_and_unions() -> None:
    paths = [key.path for key in tree(Nested)]
    assert {"items[].size", "named.*.size", "algorithms[].clip_low", "other.size"} <= set(paths)
    for asked in ("items[].size", "items[3].size", "items.size", "named.mine.size", "other.size"):
        assert "a whole number ≥ 0" in explain(Nested, asked)
    assert "0.2" in explain(Nested, "algorithms[0].clip_low")
    assert "a list: a whole number, then a number, 2 of them or null" in explain(Nested, "pair")
    assert "weight of each reward function" in explain(RLConfig, "reward.functions.number")
    assert "keys as in items" not in overview(Nested)


@pytest.mark.parametrize("name", available("treadle.algorithms", r"^    Config = "))
def test_the_keys_of_halves_are_those_of_what_is_joined_of_them(name: str) -> None:
    """They are found without joining anything, which would take too long."""
    told = {key.name: key for key in keys(Inside("", Plugin("treadle.algorithms").choices()[name].models, name))}
    joined = config_class(name, "treadle.algorithms")
    assert set(told) == set(joined.model_fields)
    for each, field in joined.model_fields.items():
        if each != "name":
            assert told[each].field.get_default(call_default_factory=True) == field.get_default(
                call_default_factory=True
            ), each
        assert (told[each].field.annotation, told[each].field.metadata) == (field.annotation, field.metadata)


def test_the_longest_answer_about_a_key_fits_a_screen(told: dict[str, str]) -> None:
    for path, text in told.items():
        if not any(key.section for key in find(RLConfig, path)):
            assert len(text.splitlines()) <= 30, path
            assert max(map(len, text.splitlines())) <= 120, path


def test_what_may_hold_itself_is_told_once() -> None:
    class Tree(Config):
        left: Tree | None = key("the same again", default=None)
        leaf: int = key("its value", default=0)

    Tree.model_rebuild(_types_namespace={"Tree": Tree})
    assert [key.path for key in tree(Tree)] == ["left", "leaf"]
    assert "its value" in explain(Tree, "left.left.leaf")


def test_a_section_that_is_left_out_is_as_its_keys_say() -> None:
    """So one default can be shown for a key, whether its section is there or not."""

    def sections(config: type[Config]) -> Iterator[tuple[str, Any, Any]]:
        for each in tree(config):
            models = [inside.models[0] for inside in each.inside() if inside.place == "" and inside.plugin is None]
            if models and not each.required and each.default is not None:
                yield each.path, each.field.get_default(call_default_factory=True), models[0]()

    found = list(sections(RLConfig))
    assert "critic.trainer" in [path for path, *_ in found]
    for path, left_out, empty in found:
        assert left_out == empty, path


def test_on_the_command_line() -> None:
    code, out, err = finish("explain", "sampling.temperature")
    assert (code, err) == (0, "")
    assert "divides the logits" in out
    code, out, err = finish("explain", "algorithm.gruop_size")
    assert (code, out) == (2, "")
    assert "did you mean algorithm.group_size?" in err
