"""Prompt sources: rows and their faults, order and position, rendering, prompts that are too long."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from treadle.config import load
from treadle.data.config import DataConfig, evaluation_source, train_source
from treadle.data.jsonl import JsonLines, JsonLinesConfig
from treadle.data.rendering import Renderer
from treadle.data.source import TOO_LONG, Order, Row, RowSource, prompts
from treadle.errors import ConfigError, DataError
from treadle.types import Prompt


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def plain(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer, chat=False, max_tokens=100)


class Few(RowSource):
    """Rows "a", "aa", "aaa", …, in memory."""

    def __init__(self, size: int, renderer: Renderer, order: Order) -> None:
        super().__init__(renderer, order)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def row(self, number: int) -> Row:
        return Row(f"row:{number}", "a" * (number + 1), answer=number)

    @property
    def fingerprint(self) -> str:
        return f"{self._size} rows"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def json_lines(path: Path, renderer: Renderer, order: Order | None = None) -> JsonLines:
    return JsonLines(JsonLinesConfig(path=path), renderer, order or Order())


# ---------------------------------------------------------------------- rows


def test_rows_become_prompts(tmp_path: Path, tokenizer: Any) -> None:
    dialogue = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    path = tmp_path / "d.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "What is 2 + 3?", "answer": 5, "level": 1}\r\n\n   \n'
        + json.dumps({"prompt": dialogue, "id": "mine"}).encode()
    )
    first, second = prompts(json_lines(path, Renderer(tokenizer, chat=True, max_tokens=100)))
    assert (first.id, first.index, first.answer, first.metadata) == ("d.jsonl:1", 0, 5, {"level": 1})
    assert first.messages == ({"role": "user", "content": "What is 2 + 3?"},)
    assert tokenizer.decode(first.token_ids) == "<|user|>What is 2 + 3?<|end|><|assistant|>"
    assert (second.id, second.index, second.answer) == ("mine", 1, None)
    assert tokenizer.decode(second.token_ids) == "<|system|>Be brief.<|end|><|user|>2 + 3?<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "x"', "not JSON"),
        (b"nothing", "not JSON"),
        (b'["x"]', "the row is a list, not an object"),
        (b'"x"', "the row is a str"),
        (b"null", "the row is a NoneType"),
        (b'{"question": "x"}', "no key \"prompt\" (it has 'question')"),
        (b"{}", "no key"),
        (b'{"prompt": 3}', '"prompt" is a int'),
        (b'{"prompt": null}', '"prompt" is a NoneType'),
        (b'{"prompt": ""}', '"prompt" is empty'),
        (b'{"prompt": " \\n"}', '"prompt" is empty'),
        (b'{"prompt": []}', '"prompt" is empty'),
        (b'{"prompt": [{"role": "user", "content": ""}]}', '"prompt" is empty'),
        (b'{"prompt": ["x"]}', 'message 0 of "prompt"'),
        (b'{"prompt": [{"role": "user", "content": "x"}, {"role": "user"}]}', 'message 1 of "prompt"'),
        (b'{"prompt": [{"role": "", "content": "x"}]}', 'message 0 of "prompt"'),
        (b'{"prompt": "x", "answer": NaN}', "NaN is not a JSON value"),
        (b'{"prompt": "x", "answer": [-Infinity]}', "-Infinity is not a JSON value"),
        (b'{"prompt": "x", "answer": 1e999}', "too large"),
        (b'{"prompt": "x", "answer": ' + b"9" * 5000 + b"}", "not usable JSON"),
        (b'{"prompt": "x", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not usable JSON"),
        (b'{"prompt": "x", "prompt": "y"}', "the key 'prompt' stands twice"),
        (b'{"prompt": "x", "id": 7}', '"id" is 7, not a string'),
        (b'{"prompt": "x", "id": ""}', "\"id\" is '', not a string"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "is not text"),
    ],
)
def test_a_malformed_row_is_named_before_any_prompt(tmp_path: Path, plain: Renderer, line: bytes, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n\n' + line + b'\n{"prompt": "good"}\n')
    with pytest.raises(DataError) as error:
        json_lines(path, plain)
    assert str(error.value).startswith(f"{path}:3: ")
    assert words in str(error.value)
    assert '{"prompt": "What is 2 + 3?", "answer": "5"}' in str(error.value)


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,promtx1eE-.\\u ', max_size=40).map(str.encode))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_rows_or_a_data_error(tmp_path: Path, plain: Renderer, content: bytes) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError):
        json_lines(path, plain)


def test_files_without_rows(tmp_path: Path, plain: Renderer) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"empty.jsonl: the data set is empty"):
        json_lines(tmp_path / "empty.jsonl", plain)
    with pytest.raises(DataError, match="No such file"):
        json_lines(tmp_path / "none.jsonl", plain)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"no file \*.jsonl is in this directory"):
        json_lines(tmp_path / "none", plain)


def test_ids_must_differ(tmp_path: Path, plain: Renderer) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "id": "x"}, {"prompt": "b"}, {"prompt": "c", "id": "x"})
    with pytest.raises(DataError, match=r"d.jsonl:3: the id 'x' is that of d.jsonl:1 already"):
        json_lines(path, plain)


def test_a_file_that_vanishes_is_a_data_error(tmp_path: Path, plain: Renderer) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "a"})
    source = json_lines(path, plain)
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        source.next()


# ---------------------------------------------------------------------- order and position


def test_without_shuffle_rows_keep_their_order(plain: Renderer) -> None:
    assert [p.answer for p in prompts(Few(3, plain, Order(epochs=2)))] == [0, 1, 2, 0, 1, 2]


def test_each_epoch_is_another_permutation_of_all_rows(plain: Renderer) -> None:
    found = prompts(Few(20, plain, Order(seed=5, shuffle=True, epochs=3)))
    epochs = [[p.answer for p in found[i : i + 20]] for i in (0, 20, 40)]
    assert all(sorted(e) == list(range(20)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [p.index for p in found] == list(range(60))
    assert {p.id for p in found} == {f"row:{i}" for i in range(20)}
    again = prompts(Few(20, plain, Order(seed=5, shuffle=True, epochs=3)))
    assert again == found
    assert [p.id for p in prompts(Few(20, plain, Order(seed=6, shuffle=True)))] != [p.id for p in found[:20]]


@given(
    size=st.integers(1, 5),
    taken=st.integers(0, 16),
    shuffle=st.booleans(),
    epochs=st.none() | st.integers(1, 3),
    limit=st.sampled_from([1, 2, 100]),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_restored_source_goes_on_with_the_next_prompt(
    tokenizer: Any, size: int, taken: int, shuffle: bool, epochs: int | None, limit: int
) -> None:
    """At every place: epoch boundaries, the end of finite data, between prompts that are too long."""
    renderer = Renderer(tokenizer, chat=False, max_tokens=limit)
    order = Order(seed=1, shuffle=shuffle, epochs=epochs)
    whole = Few(size, renderer, order)
    for _ in range(taken):
        whole.next()
    restored = Few(size, renderer, order)
    restored.restore(json.loads(json.dumps(whole.state())))
    assert restored.state() == whole.state()
    for _ in range(2 * size + 1):
        assert restored.next() == whole.next()
    assert restored.skipped == whole.skipped


def test_finite_data_stay_at_their_end(plain: Renderer) -> None:
    source = Few(2, plain, Order(epochs=1))
    assert [source.next() is None for _ in range(4)] == [False, False, True, True]


def test_other_data_are_refused_on_restore(tmp_path: Path, plain: Renderer) -> None:
    state = json_lines(write(tmp_path / "d.jsonl", {"prompt": "a"}), plain).state()
    changed = json_lines(write(tmp_path / "d.jsonl", {"prompt": "b"}), plain)
    with pytest.raises(DataError, match="the data have changed since the checkpoint"):
        changed.restore(state)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, plain: Renderer) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} " + "x" * 500}) + "\n" for i in range(2000)))
    source = json_lines(path, Renderer(plain._tokenizer, chat=False, max_tokens=600), Order(shuffle=True))
    kept = sum(sys.getsizeof(v) for v in vars(source).values())
    assert kept < 2000 * 3 * 8 + 10_000
    assert sorted(int(p.messages[0]["content"].split()[0]) for p in prompts(source)) == list(range(2000))


# ---------------------------------------------------------------------- rendering and length


def test_a_tokenizer_without_chat_template(tiny_model: Path) -> None:
    bare = AutoTokenizer.from_pretrained(tiny_model)
    bare.chat_template = None
    with pytest.raises(DataError, match=r"no chat template: set data.chat=false"):
        Renderer(bare, chat=True, max_tokens=10)
    messages, token_ids = Renderer(bare, chat=False, max_tokens=10)("hé", "row")
    assert messages == ({"role": "user", "content": "hé"},)
    assert bare.decode(token_ids) == "hé"
    assert len(token_ids) == 3  # bytes


def test_messages_without_chat(plain: Renderer) -> None:
    with pytest.raises(DataError, match=r"d:1: the prompt is a list of messages, but data.chat is false"):
        plain([{"role": "user", "content": "x"}], "d:1")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1/0 }}", "division by zero"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_a_template_that_fails_names_the_row(tiny_model: Path, template: str, words: str) -> None:
    strict = AutoTokenizer.from_pretrained(tiny_model)
    strict.chat_template = template
    with pytest.raises(DataError, match=rf"d:7: the tokenizer's chat template refuses these messages: .*{words}"):
        Renderer(strict, chat=True, max_tokens=10)("x", "d:7")


def test_a_prompt_without_tokens(tiny_model: Path) -> None:
    empty = AutoTokenizer.from_pretrained(tiny_model)
    empty.chat_template = "{# nothing #}"
    with pytest.raises(DataError, match="d:7: the prompt has no token"):
        Renderer(empty, chat=True, max_tokens=10)("x", "d:7")


@pytest.mark.parametrize("chat", [False, True])
def test_of_a_text_far_too_long_only_the_beginning_is_encoded(
    tokenizer: Any, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **keys: (encoded.append(len(text)), encode(text, **keys))[1], raising=False
    )
    render = Renderer(tokenizer, chat=chat, max_tokens=10)
    assert len(render("x" * 1_000_000, "row")[1]) > 10
    assert encoded == [640]
    monkeypatch.setattr("treadle.data.rendering._LONGEST", 2)  # as if this vocabulary's tokens were shorter than this
    found = Renderer(tokenizer, chat=chat, max_tokens=60)("<|assistant|>" * 52, "row")[1]
    assert tokenizer.decode(found).count("<|assistant|>") == 52 + chat  # the beginning would fit: all of it is encoded


def test_long_prompts_are_kept_out_counted_and_reported_once(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = Few(6, Renderer(tokenizer, chat=False, max_tokens=2), Order(epochs=2))
    with caplog.at_level(logging.WARNING):
        found = prompts(source)
    assert [p.answer for p in found] == [0, 1, 0, 1]
    assert [p.index for p in found] == [0, 1, 2, 3]
    assert source.skipped == {TOO_LONG: 8}
    assert [r.getMessage() for r in caplog.records] == [
        "row:2: the prompt has 3 tokens or more, over data.max_prompt_tokens=2: it is kept out, and others like it"
    ]


@pytest.mark.parametrize("epochs", [None, 1])
def test_all_prompts_too_long_is_an_error_not_a_loop(tokenizer: Any, tmp_path: Path, epochs: int | None) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "abcde"}, {"prompt": "abcd"}, {"prompt": "abcdef"})
    source = json_lines(path, Renderer(tokenizer, chat=False, max_tokens=3), Order(0, True, epochs))
    with pytest.raises(DataError, match=r"all 3 prompts .* data.max_prompt_tokens=3, the shortest has 4 tokens"):
        source.next()


# ---------------------------------------------------------------------- configuration and reasoning-gym


def data_config(*overrides: str) -> DataConfig:
    return load(DataConfig, None, overrides)


def test_sources_from_a_configuration(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", *({"prompt": f"{i}"} for i in range(8)))
    config = data_config(
        f"train={{name: jsonl, path: {path}}}", f"evaluation={{name: jsonl, path: {path}}}", "epochs=1"
    )
    held_out = evaluation_source(config, tokenizer)
    assert held_out is not None
    in_order = [p.id for p in prompts(held_out)]
    shuffled = [p.id for p in prompts(train_source(config, tokenizer, seed=0))]
    assert in_order == [f"d.jsonl:{i}" for i in range(1, 9)]
    assert shuffled != in_order
    assert sorted(shuffled) == in_order
    assert evaluation_source(data_config(f"train={{name: jsonl, path: {path}}}"), tokenizer) is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.name=jsnl", "did you mean jsonl?"),
        ("train={name: jsonl}", "train.path: missing; give a path"),
        ("train={path: x}", "train.name: missing"),
        ("train={name: jsonl, path: x, shufle: true}", "train.shufle"),
        ("epochs=0", "epochs: 0 is not allowed; give a whole number ≥ 1 and ≤ 1048576 or null"),
    ],
)
def test_configuration_mistakes(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as error:
        data_config(override)
    assert words in str(error.value)


def gym(tokenizer: Any, *overrides: str) -> Any:
    config = data_config(
        "train={name: reasoning_gym, family: chain_sum, size: 20}", "chat=false", "epochs=1", *overrides
    )
    return train_source(config, tokenizer, seed=0)


def test_problems_of_a_family(tokenizer: Any) -> None:
    options = "train.options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
    found = prompts(gym(tokenizer, options))
    assert len(found) == 20
    assert Counter(p.id for p in found).most_common(1)[0][1] == 1
    one = found[0]
    assert eval(one.metadata["entry"]["metadata"]["expression"]) == int(one.answer)
    assert prompts(gym(tokenizer, options)) == found
    other: list[Prompt] = prompts(gym(tokenizer, options, "train.seed=1"))
    assert {p.messages[0]["content"] for p in other} != {p.messages[0]["content"] for p in found}
    assert gym(tokenizer, options).fingerprint != gym(tokenizer, options, "train.seed=1").fingerprint


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.family=chain_summ", "no family 'chain_summ'; there is chain_sum"),
        ("train.options={min_term: 2}", "no option 'min_term'; there is min_terms"),
        ("train.options={min_terms: 0}", "refuses the options {'min_terms': 0}: min_terms must be positive"),
        ("train.options={min_terms: x}", "refuses the options"),
        ("train.options={size: 5}", "no option 'size'"),
    ],
)
def test_families_and_options_that_do_not_exist(tokenizer: Any, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        gym(tokenizer, override)
    assert words in str(error.value)


def test_a_missing_package_names_the_extra(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'treadle\[tasks\]'"):
        gym(tokenizer)
