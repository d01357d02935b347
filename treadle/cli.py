"""The command line: `treadle train · eval · inspect · diff · check · explain · schema`.

Exit codes: 0 done · 1 a named error · 2 the configuration is wrong, nothing was loaded · 130 interrupted.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from treadle.errors import ConfigError, TreadleError

_ERROR = click.style("error: ", fg="red", bold=True)


class _Group(click.Group):
    """Shows our errors as their message and keeps tracebacks for what is not ours."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.filename is not None or not _lost_output():
                raise
            click.echo(f"{_ERROR}standard output cannot be written: {error.strerror}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> object:
        sys.path.insert(0, "")  # `my_module:Class` and `my_module:fn` are looked for in the current directory
        try:
            return super().invoke(ctx)
        except TreadleError as error:
            _complain(error)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted; the same command goes on from the last checkpoint", err=True)
            ctx.exit(130)


def _lost_output() -> bool:
    """Whether standard output takes no more; if so, what is left in it is let go, and the interpreter ends in peace."""
    try:
        click.echo()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _complain(error: TreadleError) -> None:
    click.echo(_ERROR + str(error), err=True)
    for note in getattr(error, "__notes__", ()):
        click.echo(f"  {note}", err=True)


@contextmanager
def _without_collection() -> Iterator[None]:
    """What only looks at models makes no garbage; looking for some takes a tenth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="treadle")
def main() -> None:
    """Reinforcement-learning post-training of language models."""


@main.command("train")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def train_command(config: Path, overrides: tuple[str, ...]) -> None:
    """Train as CONFIG says.

    `treadle train examples/smoke.yaml steps=10 algorithm.group_size=4`. The same command again goes on from the last
    checkpoint of its run directory.
    """
    from treadle.recipes.config import load_config

    resolved = load_config(config, overrides)  # before anything heavy is imported
    from treadle.inspector.terminal import conclude
    from treadle.runtime import train

    train(resolved)
    conclude(Path(resolved.run.dir))


@main.command("eval")
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--config", type=click.Path(path_type=Path), help="configuration under which a bare model is evaluated")
def eval_command(target: Path, overrides: tuple[str, ...], config: Path | None) -> None:
    """Evaluate TARGET, a run directory or (with --config) a model, on the held-out prompts."""
    from treadle.inspector.terminal import show_numbers
    from treadle.runtime import evaluate

    show_numbers(evaluate(target, config=config, overrides=overrides))


@main.command("inspect")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="one step instead of all (alone: the step whose samples are shown)")
@click.option("--evaluation", is_flag=True, help="held-out answers instead, those after --step")
@click.option("--limit", type=click.IntRange(min=0), help="samples shown  [default: 8; of a table 20; of --json all]")
@click.option("--where", multiple=True, metavar="CONDITION", help="only samples that fit; may be given several times")
@click.option("--sort", metavar="FIELD,…", help="in this order; -FIELD: largest first")
@click.option("--columns", metavar="FIELD,…", help="fields shown")
@click.option("--prompt", metavar="ID", help="only answers to this prompt")
@click.option("--sample", metavar="ID", help="one sample, token by token")
@click.option("--json", "as_json", is_flag=True, help="samples as JSON lines")
def inspect_command(
    run: Path,
    step: int | None,
    evaluation: bool,
    limit: int | None,
    where: tuple[str, ...],
    sort: str | None,
    columns: str | None,
    prompt: str | None,
    sample: str | None,
    as_json: bool,
) -> None:
    """Show metrics, ledger and samples of RUN, running or not; or a table of the samples of all its steps.

    \b
    treadle inspect RUN
    treadle inspect RUN --where 'reward < 0.5' --where 'tokens > 20' --sort -tokens
    treadle inspect RUN --prompt train.jsonl:17 --columns step,reward,response
    treadle inspect RUN --sample 12.3
    """
    if sample is not None:
        from treadle.inspector.tokens import show as show_sample

        show_sample(run, sample, step, as_json)
    elif where or sort or columns or prompt is not None or as_json:
        from treadle.inspector.samples import show as show_table

        show_table(run, where, sort, columns, prompt, step, evaluation, limit, as_json)
    else:
        from treadle.inspector.terminal import show

        show(run, step=step, limit=8 if limit is None else limit, evaluation=evaluation)


@main.command("diff")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@click.option("--last", type=click.IntRange(min=1), default=10, show_default=True, help="steps that means are over")
def diff_command(run: Path, other: Path, last: int) -> None:
    """Compare two runs: configuration, code and machine, evaluations, metrics."""
    from treadle.inspector.diff import show

    show(run, other, last=last)


@main.command("check")
@click.argument("algorithm")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--examples", type=click.IntRange(min=1), default=60, show_default=True, help="cases tried for each law")
@click.option("--without", multiple=True, metavar="LAW", help="a law that it is not meant to keep; several times")
def check_command(algorithm: str, overrides: tuple[str, ...], examples: int, without: tuple[str, ...]) -> None:
    """Check that ALGORITHM keeps the laws of an algorithm.

    `treadle check my_module:MyAlgorithm clip_high=0.3`, or a name of ours, as `gspo+rloo`. A law that is broken is
    shown with the smallest example of it that was found.
    """
    from treadle.contract.target import algorithm_of

    chosen = algorithm_of(algorithm, overrides)
    try:
        from treadle.contract.report import report
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, and `treadle check` needs it: pip install 'treadle[check]'"
        ) from error

    if not report(chosen, examples, without):
        sys.exit(1)


@main.command("explain")
@click.argument("key", required=False)
def explain_command(key: str | None) -> None:
    """Say what KEY of a configuration means, what is allowed, its default and where it is read; without KEY: all keys.

    `treadle explain algorithm.clip_low`, `treadle explain trainer`, `treadle explain data.train.path`.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    with _without_collection():
        from treadle.config.explain import explain, overview
        from treadle.recipes.config import RLConfig

        text = explain(RLConfig, key, width) if key is not None else overview(RLConfig, width)
    click.echo(text)


@main.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a configuration, with which an editor completes, explains and checks it.

    `treadle schema > treadle.schema.json`, then as the first line of a configuration:
    `# yaml-language-server: $schema=treadle.schema.json`.
    """
    with _without_collection():
        from treadle.config.schema import schema
        from treadle.recipes.config import RLConfig

        text = json.dumps(schema(RLConfig), indent=2, ensure_ascii=False)
    click.echo(text)
