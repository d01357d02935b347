"""`treadle schema`: it takes what the program takes and refuses what the program refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from jsonschema import Draft202012Validator
from pydantic.json_schema import models_json_schema

from tests.language_server import LanguageServer, install
from tests.runs import ROOT, finish
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate
from treadle.config import Config, config_class, dump, key, plugin
from treadle.config.json_types import model_schema
from treadle.config.keys import owners, tree
from treadle.config.schema import schema
from treadle.config.yaml_text import from_file, from_text
from treadle.data.source import SourceConfig
from treadle.errors import ConfigError
from treadle.recipes.config import RLConfig, load_config

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
BASE = {
    "model": "m",
    "steps": 1,
    "run": {"dir": "r"},
    "data": {"train": {"name": "jsonl", "path": "p"}},
    "reward": "number",
}


class OwnConfig(PolicyGradientConfig):
    sharpness: float = key("how sharp", default=1.0)


class Own(Objective):
    """A half of the user's."""

    Config = OwnConfig

    def surrogate(self, batch: Any, logprob_T: Any, old_T: Any) -> Surrogate:
        return Surrogate(-logprob_T, batch.mask_T & False)


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    whole = json.loads(json.dumps(schema(RLConfig), allow_nan=False))
    Draft202012Validator.check_schema(whole)
    return Draft202012Validator(whole)


def faults(validator: Draft202012Validator, data: Any) -> list[str]:
    return [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in validator.iter_errors(data)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_shipped_configuration_is_taken(path: Path, validator: Draft202012Validator) -> None:
    assert faults(validator, from_file(path)) == []
    resolved = from_text(dump(load_config(path)), "resolved")  # every key in place, null where it may be
    assert faults(validator, resolved) == []


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": {"name": "ppo", "gamma": 0.9, "kl_target": None, "kl_coefficient": 0.1}},
        {"algorithm": {"clip_low": 1}},
        {"algorithm": {}},
        {"reward": {"functions": {"math": 1.0, "number": -0.5}, "timeout_s": 3}},
        {"sampling": {"stop": ["a", "b"]}},
        {"threads": None},
        {"data": {"train": {"name": "reasoning_gym", "family": "chain_sum", "options": {"min_terms": 2}}}},
        {"data": {**BASE["data"], "evaluation": None}},
        {"data": {**BASE["data"], "evaluation": {"name": "jsonl", "path": "x"}}},
        {"critic": {"trainer": {"dtype": "float32"}}},
        {"algorithm": {"name": "gspo+rloo", "level": "token", "aggregate": "constant", "clip_low": 1e-3}},
        {"algorithm": {"name": "rloo+gspo"}},
        {"algorithm": {"name": "clip_cov+gdpo", "cov_low": 0.5, "dual_clip": 3, "part_weights": {"math": 2}}},
        {"algorithm": {"name": "pass_at_k+cispo", "k": 2, "correction": {"weight": "token"}}},
        {"algorithm": {"name": "gspo", "scale": "none"}},
        {"algorithm": {"name": "dr_grpo", "dual_clip": 2}},
        {"algorithm": {"name": "tests.test_schema:Own+rloo", "sharpness": 2.0}},
        {"algorithm": {"name": "rloo+tests.test_schema:Own", "sharpness": 2.0}},
    ],
)
def test_what_the_program_takes_is_taken(change: dict[str, Any], validator: Draft202012Validator) -> None:
    assert load_config(None, base=BASE | change)
    assert faults(validator, BASE | change) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"stepz": 3}, "stepz"),
        ({"steps": 0}, "steps"),
        ({"steps": "3"}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"steps": True}, "steps"),
        ({"seed": None}, "seed"),
        ({"on_publish": "wait"}, "on_publish"),
        ({"threads": 0}, "threads"),
        ({"run": {}}, "dir"),
        ({"run": []}, "run"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature"),
        ({"sampling": {"stop": [""]}}, "sampling.stop.0"),
        ({"sampling": {"stop": "x"}}, "sampling.stop"),
        ({"trainer": {"learning_rate": "fast"}}, "trainer.learning_rate"),
        ({"trainer": {"betas": [0.9, 1]}}, "trainer.betas.1"),
        ({"critic": {"trainer": {"betas": [1, 0.9]}}}, "critic.trainer.betas.0"),
        ({"algorithm": {"name": "ppo", "scale": "std"}}, "scale"),
        ({"algorithm": {"gamma": 0.9}}, "gamma"),
        ({"algorithm": {"name": "pppo"}}, "algorithm.name"),
        ({"algorithm": {"name": "my.module"}}, "algorithm.name"),
        ({"algorithm": {"name": "ppo", "gamma": 2}}, "algorithm.gamma"),
        ({"algorithm": "ppo"}, "algorithm"),
        ({"algorithm": {"name": "gspo+"}}, "algorithm.name"),
        ({"algorithm": {"name": "+"}}, "algorithm.name"),
        ({"algorithm": {"name": "+rloo"}}, "algorithm.name"),
        ({"algorithm": {"name": "gspo+nothing"}}, "algorithm.name"),
        ({"algorithm": {"name": "gspo+cispo"}}, "algorithm.name"),
        ({"algorithm": {"name": "rloo+opo"}}, "algorithm.name"),
        ({"algorithm": {"name": "rloo+grpo"}}, "algorithm.name"),
        ({"algorithm": {"name": "gspo+rloo+opo"}}, "algorithm.name"),
        ({"algorithm": {"name": "gspo+rloo", "clip_loww": 1}}, "clip_loww"),
        ({"algorithm": {"name": "gspo+rloo", "clip_low": 2}}, "algorithm.clip_low"),
        ({"algorithm": {"name": "gspo+rloo", "scale": "std"}}, "scale"),
        ({"algorithm": {"name": "gspo+rloo", "group_size": 0}}, "algorithm.group_size"),
        ({"algorithm": {"name": "critic+cispo", "lam": 2}}, "algorithm.lam"),
        ({"algorithm": {"name": "dr_grpo", "scale": "std"}}, "scale"),
        ({"data": {"train": {"name": "jsonl+csv", "path": "p"}}}, "data.train"),
        ({"reward": "nmber"}, "reward"),
        ({"reward": {"functions": {}}}, "reward.functions"),
        ({"reward": {"functions": {"nmber": 1}}}, "reward.functions"),
        ({"reward": {"functions": {"number": "x"}}}, "reward.functions.number"),
        ({"data": {"train": {"path": "x"}}}, "data.train"),
        ({"data": {"train": {"name": "jsonl"}}}, "data.train"),
        ({"data": {"train": {"name": "jsonl", "path": "p", "family": "x"}}}, "family"),
        ({"data": {"train": None}}, "data.train"),
    ],
)
def test_what_the_program_refuses_is_refused(change: dict[str, Any], where: str, validator: Any) -> None:
    with pytest.raises(ConfigError):
        load_config(None, base=BASE | change)
    assert any(where in fault for fault in faults(validator, BASE | change))


def test_classes_and_functions_of_the_user_may_have_any_keys(validator: Draft202012Validator) -> None:
    own = {"algorithm": {"name": "my.module:Class", "anything": 1}, "reward": "mine:reward"}
    own |= {"data": {"train": {"name": "mine:Source", "rows": [1]}}}
    assert faults(validator, BASE | own) == []
    assert faults(validator, BASE | {"reward": {"functions": {"mine:reward": 1.0}}}) == []


def test_a_joined_name_of_ours_has_the_keys_of_both_halves_to_complete(validator: Draft202012Validator) -> None:
    section = validator.schema["$defs"]["treadle.algorithms:grpo"]  # type: ignore[index]
    told = {
        key
        for case in section["allOf"]
        if "pattern" in case["if"]["properties"]["name"]
        and Draft202012Validator(case["if"]).is_valid({"name": "opo+clip_cov"})
        for key in case["then"].get("properties", {})
    }
    assert told == {*config_class("clip_cov+opo", "treadle.algorithms").model_fields} - {"name"}


def test_the_schema_of_every_model_is_the_one_that_pydantic_gives(validator: Draft202012Validator) -> None:
    """Ours is made without building the models."""
    models = list(dict.fromkeys([RLConfig, *(each.owner for each in tree(RLConfig))]))
    refs, found = models_json_schema([(model, "validation") for model in models])

    def place(model: type[Config]) -> str:
        return refs[model, "validation"]["$ref"]

    def plain(node: Any) -> Any:
        if isinstance(node, list):
            return [plain(item) for item in node]
        if not isinstance(node, dict):
            return node
        return {k: plain(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}

    assert len(models) > 40
    for model in models:
        theirs = found["$defs"][place(model).rpartition("/")[2]]
        assert plain(model_schema(owners((model,)), place, model)) == plain(theirs), model


def test_every_key_has_its_meaning_range_and_default_to_hover(validator: Draft202012Validator) -> None:
    whole: Any = validator.schema
    text = json.dumps(whole, ensure_ascii=False)
    for each in tree(RLConfig):
        assert each.field.description
        assert json.dumps(each.field.description, ensure_ascii=False)[1:-1] in text, each.path
    steps = whole["$defs"]["PPOConfig"]["properties"]["group_size"]
    assert steps["description"].endswith("a whole number ≥ 1 and ≤ 65536; default 1")
    assert (steps["minimum"], steps["maximum"], steps["default"]) == (1, 65536, 1)
    assert "title" not in steps


def test_a_plugin_that_holds_others_of_its_kind_does_not_run_away() -> None:
    class Mixture(Config):
        sources: list[Annotated[SourceConfig, plugin("treadle.data")]] = key("several", default=[])

    check = Draft202012Validator(json.loads(json.dumps(schema(Mixture))))
    assert faults(check, {"sources": [{"name": "jsonl", "path": "x"}]}) == []
    assert faults(check, {"sources": [{"name": "jsonl"}]}) != []


def test_on_the_command_line() -> None:
    code, out, err = finish("schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(schema(RLConfig)))


@pytest.mark.long
def test_in_a_language_server(tmp_path: Path) -> None:
    (tmp_path / "treadle.schema.json").write_text(json.dumps(schema(RLConfig)))
    head = "# yaml-language-server: $schema=treadle.schema.json\n"
    server = LanguageServer(install(tmp_path), tmp_path)
    try:
        for path in EXAMPLES:
            assert server.mistakes(path.name, head + path.read_text()) == {}
        wrong = "model: m\nsteps: 0\nrun: {dir: r, dri: 1}\ndata: {train: {name: jsonl, path: x}}\nreward: number\n"
        wrong += "algorithm:\n  name: ppo\n  gamma: 1.5\n  scale: std\ntrainer: {learning_rate: fast}\n"
        found = server.mistakes("wrong.yaml", head + wrong)
        assert {line - 1: " ".join(text.split()[:2]) for line, text in found.items()} == {
            1: "Value is",
            2: "Property dri",
            7: "Value is",
            8: "Property scale",
            9: "Incorrect type.",
        }
        assert "discount per token" in server.hover("wrong.yaml", 8, 4)
        assert "a number > 0 and ≤ 1; default 1.0" in server.hover("wrong.yaml", 8, 4)
        partial = "algorithm:\n  name: ppo\n  \nreward: \ntrainer:\n  schedule: \n  \n"
        assert server.mistakes("partial.yaml", head + partial)
        assert {"gamma", "lam", "clip_low"} <= set(server.completions("partial.yaml", 3, 2))
        assert "scale" not in server.completions("partial.yaml", 3, 2)  # grpo's
        joined = "algorithm:\n  name: rloo+gspo\n  level: tokens\n  clip_lowest: 1\n  \n"
        told = server.mistakes("joined.yaml", head + joined)
        assert told[3] == 'Value is not accepted. Valid values: "sequence", "token".'
        assert "clip_low" in told[4]
        assert {"clip_low", "kl_coefficient", "correction"} <= set(server.completions("joined.yaml", 5, 2))
        assert "whether tokens have advantages" in server.hover("joined.yaml", 3, 4)
        assert {"number", "math"} <= set(server.completions("partial.yaml", 4, 8))
        assert server.completions("partial.yaml", 6, 12) == ["constant", "linear", "cosine"]
    finally:
        server.close()
