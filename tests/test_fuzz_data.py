"""Data that nobody would write: prompts, counted skips, or a DataError that names the file; and a restart goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.data_help import after_restart, group, source, take
from tests.hostile import EXTENT, outcome, tries
from treadle.data.source import Order, prompts
from treadle.errors import ConfigError, DataError
from treadle.handles import PromptSource

LIMIT = 40
"""Of tokens, which are bytes: some prompts are kept out."""

text = st.text(max_size=12) | st.sampled_from(
    ["Q?", "x" * 100, " ", "\u00a0", "\0", "\r", "\ufeff", "[1]", '[{"role": "user"}]']
)
numbers = st.integers(-9, 9) | st.floats() | st.sampled_from([10**400, 1 << 63, True, None])
anything = st.recursive(
    numbers | text | st.sampled_from(["\ud800", "\udfff\ud800", "\ud83d\ude00"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image", None])}, optional={"text": text | numbers})
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "user", "assistant", "system", "", None])},
    optional={"content": text | st.lists(parts, max_size=2) | anything, "name": anything},
)
good = st.sampled_from(["2 + 3?", "x" * 99, "é"]) | st.just([{"role": "user", "content": "2 + 3?"}])
prompt = st.one_of(good, good, good, text, st.lists(message, max_size=2), anything)
row = st.fixed_dictionaries(
    {"prompt": prompt}, optional={"answer": anything, "id": text | anything, "x": anything, "prompt.a": anything}
)
tame = st.fixed_dictionaries(
    {"prompt": good}, optional={"answer": numbers.filter(lambda x: x == x and abs(x or 0) < 9)}
)
ORDERS = st.builds(Order, seed=st.integers(0, 3), shuffle=st.booleans(), epochs=st.integers(1, 2))


def lines(rows: st.SearchStrategy[Any], noise: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    line = rows.map(lambda r: json.dumps(r).encode()) | noise
    between = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b" \n\t\n"])
    whole = st.lists(st.tuples(line, between).map(b"".join), max_size=5).map(b"".join)
    return st.tuples(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe"]), whole).map(b"".join)


def drive(make: Callable[[], PromptSource], taken: int, *names: str) -> None:
    """All prompts of a source, which after `taken` of them is made again from its state."""

    def every_prompt() -> None:
        old = make()
        first = take(old, taken)
        for each in first[::2]:
            old.feedback(group(each, 0.0, 1.0))
        new = after_restart(old, make())
        rest = prompts(old)
        assert repr(prompts(new)) == repr(rest)  # NaN in a table differs from itself
        for number, each in enumerate([*first, *rest]):
            assert each.index == number
            assert 0 < len(each.token_ids) <= LIMIT
            assert all(message["content"].encode() is not None for message in each.messages)

    # ConfigError: a mixture of which no source can be told from its ending, and the like
    outcome(every_prompt, (DataError, ConfigError), *names, "data.max_prompt_tokens")


@EXTENT
def test_json_lines(extent: int, tmp_path: Path) -> None:
    path = tmp_path / "hostile.jsonl"

    @tries(150 * extent)
    @given(lines(row, st.binary(max_size=9)) | lines(tame, st.just(b"")), ORDERS, st.integers(0, 6))
    @example(b'{"prompt": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", Order(), 0)
    @example(b'{"prompt": "x", "a": ' + b"9" * 100_000 + b"}", Order(), 0)
    @example(b'{"prompt": "x", "a": 1e999}', Order(), 0)
    @example(b'{"prompt": "\\ud800"}', Order(), 0)
    @example(b'{"prompt": [{"role": "\\udfff", "content": "x"}]}', Order(), 0)
    @example(b'{"prompt": "x", "id": "\\ud800"}', Order(), 0)
    @example(b'{"prompt": "x", "\\ud800": 1}', Order(), 0)
    @example(b'{"prompt": "x", "prompt": "y"}', Order(), 0)
    def check(content: bytes, order: Order, taken: int) -> None:
        path.write_bytes(content)
        drive(lambda: source(str(path), order, LIMIT), taken, "hostile.jsonl")

    check()


@EXTENT
def test_csv(extent: int, tmp_path: Path) -> None:
    path = tmp_path / "hostile.csv"
    cell = text | st.sampled_from(
        ['"', '""', '"a,b"', '"a\nb"', "\0", "\r", '[{"role": "user", "content": "\\ud800"}]']
    )
    record = st.lists(cell, min_size=1, max_size=3).map(lambda cells: ",".join(cells).encode() + b"\n")
    header = st.sampled_from(
        [b"prompt\n", b"prompt,answer\n", b"prompt,answer\n", b"answer,prompt,x\n", b"prompt,prompt\n", b"\n", b""]
    )
    tidy = good.map(lambda p: b'"%s",5\n' % json.dumps(p).replace('"', '""').encode())
    table = st.tuples(header, st.lists(record | tidy | st.binary(max_size=9), max_size=5).map(b"".join)).map(b"".join)
    tidy_table = st.lists(tidy, min_size=1, max_size=4).map(lambda rows: b"prompt,answer\n" + b"".join(rows))

    @tries(150 * extent)
    @given(table | tidy_table | st.binary(max_size=40), ORDERS, st.integers(0, 6))
    @example(b'prompt\n"' + b"x\n" * 100_000, Order(), 0)
    @example(b"prompt\nx\n\xff\n", Order(), 0)
    def check(content: bytes, order: Order, taken: int) -> None:
        path.write_bytes(content)
        drive(lambda: source(str(path), order, LIMIT), taken, "hostile.csv")

    check()


# ---------------------------------------------------------------------- tables

CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
KINDS: list[pa.DataType] = [
    *(
        pa.string(),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.binary(3),
        pa.null(),
        pa.bool_(),
        pa.int8(),
        pa.uint64(),
    ),
    *(
        pa.float16(),
        pa.float64(),
        pa.decimal128(9, 2),
        pa.date32(),
        pa.date64(),
        pa.time32("ms"),
        pa.time64("ns"),
        CHAT,
    ),
    *(pa.timestamp(unit, zone) for unit in ("s", "us", "ns") for zone in (None, "UTC", "+25:00", "Nowhere/Else")),
    *(pa.duration("s"), pa.duration("ns"), pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.binary_view()),
]
kinds = st.recursive(
    st.sampled_from(KINDS),
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(pa.large_list)
        | inner.map(lambda kind: pa.list_(kind, 2))
        | inner.map(lambda kind: pa.map_(pa.string(), kind))
        | st.lists(st.tuples(st.sampled_from(["role", "content", "a", "ground_truth", ""]), inner), max_size=3).map(
            pa.struct
        )
    ),
    max_leaves=3,
)
LENGTHS = st.sampled_from([0, 1, 1, 2])


@st.composite
def arrays(draw: st.DrawFn, kind: pa.DataType, size: int) -> pa.Array:
    """`size` cells of a kind, some of them null."""

    def draws(cell: st.SearchStrategy[Any], count: int = size) -> list[Any]:
        return draw(st.lists(cell, min_size=count, max_size=count))

    is_ = pa.types
    if is_.is_struct(kind):
        columns = [draw(arrays(field.type, size)) for field in kind]
        return pa.StructArray.from_arrays(columns, fields=list(kind)) if columns else pa.array([{}] * size, kind)
    if is_.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(draw(arrays(kind.value_type, 2 * size)), 2)
    if is_.is_map(kind) or is_.is_list(kind) or is_.is_large_list(kind):
        ends = [sum(found) for found in [draws(LENGTHS)] for found in [found[:i] for i in range(size + 1)]]
        if is_.is_map(kind):
            keys = pa.array(draws(st.text(max_size=3), ends[-1]), pa.string())
            return pa.MapArray.from_arrays(ends, keys, draw(arrays(kind.item_type, ends[-1])))
        wide = is_.is_large_list(kind)
        made = pa.LargeListArray if wide else pa.ListArray
        return made.from_arrays(
            pa.array(ends, pa.int64() if wide else pa.int32()), draw(arrays(kind.value_type, ends[-1]))
        )
    if is_.is_temporal(kind):
        bits = kind.bit_width
        whole = st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) | st.integers(0, 86_399)
        return pa.array(draws(st.none() | whole), pa.int32() if bits == 32 else pa.int64()).view(kind)
    cell: st.SearchStrategy[Any] = st.text(max_size=6) | st.sampled_from(["user", "assistant", "2 + 3?", " "])
    if is_.is_dictionary(kind):
        return pa.array(draws(st.none() | cell), pa.string()).dictionary_encode()
    if is_.is_fixed_size_binary(kind):
        cell = st.binary(min_size=3, max_size=3)
    elif is_.is_binary(kind) or kind == pa.binary_view():
        cell = st.binary(max_size=5)
    elif is_.is_boolean(kind):
        cell = st.booleans()
    elif is_.is_integer(kind):
        cell = st.integers(0, 127)
    elif is_.is_floating(kind):
        cell = st.floats(width=16)
    elif is_.is_decimal(kind):
        cell = st.decimals(-999, 999, places=2)
    elif is_.is_null(kind):
        cell = st.none()
    return pa.array(draws(st.none() | cell if draw(st.booleans()) else cell), kind)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    size = draw(st.integers(0, 4))
    chosen = [("prompt", draw(st.sampled_from([pa.string(), CHAT])))] if draw(st.integers(0, 3)) else []
    name = st.sampled_from(
        ["answer", "messages", "question", "reward_model", "prompt.a", "a.b", "a", "", "é", "\0", "prompt"]
    )
    chosen += draw(st.lists(st.tuples(name, kinds), max_size=3))
    made = [draw(arrays(kind, size)) for _, kind in chosen]
    if (
        made and chosen[0][1] in (pa.string(), CHAT) and draw(st.integers(0, 3))
    ):  # good prompts, for the rest to be looked at
        cell: Any = "2 + 3?" if chosen[0][1] == pa.string() else [{"role": "user", "content": "2 + 3?"}]
        made[0] = pa.array([cell] * size, chosen[0][1])
    return pa.Table.from_arrays(made, names=[name for name, _ in chosen])


@pytest.mark.parametrize("kind", [pa.timestamp("us", "Nowhere/Else"), pa.timestamp("us"), pa.duration("s")])
@pytest.mark.parametrize("column", ["prompt", "when"])
def test_a_time_that_python_does_not_know_is_named_at_the_start(tmp_path: Path, kind: Any, column: str) -> None:
    path = tmp_path / "hostile.parquet"
    times = pa.array([None, None, (1 << 63) - 1], pa.int64()).view(kind)
    pq.write_table(pa.table({"prompt": ["x"] * 3} | {column: times}), path)
    with pytest.raises(
        DataError, match=r"hostile.parquet: row 2 \(.*no value in Python" if column == "when" else "row 0"
    ):
        source(str(path))


@EXTENT
def test_parquet(extent: int, tmp_path: Path) -> None:
    path = tmp_path / "hostile.parquet"

    @tries(150 * extent)
    @given(tables(), ORDERS, st.integers(0, 6), st.sampled_from([1, 2, 1000]))
    def check(table: pa.Table, order: Order, taken: int, group_size: int) -> None:
        try:
            pq.write_table(table, path, row_group_size=group_size)
        except pa.ArrowException:
            return  # what Parquet cannot hold
        drive(lambda: source(str(path), order, LIMIT), taken, "hostile.parquet")

    check()


@EXTENT
def test_data_sets_of_hugging_face(extent: int, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    number = iter(range(1 << 30))

    @tries(15 * extent)
    @given(tables(), ORDERS, st.integers(0, 6))
    def check(table: pa.Table, order: Order, taken: int) -> None:
        path = tmp_path / f"hostile{next(number)}"
        try:
            datasets.Dataset(pa.Table.from_batches(table.to_batches(), table.schema)).save_to_disk(str(path))  # type: ignore[arg-type]
        except Exception:  # what that library cannot hold
            return
        drive(lambda: source(f"{{name: hf, path: {path}}}", order, LIMIT), taken, path.name)

    check()


@EXTENT
def test_mixtures_and_curricula(extent: int, tmp_path: Path) -> None:
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "third.csv"]
    leaf = st.sampled_from([f"{path}" for path in paths])
    nested = st.recursive(
        leaf,
        lambda inner: (
            st.builds(
                lambda s, r, p: f"{{name: curriculum, source: {s}, revisit: {r}, pool: {p}}}",
                inner,
                st.sampled_from([0, 0.5, 0.99]),
                st.integers(1, 3),
            )
            | st.dictionaries(
                st.sampled_from(["a", "b", "1.5", "x-y", "ü"]),
                st.tuples(inner, st.sampled_from([1e-300, 0.1, 1, 1e9])),
                min_size=1,
                max_size=3,
            ).map(
                lambda d: (
                    "{name: mixture, sources: {"
                    + ", ".join(f"'{n}': {{weight: {w!r}, source: {s}}}" for n, (s, w) in d.items())
                    + "}}"
                )
            )
        ),
        max_leaves=4,
    )
    content = st.one_of(lines(tame, st.just(b"")), lines(tame, st.just(b"")), lines(row, st.binary(max_size=5)))

    @tries(100 * extent)
    @given(nested, content, content, ORDERS, st.integers(0, 12))
    def check(train: str, first: bytes, second: bytes, order: Order, taken: int) -> None:
        for path, held in zip(paths, (first, second, b"prompt\n2 + 3?\n"), strict=True):
            path.write_bytes(held)
        drive(lambda: source(train, order, LIMIT), taken, *(path.name for path in paths))

    check()
