"""What `treadle check` prints."""

from __future__ import annotations

from collections.abc import Sequence

import click

from treadle.algorithms.base import Algorithm
from treadle.contract.check import verdicts


def report(algorithm: Algorithm, examples: int, without: Sequence[str] = ()) -> bool:
    """A line for each law as it is tried, and what broke it. True if none is broken."""
    broken = silent = kept = 0
    for verdict in verdicts(algorithm, examples, without):
        name = f"{verdict.law.name:<13}"
        if not verdict.applies:
            silent += 1
            click.echo(click.style(f"  –  {name} {verdict.law.says} (not tried: {verdict.law.unless})", dim=True))
        elif verdict.broken is None:
            kept += 1
            click.echo(click.style("  ok ", fg="green") + f"{name} {verdict.law.says}")
        else:
            broken += 1
            click.echo(click.style("  ✗  ", fg="red", bold=True) + f"{name} {verdict.law.says}")
            click.echo("\n".join(f"       {line}" for line in verdict.broken.splitlines()))
    summary = f"{type(algorithm).__qualname__}: {kept} laws hold, {silent} were not tried"
    click.echo(f"{summary}, {broken} broken" if broken else summary)
    return not broken
