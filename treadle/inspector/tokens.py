"""One sample token by token: what `treadle inspect RUN --sample ID` prints."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.errors import ModelError, RunError
from treadle.inspector.samples import step_files
from treadle.inspector.screen import NOTHING, cell, line, number
from treadle.runs.directory import RunDirectory
from treadle.runs.samples import read_samples
from treadle.runs.text import encodable, readable
from treadle.types import Provenance

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARKS = ((0.3, "!!", "red"), (0.1, "! ", "yellow"), (0.0, "  ", "green"))
"""From which |difference| of log-probs, its mark and colour. At equal weights bfloat16 stays below the largest."""

PER_TOKEN = {
    "sampler": "sampling_logprobs",
    "trainer": "old_logprobs",
    "reference": "reference_logprobs",
    "value": "values",
    "return": "returns",
    "advantage": "advantages",
    "weight": "weights",
}
"""Number of a token and the column that holds it; those that nothing has filled are not shown."""

LEGEND = {
    "●": "the objective sees this token",
    "version": "of the weights that sampled it",
    "sampler": "its log-prob when it was sampled",
    "trainer": "at the weights that the step started with",
    "diff": "trainer - sampler; "
    + ", ".join(f"{mark.strip()} from {floor:g} nats" for floor, mark, _ in reversed(MARKS) if floor),
}


def show(
    path: Path, sample: str, step: int | None = None, as_json: bool = False, console: Console | None = None
) -> None:
    """Print every trajectory of a sample. Raises `RunError` where there is no such run or sample."""
    console = console if console is not None else Console()
    run = RunDirectory.existing(path)
    at, rows = _find(run, sample, step)
    tokenizer, reason = _tokenizer(run)
    for row in rows:
        tokens = _tokens(row, tokenizer)
        if as_json:
            whole = {name: row[name] for name in ("sample", "trajectory", "prompt", "state", "why", "ended", "reward")}
            console.file.write(json.dumps({"step": at, **whole, "tokens": tokens}) + "\n")
            continue
        _head(console, at, row, tokens)
        if tokens:
            console.print(_table(console, tokens))
            _foot(console, tokens)
    if reason is not None and not as_json:
        line(console, f"Texts of tokens are not shown: {reason}", "yellow")


# ---------------------------------------------------------------------- reading


def _find(run: RunDirectory, sample: str, step: int | None) -> tuple[int, list[dict[str, Any]]]:
    """The step of a sample, and its trajectories."""
    for evaluation in (False, True):
        files = run.samples_files("evaluation" if evaluation else "step")
        for at in (step,) if step in files else sorted(files) if step is None else ():
            if any(row["sample"] == sample for row in read_samples(files[at], ["sample"])):
                return at, [row for row in read_samples(files[at]) if row["sample"] == sample]
    if step is not None:
        step_files(run, step, evaluation=False)  # names the steps there are
    where = f"step {step}" if step is not None else "any step or evaluation"
    raise RunError(f"{run.path}: no sample {sample!r:.80} in {where}; `treadle inspect {run.path}` shows ids, as 12.3")


def _tokens(row: dict[str, Any], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """What is recorded of each token; empty for a sample that failed before it had any."""
    ids = row["token_ids"] or []
    texts = _texts(tokenizer, ids) if tokenizer is not None else [None] * len(ids)
    trained = row["trained"] or [False] * len(ids)
    numbers = {name: row[column] for name, column in PER_TOKEN.items() if row.get(column) is not None}
    tokens: list[dict[str, Any]] = []
    for at, token_id in enumerate(ids):
        found = {name: _finite(values[at]) for name, values in numbers.items()}
        token = {
            "text": texts[at],
            "id": token_id,
            "from": Provenance(row["provenance"][at]).name.lower(),
            "trained": trained[at],
            "version": row["versions"][at] if row["versions"][at] >= 0 else None,
            **found,
        }
        sampler, trainer = found.get("sampler"), found.get("trainer")
        if sampler is not None and trainer is not None:
            token["diff"] = trainer - sampler
        tokens.append(token)
    return tokens


def _tokenizer(run: RunDirectory) -> tuple[Tokenizer | None, str | None]:
    """That of the run's model, or why there is none."""
    from tokenizers import Tokenizer

    model = run.settings().get("model")
    for folder in (run.model, Path(str(model))):
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_file(str(folder / "tokenizer.json")), None
    from treadle.engines.torch.model import load_tokenizer

    try:
        return load_tokenizer(str(model)).backend_tokenizer, None
    except ModelError as error:
        return None, str(error)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---------------------------------------------------------------------- texts of tokens


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token by itself, on one line; bytes of a character that is cut in two as `\\xe2`."""
    whole = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
    decoder = tokenizer.decoder
    in_bytes = decoder is not None and decoder.decode(["Ġ"]) == " "
    texts = []
    for id_ in ids:
        piece = tokenizer.id_to_token(id_)
        if piece is None:
            texts.append("(no text)")
        elif id_ in whole:
            texts.append(_escaped(piece))
        elif in_bytes and all(c in _byte_of() for c in piece):
            raw = bytes(_byte_of()[c] for c in piece)
            texts.append(_escaped(raw.decode("utf-8", "backslashreplace")))
        else:
            texts.append(_escaped(piece.replace("▁", " ")))
    return texts


@cache
def _byte_of() -> dict[str, int]:
    """Byte-level vocabularies spell each byte as one printable character: Latin-1 where that is printable, and from
    U+0100 on for the others, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _escaped(text: str) -> str:
    """With what is not printable as Python spells it: nothing here can be obeyed by a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# ---------------------------------------------------------------------- printing


def _head(console: Console, step: int, row: dict[str, Any], tokens: Sequence[dict[str, Any]]) -> None:
    name = row["sample"] if not row["trajectory"] else f"{row['sample']}, trajectory {row['trajectory']}"
    state = f"{row['state']} ({row['why']})" if row["why"] else row["state"]
    rewards = {"reward": row["reward"], **(row["reward_parts"] or {})}
    earned = ", ".join(f"{part} {number(value)}" for part, value in rewards.items())
    sampled = sum(token["from"] == "sampled" for token in tokens)
    line(console, readable(f"{name} · step {step} · prompt {row['prompt']}"), "bold")
    line(console, readable(f"{state} · {earned} · {sampled} sampled tokens, {row['ended'] or 'none'}"), "cyan")
    line(console, f"{readable(row['response'] or '')}\n")


def _table(console: Console, tokens: Sequence[dict[str, Any]]) -> Table:
    names = [name for name in ("sampler", "trainer", "diff", *list(PER_TOKEN)[2:]) if any(name in t for t in tokens)]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("token", no_wrap=True, max_width=24)
    for heading in ("id", "from", " ", "version", *names, " "):
        table.add_column(heading, justify="left" if heading in ("from", " ") else "right", no_wrap=True)
    for at, token in enumerate(tokens):
        style = "" if token["from"] == "sampled" else "dim"
        _, mark, colour = _mark(token.get("diff"))
        cells = [
            cell(console, at, "dim"),
            Text(encodable(_spaced(token["text"]), console.encoding), style),
            cell(console, token["id"], "dim"),
            cell(console, token["from"], style),
            Text(encodable("●" if token["trained"] else " ", console.encoding)),
            cell(console, token["version"]),
            *(cell(console, _round(token.get(name)), colour if name == "diff" else "") for name in names),
            Text(mark, colour),
        ]
        table.add_row(*cells)
    return table


def _foot(console: Console, tokens: Sequence[dict[str, Any]]) -> None:
    """The largest difference, and what the columns say."""
    gaps = [(abs(token["diff"]), at) for at, token in enumerate(tokens) if "diff" in token]
    line(console, "")
    if gaps:
        largest, at = max(gaps)
        mean = sum(gap for gap, _ in gaps) / len(gaps)
        line(console, f"|diff| is {number(mean)} on average, at most {number(largest)}, at token {at}\n")
    for name, text in LEGEND.items():
        if name in ("●", "version") or any(name in token for token in tokens):
            line(console, f"{name:<9}{text}", "dim")


def _mark(difference: float | None) -> tuple[float, str, str]:
    if difference is None:
        return 0.0, "  ", ""
    return next(mark for mark in MARKS if abs(difference) >= mark[0])


def _spaced(text: str | None) -> str:
    """Spaces at either end, that they are seen."""
    if text is None:
        return NOTHING
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    return "␣" * left + inner + "␣" * (len(text) - left - len(inner))


def _round(value: float | None) -> float | str | None:
    """Four places are enough for log-probs; what is smaller keeps its size."""
    return f"{value:.4f}" if value is not None and (abs(value) >= 1e-3 or value == 0) else value
