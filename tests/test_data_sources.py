"""Tables as prompts: columns, Parquet, CSV, Hugging Face datasets, shards; faults named by file and row."""

from __future__ import annotations

import datetime
import importlib
import json
import logging
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.data_help import after_restart, renderer, source, take, write_lines
from treadle.data.arrow import _surely_prompts
from treadle.data.columns import as_prompt
from treadle.data.parquet import Parquet, ParquetConfig
from treadle.data.shuffle import shuffled
from treadle.data.source import TOO_LONG, Order, prompts
from treadle.errors import ConfigError, DataError


def user(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


COMMON = [
    {
        "data_source": "openai/gsm8k",
        "prompt": user(f"What is {i} + 1?"),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train", "tags": ["easy", None]},
    }
    for i in range(10)
]


def parquet(path: Path, rows: Any, **options: Any) -> Path:
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path, **options)
    return path


def csv(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(params=["parquet", "saved", "files"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Writes rows and gives the source's configuration: the same table as Parquet and as Hugging Face datasets."""

    def write(rows: list[dict[str, Any]] | pa.Table) -> str:
        if request.param == "parquet":
            return f"{{name: parquet, path: {parquet(tmp_path / 't.parquet', rows, row_group_size=3)}}}"
        if request.param == "files":
            (tmp_path / "t").mkdir()
            parquet(tmp_path / "t" / "train.parquet", rows)
            return f"{{name: hf, path: {tmp_path / 't'}}}"
        table: Any = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        datasets.Dataset(table).save_to_disk(tmp_path / "t")
        return f"{{name: hf, path: {tmp_path / 't'}}}"

    return write


@pytest.fixture(scope="module", autouse=True)
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library's bars are switched off, and its cache lies where the tests do."""
    datasets.disable_progress_bars()
    options: Any = importlib.import_module("datasets.config")
    before, options.HF_DATASETS_CACHE = options.HF_DATASETS_CACHE, tmp_path_factory.mktemp("cache")
    yield
    options.HF_DATASETS_CACHE = before
    datasets.enable_progress_bars()


# ---------------------------------------------------------------------- columns


def test_the_common_layout_is_recognised_and_named(tables: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "treadle"):
        first, *rest = prompts(source(tables(COMMON)))
    assert first.messages == ({"role": "user", "content": "What is 0 + 1?"},)
    assert (first.answer, first.index) == ("1", 0)
    assert first.id.endswith(":0")
    assert {k: v for k, v in first.metadata.items() if k != "reward_model"} == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "extra_info": {"index": 0, "split": "train", "tags": ["easy", None]},
    }
    assert [p.answer for p in rest] == [str(i + 1) for i in range(1, 10)]
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.endswith("prompts are in the column 'prompt', answers in 'reward_model.ground_truth'")


@pytest.mark.parametrize(
    ("row", "keys", "found"),
    [
        ({"question": "2?", "answer": "4"}, "", ("2?", "4")),
        ({"messages": user("2?"), "solution": "4"}, "", ("2?", "4")),
        ({"problem": "2?", "ground_truth": 4}, "", ("2?", 4)),
        ({"prompt": "2?"}, "", ("2?", None)),
        ({"question": "2?", "problem": "3?", "answer": "4"}, "prompt: problem", ("3?", "4")),
        ({"prompt": "2?", "a": {"b": {"c": 5}}}, "answer: a.b.c", ("2?", 5)),
        ({"prompt": "2?", "a.b": 5, "a": {"b": 6}}, "answer: a.b", ("2?", 5)),
        ({"x": {"text": "2?"}, "y": None}, "prompt: x.text, answer: y", ("2?", None)),
        ({"prompt": json.dumps(user("2?")), "answer": "4"}, "", ("2?", "4")),
    ],
)
def test_layouts(tmp_path: Path, row: dict[str, Any], keys: str, found: Any) -> None:
    path = parquet(tmp_path / "t.parquet", [row])
    one = source(f"{{name: parquet, path: {path}, {keys}}}").next()
    assert (one.messages[-1]["content"], one.answer) == found


@pytest.mark.parametrize(
    ("row", "keys", "words"),
    [
        (
            {"text": "x", "label": 1},
            "",
            "no column is called prompt or messages or question or problem; .* text, label",
        ),
        ({"question": "x", "problem": "y"}, "", "the prompt may be in 'question' or 'problem'; .* key `prompt`"),
        (
            {"prompt": "x", "answer": "y", "solution": "z"},
            "",
            "the answer may be in 'answer' or 'solution'; .*`answer`",
        ),
        ({"prompt": "x"}, "answer: label", "no column 'label', which the source's key `answer` names. .* prompt"),
        ({"prompt": "x"}, "prompt: text", "no column 'text', which the source's key `prompt` names"),
    ],
)
def test_columns_are_never_guessed(tmp_path: Path, row: dict[str, Any], keys: str, words: str) -> None:
    path = parquet(tmp_path / "t.parquet", [row])
    with pytest.raises(DataError, match=rf"t.parquet: .*{words}"):
        source(f"{{name: parquet, path: {path}, {keys}}}")


PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
IMAGE = [{"role": "user", "content": [{"type": "image", "text": None}]}]


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("x", None, '"prompt" is a NoneType'),
        ("x", "  \n", '"prompt" is empty'),
        (user("x"), [], '"prompt" is empty'),
        (user("x"), user(" "), '"prompt" is empty'),
        (user("x"), user(None), 'message 0 of "prompt" is not an object with "role" and "content" as strings'),
        (user("x"), [None], 'message 0 of "prompt"'),
        (user("x"), [{"role": "", "content": "x"}], 'message 0 of "prompt"'),
        (user("x"), [*user("x"), {"role": "assistant", "content": "y"}], "ends with the assistant's answer"),
        (PARTS, IMAGE, "part 0 of message 0 .* is 'image'; only text"),
        (None, [{"from": "human", "value": "x"}], 'message 0 of "prompt"'),
        (None, ["x"], 'message 0 of "prompt"'),
        (None, 7, '"prompt" is a int'),
        (None, b"x", '"prompt" is a bytes'),
    ],
)
def test_a_malformed_row_is_named_before_any_prompt(tables: Any, good: Any, bad: Any, words: str) -> None:
    """`good` has the same type; where there is none, the first row is the bad one."""
    rows = [bad, bad] if good is None else [good, good, bad, good]
    with pytest.raises(DataError, match=rf"row {rows.index(bad)} \(counted from 0\): .*{words}"):
        source(tables([{"prompt": value, "answer": "x"} for value in rows]))


def test_text_in_parts_is_joined_and_nulls_of_tables_are_left_out(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
    path = parquet(tmp_path / "t.parquet", [{"prompt": [{"role": "user", "content": parts, "tool_calls": None}]}])
    assert source(str(path)).next().messages == ({"role": "user", "content": "2 + 3?"},)


def test_messages_as_json_text_are_so_in_every_row(tmp_path: Path) -> None:
    text = json.dumps(user("x"))
    for other, words in (("plain", "here it is not JSON"), ('"x"', "JSON string"), ("[{", "not JSON")):
        path = parquet(tmp_path / "t.parquet", [{"prompt": text}, {"prompt": other}])
        with pytest.raises(DataError, match=rf"row 1 .*{words}"):
            source(str(path))
    path = parquet(tmp_path / "t.parquet", [{"prompt": "[1, 2] is a list"}, {"prompt": text}])
    assert source(str(path)).next().messages[0]["content"] == "[1, 2] is a list"


cells = st.none() | st.text("ab \n", max_size=3)
messages = st.fixed_dictionaries({"role": st.none() | st.sampled_from(["user", "assistant", ""]), "content": cells})
columns = st.lists(cells, min_size=1, max_size=4) | st.lists(
    st.none() | st.lists(st.none() | messages, max_size=3), min_size=1, max_size=4
)


@given(columns)
@settings(deadline=None, max_examples=300)
def test_the_quick_look_at_a_column_never_says_yes_to_a_bad_prompt(values: list[Any]) -> None:
    struct = pa.struct([("role", pa.string()), ("content", pa.string())])
    text = all(value is None or isinstance(value, str) for value in values)
    column = pa.array(values, pa.string() if text else pa.list_(struct))
    if _surely_prompts(column.slice(len(values) // 2)):
        for value in column.slice(len(values) // 2).to_pylist():
            as_prompt(value, "prompt")


def test_the_quick_look_says_yes_to_good_prompts() -> None:
    assert _surely_prompts(pa.array([user("x"), [*user("x"), {"role": "assistant", "content": "y"}, *user("z")]]))
    assert _surely_prompts(pa.array(["x", "y"]))


# ---------------------------------------------------------------------- parquet


def test_cells_are_plain_python(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001 (Parquet has times without a zone)
    table = pa.table(
        {
            "prompt": pa.array(["x", "y"]).dictionary_encode(),
            "answer": pa.array([1.5, None], pa.float32()),
            "when": pa.array([moment, None], pa.timestamp("us")).cast(pa.timestamp("ns")),
            "level": pa.array(["low", "low"]).dictionary_encode(),
            "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int8())),
            "nothing": pa.nulls(2),
            "large": pa.array(["l", None], pa.large_string()),
            "bytes": pa.array([b"\xff", None]),
        }
    )
    first, second = prompts(source(str(parquet(tmp_path / "t.parquet", table))))
    assert (first.answer, second.answer) == (1.5, None)
    assert first.metadata == {
        "when": moment,
        "level": "low",
        "map": [("a", 1)],
        "nothing": None,
        "large": "l",
        "bytes": b"\xff",
    }
    assert type(first.answer) is float
    assert set(second.metadata.values()) == {None, "low"}


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    good = parquet(tmp_path / "good.parquet", COMMON).read_bytes()
    for content in (b"", b"PAR1", b"x" * 1000, good[:-20], good[:200] + b"\0" * 50 + good[250:]):
        (tmp_path / "t.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"t\.parquet: "):
            source(str(tmp_path / "t.parquet"))


@example(1175, b"\x80")  # within the name of a column
@given(st.integers(4, 4000), st.binary(min_size=1, max_size=8))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_parquet_is_rows_or_a_data_error(tmp_path: Path, place: int, noise: bytes) -> None:
    content = bytearray(parquet(tmp_path / "good.parquet", COMMON, compression="none").read_bytes())
    place = min(place, len(content) - len(noise))
    content[place : place + len(noise)] = noise
    (tmp_path / "t.parquet").write_bytes(content)
    try:
        found = prompts(source(str(tmp_path / "t.parquet")))
    except DataError:
        return
    assert found


def test_tables_without_rows(tmp_path: Path, tables: Any) -> None:
    schema = pa.schema([("prompt", pa.string())])
    with pytest.raises(DataError, match=r"the data set is empty|cannot load this"):
        source(tables(schema.empty_table()))
    with pq.ParquetWriter(tmp_path / "none.parquet", schema):
        pass  # not one row group
    with pytest.raises(DataError, match=r"none.parquet: the data set is empty"):
        source(str(tmp_path / "none.parquet"))


def test_a_column_twice(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"])
    with pytest.raises(DataError, match="there are two columns 'prompt'"):
        source(str(parquet(tmp_path / "t.parquet", table)))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"caf\xe9"]).view(pa.string())
    path = parquet(tmp_path / "t.parquet", pa.table({"prompt": ["a", "b"], "note": bad}))
    with pytest.raises(DataError, match=r"t.parquet: row 1 \(counted from 0\): .*UTF"):
        source(str(path))


def test_no_room_for_the_scratch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "t.parquet", COMMON)
    with Path("/dev/full").open("r+b", 0) as full:
        monkeypatch.setattr("treadle.data.parquet.tempfile.TemporaryFile", lambda **_: full)
        with pytest.raises(DataError, match="No space left on device; make room, or set the variable TMPDIR"):
            source(str(path))


def test_the_scratch_file_is_gone_with_the_process_and_no_descriptor_stays(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", COMMON)
    before = len(os.listdir("/proc/self/fd"))
    one = Parquet(ParquetConfig(path=path), renderer(), Order())
    take(one, 20)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del one
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------------- csv


def test_csv_as_people_write_it(tmp_path: Path) -> None:
    path = csv(
        tmp_path / "t.csv",
        b'\xef\xbb\xbfquestion,answer,level\r\n"What is ""2"",\r\nthen 3?",5,\r\n\r\n'
        + json.dumps("日本?", ensure_ascii=False).encode()
        + b',"a,b",2\r\nlast,,3',
    )
    found = prompts(source(str(path)))
    assert [p.messages[0]["content"] for p in found] == ['What is "2",\r\nthen 3?', "日本?", "last"]
    assert [p.id for p in found] == ["t.csv:2", "t.csv:5", "t.csv:6"]
    assert [(p.answer, p.metadata) for p in found] == [
        ("5", {"level": ""}),
        ("a,b", {"level": "2"}),
        ("", {"level": "3"}),
    ]


def test_csv_with_messages_and_another_delimiter(tmp_path: Path) -> None:
    cell = json.dumps(user("2?")).replace('"', '""')
    path = csv(tmp_path / "t.csv", f'reward_model.ground_truth\tprompt\n4\t"{cell}"\n')
    one = source(f'{{name: csv, path: {path}, delimiter: "\\t"}}').next()
    assert (one.messages, one.answer, one.metadata) == (({"role": "user", "content": "2?"},), "4", {})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "t.csv: the data set is empty"),
        ("\n\n", "t.csv: the data set is empty"),
        ("prompt,answer\n", "t.csv: the data set is empty"),
        ("prompt,answer\na,b\nc\n", "t.csv:3: the row has 1 fields, the header 2"),
        ("prompt,answer\na,b,c\n", "t.csv:2: the row has 3 fields, the header 2; .* must stand in quotes"),
        ('prompt\na\n"b\nc\n', "t.csv:3: the record that begins here is not CSV .*a quote that is not closed"),
        ('prompt\n"a"b\n', "t.csv:2: the record that begins here is not CSV"),
        ("prompt,prompt\na,b\n", "t.csv:1: the column 'prompt' stands twice"),
        ("prompt\na\n  ,\n", "t.csv:3: the row has 2 fields"),
        ("prompt,answer\na,b\n ,b\n", 't.csv:3: "prompt" is empty'),
        (b"prompt\ncaf\xe9\n", "t.csv:2: not UTF-8 text"),
        (b"PAR1\0\xff\n", "t.csv:1: not UTF-8"),
        ("a;b\nx;y\n", "no column is called prompt .* a;b"),
    ],
)
def test_faults_in_csv_are_named(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        source(str(csv(tmp_path / "t.csv", content)))


@given(st.binary(max_size=30) | st.text('p",\n\r \0é', max_size=30).map(str.encode))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_rows_or_a_data_error(tmp_path: Path, content: bytes) -> None:
    path = csv(tmp_path / "t.csv", b"prompt,b\n" + content)
    try:
        found = prompts(source(str(path)))
    except DataError:
        return
    assert found


@given(
    rows=st.lists(st.tuples(st.text('a",\n\r é', min_size=1), st.text('b",\n\r', max_size=5)), min_size=1, max_size=80)
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_csv_rows_are_read_back_at_random(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    import csv as standard

    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = standard.writer(file, quoting=standard.QUOTE_ALL)
        writer.writerows([("prompt", "answer"), *(("x" + prompt, answer) for prompt, answer in rows)])
    found = prompts(source(str(tmp_path / "t.csv"), Order(shuffle=True, seed=4)))
    assert Counter((p.messages[0]["content"][1:], p.answer) for p in found) == Counter(rows)


# ---------------------------------------------------------------------- Hugging Face datasets


def test_splits_are_asked_for(tmp_path: Path) -> None:
    both = datasets.DatasetDict(
        [("train", datasets.Dataset.from_list(COMMON)), ("test", datasets.Dataset.from_list(COMMON[:2]))]
    )
    both.save_to_disk(tmp_path / "t")
    with pytest.raises(DataError, match=r"the splits are train, test; say which with the source's key `split`"):
        source(f"{{name: hf, path: {tmp_path / 't'}}}")
    with pytest.raises(DataError, match="the splits are train, test; there is no 'dev'"):
        source(f"{{name: hf, path: {tmp_path / 't'}, split: dev}}")
    with pytest.raises(DataError, match="no subsets; leave out the source's key `subset`"):
        source(f"{{name: hf, path: {tmp_path / 't'}, split: test, subset: main}}")
    with pytest.raises(DataError, match="no splits; leave out the source's key `split`"):
        source(f"{{name: hf, path: {tmp_path / 't' / 'test'}, split: test}}")
    assert len(source(f"{{name: hf, path: {tmp_path / 't'}, split: test}}")) == 2
    assert len(source(f"{{name: hf, path: {tmp_path / 't' / 'test'}}}")) == 2


def test_rows_chosen_from_a_data_set_are_its_rows(tmp_path: Path) -> None:
    datasets.Dataset.from_list(COMMON).select([7, 2, 5]).save_to_disk(tmp_path / "t")
    assert [p.answer for p in prompts(source(f"{{name: hf, path: {tmp_path / 't'}}}"))] == ["8", "3", "6"]


def test_a_part_of_a_split_of_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", *({"question": f"{i}?", "answer": i} for i in range(10)))
    config = f"{{name: hf, path: {tmp_path}, split: 'train[2:4]'}}"
    one = source(config)
    assert [p.answer for p in prompts(one)] == [2, 3]
    other = source(config.replace("2:4", "3:5"))
    with pytest.raises(DataError, match="the data have changed since the checkpoint"):
        after_restart(one, other)


def test_a_name_that_cannot_be_found_is_a_data_error_without_a_network() -> None:
    program = (
        "from tests.data_help import source\n"
        "from treadle.errors import DataError\n"
        "try:\n    source('{name: hf, path: no-such/thing}')\n"
        "except DataError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("no-such/thing: the package datasets cannot load this: "), done.stderr


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'treadle\[datasets\]'"):
        source("{name: hf, path: x}")


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["jsonl", "csv", "parquet"])
def test_shards_come_in_the_order_of_their_names(tmp_path: Path, name: str) -> None:
    def write(file: str, values: list[str]) -> None:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        rows = [{"prompt": value} for value in values]
        if name == "jsonl":
            write_lines(path, *rows)
        elif name == "csv":
            csv(path, "prompt\n" + "".join(f"{v}\n" for v in values))
        else:
            parquet(path, pa.table({"prompt": pa.array(values, pa.string())}))

    write(f"b/2.{name}", ["d", "e"])
    write(f"a/10.{name}", ["a"])
    write(f"a/9.{name}", ["b", "c"])
    write(f"a/.hidden.{name}", ["z"])
    write(f"c.{name}", ["f"])
    (tmp_path / "readme.txt").write_text("x")
    whole = prompts(source(f"{{name: {name}, path: {tmp_path}}}"))
    assert [p.messages[0]["content"] for p in whole] == ["a", "b", "c", "d", "e", "f"]
    assert len({p.id for p in whole}) == 6
    assert whole[0].id.startswith(f"a/10.{name}:")
    some = prompts(source(f"{tmp_path}/a/*.{name}"))
    assert [p.messages[0]["content"] for p in some] == ["a", "b", "c"]
    deep = source(f"{tmp_path}/**/*.{name}", Order(shuffle=True))
    assert sorted(p.messages[0]["content"] for p in prompts(deep)) == ["a", "b", "c", "d", "e", "f"]
    with pytest.raises(DataError, match="no file matches this pattern"):
        source(f"{tmp_path}/x*.{name}")
    with pytest.raises(DataError, match="No such file"):
        source(f"{tmp_path}/x.{name}")
    (tmp_path / f"x.{name}.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match="compressed, and rows are read at random: unpack it first"):
        source(f"{{name: {name}, path: {tmp_path}/x.{name}.gz}}")


def test_shards_have_the_same_columns(tmp_path: Path) -> None:
    parquet(tmp_path / "1.parquet", [{"prompt": "a", "answer": "x"}])
    parquet(tmp_path / "2.parquet", [{"prompt": "b"}])
    with pytest.raises(
        DataError, match=r"2.parquet: the columns are prompt, those of the first file are prompt, answer"
    ):
        source(f"{{name: parquet, path: {tmp_path}}}")
    csv(tmp_path / "1.csv", "prompt,answer\na,b\n")
    csv(tmp_path / "2.csv", "answer,prompt\na,b\n")
    with pytest.raises(DataError, match=r"2.csv:1: the columns are answer, prompt, those of 1.csv are prompt, answer"):
        source(f"{{name: csv, path: {tmp_path}}}")


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"t.{name}"
    text = "prompt\na\nb\n" if name == "csv" else '{"prompt": "a"}\n{"prompt": "b"}\n'
    path.write_text(text)
    one = source(str(path), Order(epochs=2))
    take(one, 1)
    path.write_text(text)
    os.utime(path, ns=(1, 1))
    assert [p.messages[0]["content"] for p in take(one, 2)] == ["b", "a"]  # the same again
    path.write_text(text.replace("b", "c"))
    with pytest.raises(DataError, match="the data have changed since this run began to read them"):
        one.next()


def test_an_id_that_looks_like_a_place_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", {"prompt": "a", "id": "t.jsonl:1"}, {"prompt": "b", "id": "t.jsonl:7"})
    with pytest.raises(
        DataError, match=r"t.jsonl:2: \"id\" is 't.jsonl:7', which is how rows without an id are called"
    ):
        source(str(path))


def test_keys_of_json_lines_may_have_other_names(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", {"q": "a", "meta": {"truth": 1}}, {"q": "b"})
    first, second = prompts(source(f"{{name: jsonl, path: {path}, prompt: q, answer: meta.truth}}"))
    assert (first.answer, second.answer, first.metadata) == (1, None, {"meta": {"truth": 1}})


# ---------------------------------------------------------------------- order, position, size


@given(size=st.integers(1, 300), key=st.text(max_size=3))
@settings(deadline=None, max_examples=60)
def test_an_order_is_a_permutation(size: int, key: str) -> None:
    assert sorted(shuffled(i, size, key) for i in range(size)) == list(range(size))


def test_every_order_of_few_rows_is_about_as_frequent() -> None:
    found = Counter(tuple(shuffled(i, 4, str(key)) for i in range(4)) for key in range(4800))
    assert len(found) == math.factorial(4)
    assert sum((count - 200) ** 2 / 200 for count in found.values()) < 60  # chi squared, 23 degrees of freedom


@pytest.mark.parametrize("taken", [0, 1, 9, 10, 13, 20, 25])
def test_a_restored_table_goes_on_with_the_next_prompt(tables: Any, taken: int) -> None:
    config, order = tables(COMMON), Order(seed=2, shuffle=True, epochs=2)
    whole = source(config, order, max_tokens=25)
    take(whole, taken)
    restored = after_restart(whole, source(config, order, max_tokens=25))
    assert take(restored, 30) == take(whole, 30)


def test_other_data_are_refused_on_restore(tmp_path: Path) -> None:
    one = source(str(parquet(tmp_path / "t.parquet", [{"prompt": "a", "answer": "12"}])))
    other = source(str(parquet(tmp_path / "t.parquet", [{"prompt": "a", "answer": "13"}])))
    with pytest.raises(DataError, match="the data have changed since the checkpoint"):
        after_restart(one, other)


def test_long_prompts_are_kept_out_and_counted(tmp_path: Path) -> None:
    one = source(str(parquet(tmp_path / "t.parquet", [{"prompt": "a" * i} for i in range(1, 9)])), max_tokens=12)
    assert [len(p.messages[0]["content"]) for p in prompts(one)] == [1, 2, 3, 4, 5]
    assert one.skipped == {TOO_LONG: 3}


def test_tens_of_thousands_of_rows_in_small_and_large_row_groups(tmp_path: Path) -> None:
    rows = pa.table({"prompt": [f"{i}?" for i in range(30_000)], "answer": range(30_000)})
    orders = []
    for size in (100, 30_000):
        one = source(str(parquet(tmp_path / "t.parquet", rows, row_group_size=size)), Order(seed=1, shuffle=True))
        found = take(one, 2000)
        assert all(p.messages[0]["content"] == f"{p.answer}?" and p.id == f"t.parquet:{p.answer}" for p in found)
        orders.append([p.answer for p in found])
        assert len(set(orders[-1])) == 2000
        assert 12_000 < sum(orders[-1]) / 2000 < 18_000
    assert orders[0] == orders[1]


SCALE = """
import json, resource, sys, time
from pathlib import Path
from tests.data_help import source
from treadle.data.source import Order

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024

import pyarrow.parquet, pyarrow.compute
before, begin = anonymous(), time.perf_counter()
one = source(sys.argv[1], Order(seed=1, shuffle=True))
first = one.next()
opened, begin = time.perf_counter() - begin, time.perf_counter()
found = {one.next().id for _ in range(20_000)}
seconds = time.perf_counter() - begin
assert len(found) == 20_000 and len(one) == int(sys.argv[2])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
grown = anonymous() - before
print(json.dumps({"first_prompt_s": opened, "prompts_per_s": 20_000 / seconds, "grown_mb": grown, "peak_mb": peak}))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["jsonl", "jsonl with ids", "csv", "parquet", "hf"])
def test_ten_million_rows(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = 10_000_000
    text = "Problem %d: a train leaves with %d passengers and at each stop half get off; how many are left after three?"
    if name in ("parquet", "hf"):
        path = tmp_path / "t.parquet"
        kind = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
        truth = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
        schema = pa.schema([("data_source", pa.string()), ("prompt", kind), ("reward_model", truth)])
        with pq.ParquetWriter(path, schema) as writer:
            for start in range(0, rows, 1_000_000):
                part = range(start, start + 1_000_000)
                content = pa.StructArray.from_arrays(
                    [pa.array([text % (i, 8 * i) for i in part]), pa.array(["user"] * len(part))], ["content", "role"]
                )
                prompt = pa.ListArray.from_arrays(pa.array(range(len(part) + 1), pa.int32()), content)
                answer = pa.StructArray.from_arrays(
                    [pa.array([str(i) for i in part]), pa.array(["rule"] * len(part))], ["ground_truth", "style"]
                )
                writer.write_table(pa.table([pa.array(["math"] * len(part)), prompt, answer], schema=schema))
    else:
        path = tmp_path / f"t.{name[:5].strip()}"
        line = (
            '{"prompt": "'
            + text
            + '", "answer": "%d"'
            + (', "id": "row %d"}\n' if "ids" in name else ', "level": %d}\n')
        )
        if name == "csv":
            line = f'"{text}",%d,%d\n'
        with path.open("w") as file:
            file.write("prompt,answer,level\n" if name == "csv" else "")
            for start in range(0, rows, 100_000):
                file.write("".join(line % (i, 8 * i, i, i) for i in range(start, start + 100_000)))
    config = f"{{name: hf, path: {tmp_path}}}" if name == "hf" else str(path)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", SCALE, config, str(rows)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{name}, {rows} rows: {found}")
    assert found["grown_mb"] < (250 if name in ("parquet", "hf") else 100 if "ids" in name else 30)
    assert found["prompts_per_s"] > 500
