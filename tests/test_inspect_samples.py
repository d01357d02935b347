"""`treadle inspect RUN --where … --sort … --sample …`: recorded trajectories chosen, in a table, token by token."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.run_writer import batch_of, group, prompt, trajectory
from tests.runs import ROOT, finish
from treadle.errors import ConfigError, RunError, TreadleError
from treadle.inspector import samples, tokens
from treadle.inspector.fields import FIELDS
from treadle.inspector.query import Condition, Query, read
from treadle.runs.directory import RunDirectory
from treadle.runs.ledger import State
from treadle.runs.metrics import JsonLines
from treadle.runs.samples import Ending, append_samples, read_samples, write_samples
from treadle.types import Group, Kind, Provenance, Reward, Sample

HOSTILE = "[/red][link=x] \x1b]0;owned\x07\u202e"


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    """Three steps of a trained group of three and a filtered one; rewards 0, 1, 0 and 1, 0, 1."""
    path = tmp_path / "run"
    RunDirectory.open(path, "model: nowhere\n").close()
    shutil.copytree(tiny_model, path / "model")
    rows = JsonLines(path / "metrics.jsonl")
    for step in (1, 2, 3):
        trained, filtered = group(step), group(10 * step, failed=(1,))
        write_samples(file(path, step), [Ending(trained, State.TRAINED)], batch_of([trained]))
        append_samples(file(path, step), [Ending(filtered, State.FILTERED, "rewards are equal")])
        rows.append(step, {"staleness/max": 2})
    rows.close()
    judged = Group(7, prompt(7), (Sample("evaluation/3/greedy/7.0", Kind.EVALUATION, (trajectory(7),)),))
    write_samples(
        RunDirectory(path).samples_file("evaluation", 3), [Ending(judged, State.EVALUATED, evaluation="greedy")]
    )
    return path


def file(path: Path, step: int) -> Path:
    return RunDirectory(path).samples_file("step", step)


def table(path: Path, width: int = 160, **asked: Any) -> str:
    out = StringIO()
    samples.show(path, console=Console(file=out, width=width, force_terminal=False), **asked)
    return out.getvalue()


def rows(path: Path, *where: str, sort: str | None = None, **asked: Any) -> list[dict[str, Any]]:
    out = StringIO()
    samples.show(path, where, sort, as_json=True, console=Console(file=out), **asked)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def ids(path: Path, *where: str, sort: str | None = None, **asked: Any) -> list[str]:
    return [row["sample"] for row in rows(path, *where, sort=sort, **asked)]


# ---------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["reward < 0.5", "state = trained"], ["1.1", "2.0", "2.2", "3.1"]),
        (["reward >= 1", "step = 2", "state != filtered"], ["2.1", "20.1"]),
        (["tokens > 3"], ["1.2", "2.1", "3.0", "10.1", "30.1"]),
        (["tokens==4", "state = failed"], ["10.1", "30.1"]),
        (["state = failed"], ["10.1", "20.1", "30.1"]),
        (["why ~ judge"], ["10.1", "20.1", "30.1"]),
        (["why != null", "step > 2"], ["30.0", "30.1", "30.2"]),
        (["why = null", "step <= 1"], ["1.0", "1.1", "1.2"]),
        (["advantage = null", "step = 1"], ["10.0", "10.1", "10.2"]),
        (["response = 'answer 3.2'"], ["3.2"]),
        (['response ~ "r 3."'], ["3.0", "3.1", "3.2"]),
        (["prompt = data:1", "state = trained"], ["1.0", "1.1", "1.2"]),
        (["reward.right = 0.5", "group = 3"], ["3.0", "3.1", "3.2"]),
        (["reward.wrong = 0.5"], []),
        (["reward.wrong = null", "group = 3"], ["3.0", "3.1", "3.2"]),
        (["ended = truncated", "group < 10"], ["1.2", "2.1", "3.0"]),
        (["discrepancy > 0.49", "discrepancy.max < 0.51", "step = 3"], ["3.0", "3.1", "3.2"]),
        (["question ~ question 2", "kind = train", "group = 2"], ["2.0", "2.1", "2.2"]),
        (["answer = 3"], ["3.0", "3.1", "3.2"]),
        (["length < 4", "group = 3"], ["3.1"]),
        (["step > 99"], []),
    ],
)
def test_conditions(run: Path, where: Sequence[str], expected: list[str]) -> None:
    assert sorted(ids(run, *where)) == sorted(expected)


def test_staleness_is_against_the_weights_that_the_step_started_with(run: Path) -> None:
    found = {row["sample"]: (row["version"], row["staleness"]) for row in rows(run, "step = 3")}
    assert found["3.0"] == (1, 2)  # the oldest token of the step is 2 versions behind, as its row of metrics says
    assert found["30.0"] == (15, None)  # never trained
    metrics = RunDirectory(run).metrics
    metrics.unlink()
    assert {row["staleness"] for row in rows(run)} == {None}


def test_order(run: Path) -> None:
    where = ["state = trained", "step < 3"]
    assert ids(run, *where, sort="-reward,sample") == ["1.0", "1.2", "2.1", "1.1", "2.0", "2.2"]
    assert ids(run, *where, sort="reward,-tokens")[:3] == ["1.1", "2.0", "2.2"]
    assert ids(run, "step = 1", sort="advantage")[3:] == ["10.0", "10.1", "10.2"]  # null comes last
    assert ids(run, "step = 1", sort="-advantage")[3:] == ["10.0", "10.1", "10.2"]
    assert ids(run, sort="step")[:3] == ["1.0", "1.1", "1.2"]
    assert ids(run, sort="-step", limit=2) == ["3.0", "3.1"]


def test_steps_prompts_evaluations_and_limits(run: Path) -> None:
    assert len(ids(run)) == 18
    assert ids(run, step=2)[:3] == ["2.0", "2.1", "2.2"]
    assert ids(run, prompt="data:3") == ["3.0", "3.1", "3.2"]
    assert ids(run, evaluation=True) == ["evaluation/3/greedy/7.0"]
    assert rows(run, "evaluation = greedy", evaluation=True)[0]["state"] == "evaluated"
    assert ids(run, limit=0) == []
    with pytest.raises(RunError, match=r"no samples of step 70\. Recorded steps: 1 to 3"):
        table(run, step=70)
    with pytest.raises(RunError, match="is not a run"):
        table(run.parent)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("rewrd < 1", "did you mean reward?"),
        ("reward", "not a condition; write one comparison"),
        ("", "not a condition"),
        ("reward <", "'' is none"),
        ("reward < a lot", "reward is a number, 'a lot' is none"),
        ("reward ~ 1", "reward is a number; compare it by"),
        ("state > 1", "state is text; compare it by = == != ~"),
        ("reward < 1 and tokens > 2", "'1 and tokens > 2' is none"),
        ("__import__('os') = 1", "there is no field"),
        ("reward. = 1", "there is no field"),
        (HOSTILE, "there is no field"),
    ],
)
def test_a_bad_condition_is_named(run: Path, where: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        table(run, where=[where])
    assert said in str(error.value)
    assert "--where" in str(error.value)
    assert "\x1b" not in str(error.value)


def test_bad_fields_are_named(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"--sort 'reward,-tokns': there is no field 'tokns'; did you mean tokens\?"):
        table(run, sort="reward,-tokns")
    with pytest.raises(ConfigError, match="--columns 'x,': there is no field 'x'; there are step, sample, "):
        table(run, columns="x,")


@given(st.text(max_size=30), st.sampled_from(["<", "=", "~", ">=", "!="]), st.text(max_size=30))
def test_any_condition_is_understood_or_refused_by_name(name: str, comparison: str, value: str) -> None:
    for field in (name, "reward", "response", "reward.x"):
        try:
            condition = Condition.parse(f"{field} {comparison} {value}")
        except TreadleError:
            continue
        for found in (None, "text", 0.5) if condition.value is None else (None, type(condition.value)("1")):
            assert condition.fits(found) in (True, False)


def test_no_column_is_read_that_nobody_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.inspector import query

    read_columns: list[list[str]] = []
    original = query.read_table

    def watched(path: Path, columns: list[str]) -> Any:
        read_columns.append(columns)
        return original(path, columns)

    monkeypatch.setattr(query, "read_table", watched)
    query = Query.parse(["reward < 1", "step = 2"], "-reward")
    found = query.select(RunDirectory(run).samples_files("step"))
    assert read_columns == [["reward"]]  # of one file: the other steps' are not opened
    assert {row["sample"] for row in read(found, ["sample", "response"])} == {"20.0", "20.2", "2.0", "2.2"}
    assert read_columns[1:] == [["sample", "response"]]


# ---------------------------------------------------------------------- the table and JSON


def test_the_table_fits_the_terminal(run: Path) -> None:
    text = table(run, width=80, where=["state = trained"], sort="-reward")
    head, names, *body = text.splitlines()
    assert head.endswith("9 of 9 trajectories that fit")
    assert names.split() == ["step", "sample", "prompt", "state", "reward", "tokens", "ended", "advantage", "response"]
    assert len(body) == 9
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert table(run, columns="sample,reward.right", limit=1).splitlines()[1].split() == ["sample", "reward.right"]
    assert len(table(run, columns=",".join(FIELDS), limit=1, width=40).splitlines()) == 3  # too narrow, still a row


def test_untrusted_text_is_shown_and_never_obeyed(run: Path) -> None:
    bad = replace(trajectory(0, 0, HOSTILE), prompt=replace(prompt(0), id=HOSTILE, answer=HOSTILE))
    bad = replace(bad, messages=({"role": "user", "content": HOSTILE},), reward=Reward(1.0, {HOSTILE: 1.0}))
    bad_group = Group(0, bad.prompt, (Sample("0.0", Kind.TRAIN, (bad,)),))
    write_samples(file(run, 4), [Ending(bad_group, State.FILTERED, HOSTILE)])
    everything = table(run, step=4, columns=",".join(FIELDS), width=600)
    assert everything.count("[/red][link=x] �]0;owned��") == 4
    whole = everything + token_table(run, "0.0", width=600)
    assert not set(whole) & set("\x1b\x07\u202e")
    assert "[/red]" in token_table(run, "0.0")
    (row,) = rows(run, step=4)
    assert row["question"] == HOSTILE
    assert row[f"reward.{HOSTILE}"] == 1.0


def test_a_terminal_that_knows_only_ascii(run: Path) -> None:
    out = Console(file=(raw := open(run / "out", "w", encoding="ascii")), width=100)  # noqa: SIM115
    samples.show(run, console=out)
    tokens.show(run, "3.0", console=out)
    raw.close()
    assert "trained" in (run / "out").read_text("ascii")


def test_json_has_every_field_and_numbers_that_json_has(run: Path) -> None:
    row = rows(run, "group = 3")[0]
    assert list(row) == [*FIELDS, "reward.right"]
    assert (row["step"], row["reward"], row["reward.right"], row["tokens"]) == (3, 1.0, 0.5, 4)
    assert row["discrepancy"] == pytest.approx(0.5)
    assert row["logprob"] == pytest.approx(-4 / 7)
    assert list(rows(run, columns="sample,reward")[0]) == ["sample", "reward"]


# ---------------------------------------------------------------------- token by token


def token_table(path: Path, sample: str, width: int = 120, color: bool = False, **asked: Any) -> str:
    out = StringIO()
    system = "truecolor" if color else None
    tokens.show(
        path, sample, console=Console(file=out, width=width, force_terminal=color, color_system=system), **asked
    )
    return out.getvalue()


def test_each_token_with_all_that_is_recorded_of_it(run: Path) -> None:
    lines = token_table(run, "3.2").splitlines()
    assert lines[0] == "3.2 · step 3 · prompt data:3"
    assert lines[1] == "trained · reward 1, right 0.5 · 2 sampled tokens, terminated"
    assert lines[2] == "answer 3.2"
    assert lines[4].split() == ["#", "token", "id", "from", "version", "sampler", "trainer", "diff", "advantage"]
    assert lines[5].split()[:5] == ["0", "&", "5", "prompt", "–"]
    assert lines[7].split() == ["2", "+", "10", "sampled", "●", "1", "-0.5714", "-1.0714", "-0.5000", "1.0000", "!!"]
    assert "|diff| is 0.5 on average, at most 0.5, at token" in "\n".join(lines)
    assert "!! from 0.3 nats" in "\n".join(lines)
    assert "\x1b" not in "\n".join(lines)


def test_differences_have_colours_and_marks(run: Path) -> None:
    trained = group(4)
    batch = batch_of([trained])
    assert batch.old_logprob_T is not None
    gap_T = torch.linspace(0, 0.35, len(batch.token_T))
    write_samples(
        file(run, 4),
        [Ending(trained, State.TRAINED)],
        batch.replace(old_logprob_T=batch.sampling_logprob_T + gap_T),
    )
    text = token_table(run, "4.2", color=True)
    assert "\x1b[31m" in text  # red, and a mark for those who see no colours
    assert "!!" in text
    first = token_table(run, "4.0", color=True)
    assert "\x1b[32m" in first
    assert "\x1b[31m" not in first.split("|diff|")[0]


def test_a_sample_that_was_not_trained_or_has_no_tokens(run: Path) -> None:
    text = token_table(run, "10.0")
    assert "filtered (rewards are equal)" in text
    assert "trainer" not in text
    assert "●" not in text.split("\n●")[0]
    shutil.rmtree(run / "model")
    alone = token_table(run, "10.0")
    assert "Texts of tokens are not shown: " in alone
    assert "sampled" in alone
    nothing = Group(8, prompt(8), (Sample("8.0", Kind.TRAIN, (), failure="the engine fell over"),))
    append_samples(file(run, 3), [Ending(nothing, State.FILTERED)])
    assert "failed (the engine fell over) · reward – · 0 sampled tokens, none" in token_table(run, "8.0")
    assert "evaluated" in token_table(run, "evaluation/3/greedy/7.0")
    for step in (None, 2):
        with pytest.raises(RunError, match=r"no sample '99\.9' in "):
            token_table(run, "99.9", step=step)
    with pytest.raises(RunError, match="no samples of step 70"):
        token_table(run, "3.0", step=70)


def test_trajectories_of_one_sample_come_one_after_another(run: Path) -> None:
    several = Group(9, prompt(9), (Sample("9.0", Kind.TRAIN, (trajectory(9, 0), trajectory(9, 1))),))
    write_samples(file(run, 4), [Ending(several, State.TRAINED)], batch_of([several]))
    text = token_table(run, "9.0")
    assert "9.0 · step 4" in text
    assert "9.0, trajectory 1 · step 4" in text
    assert len(token_table(run, "9.0", as_json=True).splitlines()) == 2


def test_tokens_as_json(run: Path) -> None:
    row = json.loads(token_table(run, "3.2", as_json=True))
    assert (row["step"], row["sample"], row["reward"]) == (3, "3.2", 1.0)
    first, *_, last = row["tokens"]
    assert (first["from"], first["trained"], first["sampler"], first["version"]) == ("prompt", False, None, None)
    assert last["diff"] == pytest.approx(-0.5)
    assert "advantage" in last
    assert "reference" not in last


def test_halves_of_characters_and_invisible_ones_can_be_read(run: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(run / "model" / "tokenizer.json"))
    ids = tokenizer.encode(" é\n\x1b").ids
    written = replace(
        trajectory(0),
        token_T=np.array([*ids, 256, 10**6]),
        provenance_T=np.array([Provenance.PROMPT] * (len(ids) + 2), np.uint8),
        logprob_T=np.full(len(ids) + 2, np.nan, np.float32),
        version_T=np.full(len(ids) + 2, -1, np.int32),
        turn_ends=(),
    )
    sample = Sample("0.0", Kind.TRAIN, (written,))
    write_samples(file(run, 4), [Ending(Group(0, prompt(0), (sample,)), State.FILTERED)])
    shown = [line.split()[1] for line in token_table(run, "0.0").splitlines()[5 : 5 + len(ids) + 2]]
    special = tokenizer.id_to_token(256)
    assert shown == ["␣", r"\xc3", r"\xa9", r"\n", r"\x1b", special, "(no"]


def test_the_bytes_of_byte_level_tokens_are_those_of_the_tokenizer() -> None:
    from tokenizers import pre_tokenizers

    table = tokens._byte_of()
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(table.values()) == list(range(256))
    for text in ("é", " €\t\n", "Ā\x00\x7f\xad"):
        ((pieces, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert bytes(table[c] for c in pieces).decode() == text


# ---------------------------------------------------------------------- on the command line


def test_commands(run: Path) -> None:
    code, out, err = finish("inspect", run, "--where", "reward < 0.5", "--sort", "-tokens", "--limit", "2")
    assert (code, err) == (0, "")
    assert "2 of 10 trajectories that fit" in out
    code, out, err = finish("inspect", run, "--sample", "3.2", "--json")
    assert json.loads(out)["sample"] == "3.2"
    code, out, err = finish("inspect", run, "--where", "rewrd < 1")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: --where 'rewrd < 1': there is no field 'rewrd'; did you mean reward\?\n", err)


@pytest.mark.parametrize("command", [["inspect", "{run}"], ["inspect", "{run}", "--json"], ["explain"], ["--help"]])
def test_output_that_cannot_be_written_ends_with_a_message_and_not_a_traceback(run: Path, command: list[str]) -> None:
    arguments = [sys.executable, "-m", "treadle", *(a.format(run=run) for a in command)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(arguments, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(arguments, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_inspect_reads_is_what_read_samples_gives(run: Path) -> None:
    for row, found in zip(read_samples(file(run, 2)), rows(run, step=2), strict=True):
        assert (row["sample"], row["reward"], row["response"]) == (found["sample"], found["reward"], found["response"])
        assert found["tokens"] == sum(p == Provenance.SAMPLED for p in row["provenance"])
        assert found["length"] == len(row["token_ids"])
