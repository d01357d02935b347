"""What all views of a run in the terminal share. Text that a model or a data file wrote is shown, never obeyed."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from treadle.runs.directory import RunDirectory
from treadle.runs.text import encodable, readable

NOTHING = "–"


def line(console: Console, text: str, style: str = "") -> None:
    """One line, as long as it is: a terminal wraps it, a pipe gets it whole."""
    # A Text is shown as it is: square brackets in it are no markup.
    console.print(Text(encodable(text, console.encoding), style=style), soft_wrap=True)


def cell(console: Console, value: object, style: str = "") -> Text:
    """A value in a table."""
    return Text(encodable(number(value), console.encoding), style=style)


def number(value: object) -> str:
    """A number in at most 9 characters; what is none, readable."""
    if value is None or value != value:
        return NOTHING
    if not isinstance(value, float):
        return readable(str(value), 80)
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.0f}" if size >= 1e4 else f"{value:.4g}"


def status(run: RunDirectory) -> str:
    """Whether a run is running, finished, or can go on."""
    if holder := run.holder():
        return f"running ({holder})"
    return "finished" if run.finished else "stopped before its end (the same command goes on with it)"
