"""What a person sees while a run trains: a live view on a terminal, a plain line a step anywhere else.

The view is drawn by the calls below and by nothing else: no thread, and no frame more often than `INTERVAL`. A view
that fails (a full disk, a closed pipe, a lost terminal) is switched off, for it must not end the run.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import mean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from treadle.runs.text import encodable, readable

log = logging.getLogger(__name__)

INTERVAL = 0.1  # seconds between two frames
LONGEST = 500  # characters of a prompt or a response; what the terminal has no room for is cut off

LABELS = {
    "reward/mean": "reward",
    "response/tokens": "tokens",
    "time/tokens_per_second": "tokens/s",
}
"""What metrics are called that are shown unless others are asked for."""


class Progress:
    """Progress of a run. Silent before `start`; usable as a context manager, which `stop`s it.

    ::

        with Progress() as progress:
            progress.start(total_steps=50, done=12)
            progress.stage("generate", 3, 48)
            progress.step(13, {"reward/mean": 0.4})
    """

    def __init__(self, console: Console | None = None, shown: Sequence[str] = tuple(LABELS)) -> None:
        """`shown`: metrics of a step."""
        self._shown = shown
        self._console = console if console is not None else _Console()
        self._live: Live | None = None
        self._total = self._done = 0
        self._drawn = 0.0
        self._seconds: deque[float] = deque(maxlen=8)  # that the latest steps took
        self._stages: dict[str, tuple[int, int]] = {}
        self._numbers = ""
        self._sample: tuple[str, str, float | None] | None = None

    # ------------------------------------------------------------------ what the recorder calls

    def start(self, total_steps: int, done: int) -> None:
        """Training begins, `done` of its steps behind it."""
        self._total, self._done = total_steps, done
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            live = Live(self._frame(), console=self._console, auto_refresh=False)
            with self._failing_quietly():
                live.start(refresh=True)
                self._live = live
        self.note(f"goes on after step {done} of {total_steps}" if done else f"begins: {total_steps} steps")

    def note(self, line: str) -> None:
        """A line that stays."""
        if self._total:
            self._print(line)

    def stage(self, name: str, done: int, total: int) -> None:
        """A stage (generate, update, publish, …) of the current step has come this far."""
        self._stages[name] = (done, total)
        self._draw(now=False)

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """A step is done."""
        self._done = step
        seconds = metrics.get("time/step")
        if isinstance(seconds, float):
            self._seconds.append(seconds)
        self._stages = {name: (0, total) for name, (_, total) in self._stages.items()}  # rows stay: nothing jumps
        shown = [(LABELS.get(name, name), metrics[name]) for name in self._shown if name in metrics]
        self._numbers = "   ".join(f"{label} {_number(value)}" for label, value in shown)
        if self._live is None and self._total:
            self._print(f"step {step}/{self._total}   {self._numbers}   {self._left()}".rstrip())
        self._draw(now=True)

    def sample(self, prompt: str, response: str, reward: float | None) -> None:
        """The latest sample, in words."""
        self._sample = (prompt, response, reward)
        self._draw(now=False)

    def evaluation(self, step: int, metrics: Mapping[str, object]) -> None:
        """A line that stays: what the evaluation after `step` found."""
        named = {name.removeprefix("evaluation/"): value for name, value in metrics.items()}
        shown = {name: value for name, value in named.items() if value or not name.endswith("_failed")}
        self.note(f"evaluation after step {step}   {'   '.join(f'{n} {_number(v)}' for n, v in shown.items())}")

    def stop(self) -> None:
        """Leave the last frame and give the terminal back. May be called twice."""
        with self._failing_quietly():
            live, self._live = self._live, None
            self._stages.clear()  # nothing is under way any more
            if live is not None:
                live.update(self._frame())
                live.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ drawing

    def _draw(self, now: bool) -> None:
        if self._live is not None and (now or time.monotonic() - self._drawn >= INTERVAL):
            with self._failing_quietly():
                self._live.update(self._frame(), refresh=True)
            self._drawn = time.monotonic()

    def _frame(self) -> RenderableType:
        bars = Table.grid(padding=(0, 1))
        bars.add_column(min_width=12)
        bars.add_row(
            Text("steps", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._done, width=40),
            Text(f"{self._done}/{self._total}  {self._left()}"),
        )
        for name, (done, total) in self._stages.items():
            bar = ProgressBar(total=max(total, 1), completed=done, width=40)
            bars.add_row(self._text(f"  {name}"), bar, Text(f"{done}/{total}"))
        lines: list[RenderableType] = [bars, self._text(self._numbers)]
        if self._sample is not None:
            prompt, response, reward = self._sample
            lines.append(self._text(f"prompt    {readable(prompt, LONGEST)}", style="dim"))
            lines.append(self._text(f"response  {readable(response, LONGEST)}"))
            lines.append(self._text(f"reward    {_number(reward)}"))
        return Group(*lines)

    def _text(self, line: str, style: str = "") -> Text:
        # A Text is shown as it is: square brackets in it are no markup.
        return Text(encodable(line, self._console.encoding), style=style, no_wrap=True, overflow="ellipsis")

    def _print(self, line: str) -> None:
        with self._failing_quietly():
            self._console.print(Text(encodable(line, self._console.encoding)), soft_wrap=True)

    @contextmanager
    def _failing_quietly(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("what is shown of the run cannot be written and is off from now on: %s", error)
            self._console.quiet = True
            self.stop()
            if self._console.file is sys.stdout:  # else what it still holds would fail again when Python ends
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())

    def _left(self) -> str:
        """Time left, by the latest steps."""
        if not self._seconds or self._done >= self._total:
            return ""
        seconds = mean(self._seconds) * (self._total - self._done)
        return f"{timedelta(seconds=round(seconds))} left"


class _Console(Console):
    """Without the habit of ending the process when a pipe is closed."""

    def on_broken_pipe(self) -> None:
        raise  # the `BrokenPipeError` that is being handled


def _number(value: object) -> str:
    if isinstance(value, float):
        return "–" if not math.isfinite(value) else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "–" if value is None else str(value)
