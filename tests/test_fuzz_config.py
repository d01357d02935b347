"""Configurations that nobody would write: a typed configuration or a ConfigError that names the place, soon."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.hostile import EXTENT, outcome, tries
from tests.runs import ROOT
from treadle.config import dump
from treadle.config.explain import explain
from treadle.config.keys import tree
from treadle.config.schema import schema
from treadle.config.yaml_text import from_file, from_text, to_text
from treadle.errors import ConfigError
from treadle.recipes.config import RLConfig, load_config

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
SHIPPED = [from_file(path) for path in EXAMPLES]
KEYS = sorted({part for key in tree(RLConfig) for part in re.split(r"[.\[\]*]+", key.path) if part})

SNIPPETS = (
    *(
        "{",
        "}",
        "[",
        "]",
        ":",
        ": ",
        "- ",
        "? ",
        ",",
        "#",
        "%YAML 1.3\n",
        "%TAG ! x\n",
        "---\n",
        "...\n",
        "|\n",
        ">2\n",
    ),
    *("&a ", "*a", "<<: ", "<<: *a\n", "&a [*a, *a]", "&a {<<: *a}", "'", '"', "\\", '"\\ud800"', '"\\x00"', "`", "@"),
    *(
        "!!python/object/apply:os.system [ls]",
        "!!int ",
        "!!float ",
        "!!bool ",
        "!!null ",
        "!!str ",
        "!!binary ",
        "!!set ",
    ),
    *(
        "!!map ",
        "!!seq ",
        "!!omap ",
        "!!timestamp ",
        "!x ",
        "\t",
        "\0",
        "\r\n",
        "\n",
        "\n  ",
        "\ufeff",
        "\u2028",
        "\x85",
    ),
    *(
        "1_000",
        "0o17",
        "0x_",
        "0b1",
        "1e999",
        "-.inf",
        ".nan",
        "2020-01-01",
        "no",
        "12:30",
        "~",
        "9" * 5000,
        "0x" + "f" * 9999,
    ),
    *("[" * 3000, "{a: " * 300, "- " * 3000, "a: &b [*b]\n", "é", "𝒳", "\u202e", *KEYS),
)
yaml_text = (
    st.text(max_size=60)
    | st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=5), max_size=25).map("".join)
    | st.tuples(
        st.sampled_from(EXAMPLES).map(lambda path: path.read_text()), st.integers(0, 700), st.sampled_from(SNIPPETS)
    ).map(lambda t: t[0][: t[1]] + t[2] + t[0][t[1] :])
)
"""Text, pieces of YAML, and shipped configurations with a piece put in."""

names = st.sampled_from(
    [
        *(
            "ppo",
            "grpo",
            "jsonl",
            "mixture",
            "curriculum",
            "hf",
            "csv",
            "number",
            "nmber",
            "",
            ":",
            "os:",
            ":system",
            "a:b:c",
        ),
        *(
            "os:system",
            "json:loads",
            "no.such.module:Class",
            "no.such",
            "os.path:join.x",
            "os",
            "..",
            "treadle.errors:ConfigError",
        ),
        *(
            "gspo+rloo",
            "rloo+gspo",
            "gspo+",
            "+",
            "rloo+grpo",
            "gmpo+critic",
            "cispo+os:environ",
            "jsonl+csv",
        ),
        *(
            "treadle.config:Config",
            "os:environ.copy",
            "Ünï:Köde",
            "a b:c",
            "json:loads\n",
            "treadle.data.csv:Csv",
            "x" * 300,
        ),
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 1 << 63, 1 << 31, 10**6])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["\0", "\ud800", "a\nb", "no", "1e-5", "x.jsonl", ".csv", "/", "~", "*", "[", "é" * 300, "models/tiny"]
    )
    | names
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS, "name", "path"]) | st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
SOURCES: list[Any] = [
    {
        "name": "mixture",
        "sources": {"a": {"weight": 2, "source": "x.csv"}, "b": {"source": {"name": "hf", "path": "p"}}},
    },
    {"name": "curriculum", "source": "x.parquet", "revisit": 0.25, "pool": 8},
    "x.jsonl",
]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A shipped configuration of which some keys were deleted, renamed, added, or given other values."""
    config = copy.deepcopy(draw(st.sampled_from(SHIPPED)))
    if draw(st.booleans()):
        config["data"]["train"] = copy.deepcopy(draw(st.sampled_from(SOURCES)))
    for _ in range(draw(st.integers(1, 4))):
        section = draw(st.sampled_from(list(_sections(config))))
        name = draw(st.sampled_from(list(section)) if section else st.just("x"))
        match draw(st.sampled_from(["delete", "rename", "set", "set", "name", "add"])):
            case "delete":
                section.pop(name, None)
            case "rename":
                section[draw(st.sampled_from(KEYS) | st.text(max_size=6))] = section.pop(name, None)
            case "set":
                section[name] = draw(values)
            case "name":
                section["name"] = draw(names)
            case _:
                section[draw(st.sampled_from(KEYS))] = draw(values)
    return config


def _sections(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _sections(inner)


def survives(config: RLConfig) -> None:
    """What is written of it is read back equal."""
    assert load_config(None, base=from_text(dump(config), "dump")) == config


@EXTENT
def test_any_file_is_a_configuration_or_a_named_error(extent: int, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"

    @tries(200 * extent)
    @given(yaml_text.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=60))
    @example(
        b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c, *%c]\n" % (c, c, c - 1, c - 1, c - 1) for c in range(98, 123))
    )
    @example(b"steps: " + b"9" * 100_000)
    @example(b"\xff\xfes\0t\0e\0p\0s\0")
    @example(b"- " * 100_000)
    @example(b"[" * 100_000)
    @example(b"&a [" * 500 + b"*a")
    @example(b"steps: 1\r\nsteps: 2\r\n")
    @example(b"<<: {steps: 1}\n<<: {steps: 2}\n")
    @example(b"? [a, b]\n: 1\n")
    @example(b"? {a: 1}\n: 1\n")
    @example(b"? &a [*a]\n: 1\n")
    @example(b"a: 1\n---\nb: 2\n")
    @example(b"!!python/object/apply:os.system [ls]")
    def check(content: bytes) -> None:
        path.write_bytes(content)
        found = outcome(lambda: load_config(path), ConfigError, str(path), *KEYS, "there is no such key", "the config")
        if isinstance(found, RLConfig):
            survives(found)

    check()


@EXTENT
def test_a_mutated_configuration_loads_or_names_its_mistakes(extent: int, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"

    @tries(200 * extent)
    @given(mutated())
    def check(config: dict[str, Any]) -> None:
        found = outcome(lambda: load_config(None, base=config), ConfigError)
        if isinstance(found, RLConfig):
            survives(found)
        try:
            text = to_text(config)
            path.write_text(text, encoding="utf-8")
        except UnicodeEncodeError:
            return
        from_disk = outcome(lambda: load_config(path), ConfigError)
        assert isinstance(found, str) or from_disk == found

    check()


@EXTENT
def test_an_override_is_taken_or_refused_by_its_key(extent: int) -> None:
    part = st.sampled_from([*KEYS, "name", "", " ", "0", "é", "\0", "<<"]) | st.text(max_size=4)
    dotted = st.sampled_from([key.path for key in tree(RLConfig)]) | st.lists(part, max_size=4).map(".".join)
    value = st.sampled_from(SNIPPETS) | values.map(lambda v: json.dumps(v, default=str)) | st.text(max_size=8)
    override = st.tuples(dotted, st.sampled_from(["=", "=", "=", "==", " = ", ""]), value).map("".join)

    @tries(200 * extent)
    @given(st.sampled_from(EXAMPLES), st.lists(override | st.text(max_size=9), min_size=1, max_size=3))
    def check(path: Path, overrides: list[str]) -> None:
        found = outcome(lambda: load_config(path, overrides), ConfigError)
        if isinstance(found, RLConfig):
            survives(found)

    check()


@EXTENT
def test_explaining_any_key(extent: int) -> None:
    paths = [key.path for key in tree(RLConfig)]
    part = st.sampled_from([*KEYS, "[]", "*", "[0]", "", "[", "]", "\0", "é"]) | st.text(max_size=4)
    asked = st.text(max_size=12) | st.lists(part, max_size=5).map(".".join)

    @tries(30 * extent)
    @given(asked | st.tuples(st.sampled_from(paths), part).map("".join), st.none() | st.integers(1, 200))
    def check(path: str, width: int | None) -> None:
        assert outcome(lambda: explain(RLConfig, path, width), ConfigError, "there is no such key", "\n")

    check()


STRICTER = "|".join(
    [
        "is not allowed; give UTF-8 text",
        "(NaN|Infinity) is not allowed",  # JSON has neither
        r"(\.0|e\+\d+) is not allowed; give a whole number",  # 8.0 is a whole number to JSON Schema
        "has no `Config`|no module named|has no '|cannot be imported|is not of the form",  # a class of one's own
        "the weight of",
        "names of your choice",  # the letters of a source's name
        "is no half of|cannot be joined by|does not say what|both say what",  # of two halves, one of one's own
        "compares the samples|kl_estimator is k1|kl_target adapts|algorithm.minibatches=|critic_warmup_steps=",
        "one term for a whole answer|is more than group_size|weight corrects|reject and normalize|normalize divides",
        "cannot be charged",
    ]
)
"""Reasons for which the loader refuses what the schema takes: rules between keys, and what JSON Schema cannot say."""


@EXTENT
def test_the_schema_agrees_with_the_loader(extent: int) -> None:
    validator = Draft202012Validator(json.loads(json.dumps(schema(RLConfig))))

    @tries(150 * extent)
    @given(mutated())
    def check(config: dict[str, Any]) -> None:
        found = outcome(lambda: load_config(None, base=config), ConfigError)
        faults = [error.message for error in validator.iter_errors(config)]
        if isinstance(found, RLConfig):
            assert faults == []
        elif not faults:
            lines = found.removeprefix(f"{found.count(chr(10))} mistakes\n").splitlines()
            own = re.search(r'"name": "[^"]+:', json.dumps(config))  # a class of one's own, whose keys no schema knows
            assert own or any(re.search(STRICTER, line) for line in lines), found

    check()


@pytest.mark.parametrize(
    "fault",
    ["ImportError('it needs other')", "RuntimeError('\\ud800')", "type('Mute', (Exception,), {'__str__': None})()"],
)
def test_a_module_that_fails_when_it_is_looked_into(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_module.py").write_text(f"def __getattr__(name):\n    if name[0] != '_':\n        raise {fault}\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = outcome(lambda: load_config(EXAMPLES[0], ["algorithm={name: 'lazy_module:Own'}"]), ConfigError)
    assert isinstance(message, str)
    assert "lazy_module:Own" in message
