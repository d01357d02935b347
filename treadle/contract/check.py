"""`treadle check my_module:MyAlgorithm`: the laws of `laws.py`, with a least example of each broken."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from treadle.algorithms.base import Algorithm
from treadle.contract import keys, laws
from treadle.contract.laws import Law
from treadle.contract.running import Broken
from treadle.errors import ConfigError, TrainingError

EXAMPLES = 60
LAWS = (*laws.LAWS, *keys.LAWS)


@dataclass(frozen=True, slots=True)
class Verdict:
    law: Law
    broken: str | None = None  # what was seen, and the least case in which it was
    applies: bool = True


def verdicts(algorithm: Algorithm, examples: int = EXAMPLES, without: Sequence[str] = ()) -> Iterator[Verdict]:
    """The laws one by one, but those named in `without`. Raises ConfigError for a name that is no law's."""
    if unknown := sorted({*without} - {law.name for law in LAWS}):
        raise ConfigError(f"there is no law {unknown[0]!r}; there are {', '.join(law.name for law in LAWS)}")
    for law in LAWS:
        if law.name in without:
            continue
        if law.applies(algorithm):
            with _one_thread():
                broken = _broken(law, algorithm, examples)
            yield Verdict(law, broken)
        else:
            yield Verdict(law, applies=False)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For tensors of a few numbers, where threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check(algorithm: Algorithm, examples: int = EXAMPLES, without: Sequence[str] = ()) -> None:
    """Raises `TrainingError` that names every law which this algorithm breaks, with its least example."""
    broken = [v for v in verdicts(algorithm, examples, without) if v.broken is not None]
    if broken:
        lines = [f"{type(algorithm).__qualname__} breaks {len(broken)} of the laws of an algorithm:"]
        raise TrainingError("\n".join([*lines, *(f"{v.law.name}: {v.law.says}\n  {v.broken}" for v in broken)]))


def _broken(law: Law, algorithm: Algorithm, examples: int) -> str | None:
    """The least example that breaks a law, or None. The same every time."""

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
    )
    @given(st.data())
    def tried(data: st.DataObject) -> None:
        law.holds(algorithm, data)

    try:
        tried()
    except Broken as broken:
        return str(broken)
    except Exception as error:
        return _raised(error)
    return None


def _raised(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if "/torch/" not in f.filename), frames[-1])
    drawn = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()) if note.startswith("Draw"))
    return f"{type(error).__name__}: {error}\n  at {place.filename}:{place.lineno}: {place.line}{drawn}"
