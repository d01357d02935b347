"""Configuration: strict loading, overrides, messages, plug-ins, round trips."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import model_validator

from treadle.algorithms.base import AlgorithmConfig
from treadle.config import Config, dump, key, leaves, load, plugin, plugin_class
from treadle.config.yaml_text import from_text, to_text
from treadle.errors import ConfigError
from treadle.recipes.config import RLConfig


class Optimizer(Config):
    lr: float = key("step size", default=1e-5, gt=0)
    betas: tuple[float, float] = key("decay of the moments", default=(0.9, 0.95))
    clip: float | None = key("largest gradient norm", default=1.0, gt=0)
    kind: Literal["adam", "sgd"] = key("which rule", default="adam")
    folder: Path | None = key("where it is kept", default=None)

    @model_validator(mode="after")
    def _rules(self) -> Optimizer:
        if self.kind == "sgd" and self.clip is None:
            raise ValueError("kind=sgd needs clip: set a number")
        return self


class Root(Config):
    seed: int = key("of everything", default=0, ge=0)
    verbose: bool = key("say more", default=False)
    title: str = key("for people", default="run")
    optimizer: Optimizer = key("how weights move", default=Optimizer)
    algorithm: Annotated[AlgorithmConfig, plugin("treadle.algorithms", default="grpo")] = key(
        "what is learnt", default={"name": "grpo"}
    )
    other: Annotated[AlgorithmConfig, plugin("treadle.algorithms")] | None = key("a second one", default=None)
    weights: dict[str, float] = key("by name", default={"a": 1.0})
    stops: tuple[str, ...] = key("texts that stop", default=())


def mistake(*overrides: str, path: Path | None = None, base: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load(Root, path, overrides, base)
    return str(error.value)


# ---------------------------------------------------------------------- values


def test_defaults_file_and_overrides_in_that_order(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("seed: 3\noptimizer: {lr: 1e-4, betas: [0.8, 1]}\nalgorithm: {name: ppo, gamma: 0.9}\n")
    config = load(Root, path, ["optimizer.lr=1e-3", "other={name: grpo, group_size: 4}"], {"seed": 1, "title": "x"})
    assert (config.seed, config.title, config.optimizer.lr, config.optimizer.betas) == (3, "x", 1e-3, (0.8, 1.0))
    assert type(config.algorithm).__name__ == "PPOConfig"
    assert config.algorithm.name == "ppo"
    assert config.other is not None
    assert config.other.group_size == 4


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert load(Root, tmp_path / "c.yaml") == load(Root, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-1.5E+3", -1500.0),
        (".5", 0.5),
        ("010", 10),
        ("0x1f", 31),
        ("no", "no"),
        ("on", "on"),
        ("12:30:45", "12:30:45"),
        ("2020-01-01", "2020-01-01"),
        ("1_000", "1_000"),
        ("my.module:fn", "my.module:fn"),
        ("", None),
        ("~", None),
        ("True", True),
        (".inf", math.inf),
        ("{a: &x [1], b: *x, <<: {c: 2}}", {"a": [1], "b": [1], "c": 2}),
    ],
)
def test_plain_scalars_mean_what_people_expect(text: str, value: Any) -> None:
    assert from_text(text, "here") == value
    assert type(from_text(text, "here")) is type(value)


def test_null_lists_and_mappings_as_override_values() -> None:
    config = load(Root, None, ["optimizer.clip=null", "stops=[a, '1e-5']", "weights={my.module:fn: 2}"])
    assert config.optimizer.clip is None
    assert config.stops == ("a", "1e-5")
    assert config.weights == {"my.module:fn": 2.0}


def test_an_override_of_an_aliased_section_leaves_the_other_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("algorithm: &a {name: grpo, group_size: 4}\nother: *a\n")
    config = load(Root, path, ["other.group_size=6"])
    assert config.other is not None
    assert (config.algorithm.group_size, config.other.group_size) == (4, 6)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.beta=1", ["optimizer.beta", "no such key", "did you mean optimizer.betas?"]),
        ("zzz=1", ["zzz: there is no such key", "seed, verbose, title"]),
        ("algorithm.gruop_size=2", ["did you mean algorithm.group_size?"]),
        ("other={name: ppo, gama: 1}", ["other.gama", "did you mean other.gamma?"]),
        ("seed=-1", ["seed: -1", "a whole number ≥ 0"]),
        ("seed=true", ["seed: true", "a whole number"]),
        ('seed="8"', ['seed: "8"', "a whole number"]),
        ("seed=1.0", ["seed: 1.0", "a whole number"]),
        ("verbose=1", ["verbose: 1", "true or false"]),
        ("title=3", ["title: 3", "text"]),
        ("optimizer.kind=adamw", ["optimizer.kind", '"adamw"', "one of adam, sgd"]),
        ("optimizer.lr=0", ["optimizer.lr: 0", "a number > 0"]),
        ("optimizer.lr=.nan", ["optimizer.lr", "a number > 0"]),
        ("optimizer.lr=.inf", ["optimizer.lr", "a number > 0"]),
        ("optimizer.clip=-1", ["optimizer.clip: -1", "a number > 0 or null"]),
        ("optimizer.betas=[1]", ["optimizer.betas", "a list: each a number, 2 of them"]),
        ("optimizer.betas=[1, x]", ["optimizer.betas[1]", '"x"']),
        ("optimizer=5", ["optimizer: 5", "a section with the keys lr, betas"]),
        ("optimizer={kind: sgd, clip: null}", ["optimizer: kind=sgd needs clip"]),
        ("weights={a: x}", ["weights.a", "a mapping of names to a number"]),
        ("stops.0=x", ["stops: ", "a list: each text"]),
        ("algorithm=grpo", ['algorithm: "grpo"', "a section with the keys name"]),
        ("algorithm.name=grop", ["algorithm.name", "did you mean grpo?", "ppo", "my.module:Name"]),
        ("algorithm.name=base", ["algorithm.name", "there is no 'base'"]),
        ("algorithm.name=../x", ["algorithm.name", "there is no '../x'"]),
        ("algorithm.name=my.module.Mine", ["did you mean my.module:Mine (a colon)?"]),
        ("algorithm.name=os:system", ["os:system has no `Config`"]),
        ("algorithm.name=os.path:joyn", ["os.path has no 'joyn'", "did you mean 'join'?"]),
        ("algorithm.name=nowhere.at:All", ["no module named 'nowhere'"]),
        ("algorithm.name=a b:c", ["not of the form"]),
        ("algorithm.name=7", ["algorithm.name", "missing or not text"]),
        ("other={group_size: 2}", ["other.name", "missing", "cispo, clip", "my.module:Name"]),
        ("algorithm.group_size=1", ["group_size is 1"]),
        ("seed", ["not an override", "key=value"]),
        ("=1", ["not an override"]),
        ("a..b=1", ["not an override"]),
        ("seed=[1", ["override seed:1"]),
        ("seed=!!python/object:os.system 1", ["override seed:1", "python/object"]),
    ],
)
def test_a_mistake_names_the_key_and_what_is_allowed(override: str, words: list[str]) -> None:
    message = mistake(override)
    for word in words:
        assert word in message
    assert "pydantic" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gspo+", ["'gspo+': there is a name missing beside a +", "e.g. gspo+rloo"]),
        ("+", ["there is a name missing beside a +"]),
        ("gspo++rloo", ["there is a name missing beside a +"]),
        ("gspo+nothing", ["there is no 'nothing' in treadle.algorithms"]),
        ("rloo+grpo", ["RLOO and GRPO both say what the advantages are; name one of them"]),
        ("gspo+cispo", ["GSPO and CISPO both say what an advantage does to the policy"]),
        ("gspo+rloo+opo", ["RLOO and OPO both say what the advantages are"]),
        (
            "gmpo+critic",
            ["gmpo has one term for a whole answer", "gmpo+critic gives each token an advantage of its own"],
        ),
        ("smoke.py:Thing+rloo", ["no module named 'smoke'", "a module is named without .py"]),
        ("rloo+rloo", ["RLOO and RLOO both say what the advantages are"]),
        ("os:system+rloo", ["os:system cannot be joined by +", "treadle.algorithms"]),
        ("rloo+os:environ", ["os:environ cannot be joined by +"]),
        ("treadle.config:Config+rloo", ["treadle.config:Config cannot be joined by +"]),
        ("treadle.algorithms.base:Algorithm+rloo", ["Algorithm is no half of an algorithm"]),
        ("treadle.algorithms.policy_gradient:Estimator+gspo", ["Estimator defines neither advantages nor surrogate"]),
    ],
)
def test_halves_that_do_not_go_together_are_one_readable_line(name: str, words: list[str]) -> None:
    message = mistake(f"algorithm={{name: '{name}'}}")
    assert message.startswith("algorithm")
    assert "\n" not in message
    for word in words:
        assert word in message
    assert len(message) < 450


def test_other_sections_have_no_halves() -> None:
    with pytest.raises(ConfigError, match=r"jsonl cannot be joined by \+: it is no half of what treadle.data holds"):
        plugin_class("jsonl+csv", "treadle.data")


def test_several_mistakes_are_listed_together() -> None:
    message = mistake("seed=-1", "optimizer.lr=x", "algorithm.gruop_size=2", "nonsense=1")
    assert message.startswith("4 mistakes")
    for name in ("seed", "optimizer.lr", "algorithm.gruop_size", "nonsense"):
        assert f"\n- {name}" in message


def test_a_number_that_python_does_not_spell() -> None:
    assert mistake(base={"seed": -(10**5000)}).startswith("seed: -0x")


def test_an_override_through_what_is_no_section() -> None:
    assert "seed is 1, not a section" in mistake("seed=1", "seed.x=2")
    assert "give the whole list, stops=[…]" in mistake("stops=[a]", "stops.0=b")
    given_object = {"algorithm": AlgorithmConfig()}
    assert "given from Python" in mistake("algorithm.group_size=3", base=given_object)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (b"seed: 1\ntitle: a\nseed: 2\n", 3, "'seed' stands twice, first in line 1"),
        (b"optimizer:\n  lr: 1\n  lr: 2\n", 3, "'lr' stands twice"),
        (b"- 1\n", 1, "a config is a mapping"),
        (b"just words\n", 1, "a config is a mapping"),
        (b"seed: 1\n\ttitle: x\n", 2, ""),
        (b"seed: 1\ntitle: [a\n", 3, "expected"),
        (b"seed: 1\ntitle: caf\xe9\n", 2, "not UTF-8"),
        (b"seed: 1\ntitle: \x07\n", 2, "not allowed"),
        (b"seed: 1\n1: x\n", 2, "a key must be text"),
        (b"seed: 1\n? [a]\n: x\n", 2, "a key must be text"),
        (b"seed: !!int abc\n", 1, "not a whole number"),
        (b"seed: " + b"9" * 5000 + b"\n", 1, "not a whole number"),
        (b"seed: !!timestamp 2020\n", 1, "timestamp"),
        (b"seed: 1\n---\nseed: 2\n", 2, "single document"),
        (b"seed: &a [*a]\n", 1, "recursive"),
        (b"seed: *nobody\n", 1, "nobody"),
        (b"<<: {1: 2}\n", 1, "a key must be text"),
    ],
)
def test_a_broken_file_names_its_line(tmp_path: Path, text: bytes, line: int, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    message = mistake(path=path)
    assert message.startswith(f"{path}:{line}: ")
    assert words in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in mistake(path=tmp_path / "none.yaml")
    assert "directory" in mistake(path=tmp_path)
    assert "null" in mistake(path=Path("a\0b"))
    (tmp_path / "deep.yaml").write_text("seed: " + "[" * 5000)
    assert "nested too deeply" in mistake(path=tmp_path / "deep.yaml")


def test_aliases_that_multiply_are_harmless(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 40)]
    (tmp_path / "c.yaml").write_text("\n".join([*lines, "seed: *a39"]))
    assert "seed" in mistake(path=tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("base", "start"),
    [
        ({"title": "a\0b"}, r"title: 'a\x00b'"),
        ({"title": "\ud800"}, "title: "),
        ({"stops": ["a", "\0"]}, r"stops: '\x00'"),
        ({"weights": {"\0": 1.0}}, r"weights: '\x00'"),
        ({"optimizer": {"folder": "a\0b"}}, r"optimizer.folder: 'a\x00b'"),
        ({"optimizer": {"folder": Path("a\udcff")}}, r"optimizer.folder: 'a\udcff'"),
        ({"\ud800": 1}, r'the config: "\ud800": '),
        ({"algorithm": {"name": "a\0:b"}}, "algorithm.name: "),
    ],
)
def test_text_that_no_file_takes(base: dict[str, Any], start: str) -> None:
    message = mistake(base=base)
    assert message.startswith(start)
    assert message.encode()  # it can be printed and written itself


RUN = ["model=m", "steps=10", "run.dir=r", "reward.functions={number: 1}", "data.train={name: jsonl, path: p}"]
RUN += ["algorithm={name: ppo, kl_coefficient: 0.1, kl_target: 1}", "threads=1"]
NUMBERS = [name for name, value, _ in leaves(load(RLConfig, None, RUN)) if type(value) in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beyond_reason_are_refused_with_their_range(name: str) -> None:
    for value in (10**10, 10**400):
        with pytest.raises(ConfigError, match=rf"^{name}: 10000.* give a (whole )?number [^(]*[≤<] "):
            load(RLConfig, None, [*RUN, f"{name}={value}"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sampling.temperature=0.001"], "sampling.temperature: 0.001 is not allowed; give a number ≥ 0.01 and ≤ 100"),
        (["sampling.stop=['']"], "sampling.stop[0]"),
        (
            ["algorithm={name: ppo, critic_warmup_steps: 10}"],
            "algorithm.critic_warmup_steps=10 leaves none of steps=10 to train the policy; 0 to 9 are possible",
        ),
    ],
)
def test_a_run_that_could_not_work(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(RLConfig, None, [*RUN, *overrides])
    assert words in str(error.value)


# ---------------------------------------------------------------------- plug-ins of the user


def test_a_class_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_own.py").write_text(
        "from treadle.algorithms.base import Algorithm, AlgorithmConfig\n"
        "from treadle.config import key\n"
        "class Mine(Algorithm):\n"
        "    class Config(AlgorithmConfig):\n"
        "        sharpness: float = key('how sharp', default=1.0, ge=0)\n"
        "class Plain(Algorithm):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load(Root, None, ["algorithm.name=users_own:Mine", "algorithm.sharpness=2"])
    assert {k: v for k, v, _ in leaves(config)}["algorithm.sharpness"] == 2.0
    assert load(Root, None, [], from_text(dump(config), "dump")) == config
    assert plugin_class(config.algorithm.name, "treadle.algorithms").__name__ == "Mine"
    assert load(Root, None, ["algorithm.name=users_own:Plain"]).algorithm.group_size == 8
    message = mistake("algorithm.name=users_own:Mine", "algorithm.sharpness=-1", "seed=x")
    assert "algorithm.sharpness: -1 is not allowed; give a number ≥ 0 (how sharp)" in message
    assert "seed" in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("def f(:\n", "SyntaxError"),
        ("import not_installed_anywhere\n", "No module named 'not_installed_anywhere'"),
    ],
)
def test_a_users_module_that_fails_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    (tmp_path / "users_broken.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    message = mistake("algorithm.name=users_broken:Mine")
    assert "users_broken cannot be imported" in message
    assert words in message
    assert f"users_broken.py:{source.count(chr(10))}" in message


@pytest.mark.parametrize(
    "line",
    [
        "x: NotDefined = key('…', default=1)",
        "x: int = key('…', default=1, pattern='[')",
    ],
)
def test_a_users_config_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Models are built when they are first used; what is wrong with one is told then."""
    (tmp_path / "users_faulty.py").write_text(
        "from __future__ import annotations\nfrom pathlib import Path\n"
        "from treadle.algorithms.base import Algorithm, AlgorithmConfig\nfrom treadle.config import key\n"
        f"class MineConfig(AlgorithmConfig):\n    {line}\n"
        "class Mine(Algorithm):\n    Config = MineConfig\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_faulty", raising=False)
    message = mistake("algorithm.name=users_faulty:Mine")
    assert message.startswith("algorithm.name: ")
    assert "users_faulty" in message
    assert "\n" not in message


def test_an_instance_from_python_is_taken_as_it_is() -> None:
    mine = AlgorithmConfig(group_size=3)
    assert load(Root, None, [], {"algorithm": mine}).algorithm is mine


def test_the_class_behind_a_bare_name() -> None:
    assert plugin_class("grpo", "treadle.algorithms").__name__ == "GRPO"


# ---------------------------------------------------------------------- round trips and fuzz


def test_leaves_are_all_keys_with_their_meaning() -> None:
    found = list(leaves(load(Root, None, ["weights={a: 1, b: 2}"])))
    assert ("optimizer.betas", (0.9, 0.95), "decay of the moments") in found
    assert ("weights", {"a": 1.0, "b": 2.0}, "by name") in found
    assert ("other", None, "a second one") in found
    assert all(meaning for _, _, meaning in found)


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8) | st.sampled_from(
    ["1e-5", "no", "null", "~", "true", "0x1f", "1:30", "<<", "=", "- a", "a: b", "#x", "", " ", "2020-01-01", "é\n"]
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(PLAIN)
def test_yaml_reads_back_what_it_writes(data: Any) -> None:
    assert from_text(to_text(data), "here") == data


@settings(deadline=None)
@given(
    seed=st.integers(min_value=0),
    lr=st.floats(min_value=1e-30, max_value=1e30),
    title=TEXTS,
    stops=st.lists(TEXTS, max_size=3),
    folder=st.none() | st.sampled_from([Path("a/b"), Path("1e5")]),
    name=st.sampled_from(["grpo", "ppo"]),
)
def test_a_dump_loads_equal(**v: Any) -> None:
    base = {
        "seed": v["seed"],
        "title": v["title"],
        "stops": v["stops"],
        "algorithm": {"name": v["name"]},
        "optimizer": {"lr": v["lr"], "folder": v["folder"]},
    }
    config = load(Root, None, [], base)
    again = load(Root, None, [], from_text(dump(config), "dump"))
    assert again == config
    assert dump(again) == dump(config)


KEYS = st.sampled_from(
    ["seed", "optimizer", "optimizer.lr", "algorithm", "algorithm.name", "other", "other.name", "weights", "stops", "x"]
) | st.text(max_size=6)
VALUES = st.text(max_size=12) | PLAIN.map(to_text) | st.sampled_from(["os:system", "grpo", "[1, {a: b}]", "1e999"])


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(KEYS, VALUES).map("=".join), max_size=4))
def test_overrides_give_a_config_or_a_config_error(overrides: list[str]) -> None:
    with contextlib.suppress(ConfigError):  # anything else would pass through
        assert isinstance(load(Root, None, overrides), Root)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60)
    | st.text(alphabet="aseed: -[]{}&*!|>'\"\n#,?<%@`1.e", max_size=60).map(str.encode)
    | st.dictionaries(KEYS, PLAIN, max_size=4).map(lambda d: to_text(d).encode())
)
def test_files_give_a_config_or_a_config_error(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    with contextlib.suppress(ConfigError):
        assert isinstance(load(Root, path), Root)


def test_configuration_does_not_import_heavy_libraries() -> None:
    code = (
        "import sys, treadle.config, treadle.data.config, treadle.rewards.scorer, treadle.algorithms.base\n"
        "from treadle.config import config_class\n"
        "[config_class(n, 'treadle.algorithms') for n in ('grpo', 'ppo')]\n"
        "[config_class(n, 'treadle.data') for n in ('jsonl', 'reasoning_gym')]\n"
        "print({'torch', 'transformers', 'pyarrow', 'matplotlib', 'reasoning_gym'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
