"""Makes docs/algorithms.md of the algorithms' docstrings, declarations and keys: `python docs/algorithms_page.py`.

Formulas, papers and texts are those of each file's docstring, so the page has one source. Only what an algorithm is
for, in a few words, stands here.
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from treadle.algorithms.base import Algorithm
from treadle.algorithms.policy_gradient import PolicyGradientConfig
from treadle.config import Config, config_class, load, plain, plugin_class
from treadle.config.plugins import Plugin
from treadle.config.yaml_text import to_line
from treadle.errors import ConfigError
from treadle.types import Prompt

PAGE = Path(__file__).parent / "algorithms.md"
LEARNED = Path(__file__).parent / "data" / "learning.json"
FOLDER = "treadle.algorithms"
OURS = Plugin(FOLDER, "grpo")

FOR = {
    "grpo": "the usual start: several answers a prompt, no critic",
    "dapo": "long reasoning: no entropy collapse, nothing spent on prompts that say nothing",
    "ppo": "one answer a prompt, rewards by turn or token, several updates a batch",
    "clip": "the usual objective: several updates a batch",
    "cispo": "long reasoning, where clipped tokens are the decisive ones; stale data",
    "clip_cov": "entropy that falls too fast",
    "kl_cov": "entropy that falls too fast, several updates a batch",
    "gspo": "mixtures of experts and long answers, where ratios of tokens are noise",
    "gmpo": "wide bounds without outliers; long answers",
    "dppo": "large vocabularies, where a ratio says little about rare tokens",
    "dro": "data of other policies; no clip at all",
    "importance": "the plain policy gradient; on-policy",
    "m2po": "data many versions old",
    "sapo": "a clip without an edge",
    "group_relative": "prompts that are to weigh alike, hard or easy",
    "dr_grpo": "GRPO without its bias to length and difficulty",
    "rloo": "an unbiased gradient of whole answers",
    "opo": "answers of very different lengths, on-policy",
    "optimal_token": "noisy gradients; answers with tools",
    "gpg": "many prompts that say nothing",
    "gdpo": "several rewards at once",
    "pass_at_k": "exploring: any of k answers has to pass",
    "reinforce_plus_plus": "one answer a prompt, no critic",
    "reinforce_plus_plus_baseline": "several answers a prompt, one scale for the whole batch",
    "remax": "one answer a prompt with an unbiased baseline",
    "critic": "advantages of single tokens, beside any objective of tokens",
}

_HEAD = """# Algorithms

Made from the code by `make docs-algorithms`. An *estimator* says how good each token was (its advantage A), an
*objective* what that does to the policy; `algorithm: {name: gspo+rloo}` [joins two](#how-halves-join). A half that is
named alone goes with the usual other one. *Whole* ones are both. [Write an algorithm](howto/algorithm.md) adds one.

R is the reward of an answer, π the policy, π_p the one that its ratio r = π / π_p is taken to, `sg` a value without
gradient. A loss is what is minimised. *Defaults* are those that differ from the usual ones (`group_size=8`,
`aggregate=token-mean`, …; the aggregation always stands there); *cost* is what a step does beyond one pass and update
of the policy, as these defaults have it.
"""

_KINDS = {"whole": "Whole algorithms", "objective": "Objectives", "estimator": "Estimators"}

_COMMON = """## What all have in common

Keys of every algorithm, whoever's halves it is made of.
"""

_GROUPS = {
    "The batch": ("group_size", "aggregate", "constant_length", "minibatches", "epochs"),
    "KL to a reference": ("kl_coefficient", "kl_in", "kl_estimator", "kl_target"),
    "Entropy": ("entropy_coefficient",),
    "Dynamic sampling": ("dynamic_sampling",),
    "Long answers": ("truncated", "overlong_share", "overlong_penalty"),
}


def page() -> str:
    """The text of docs/algorithms.md."""
    parts = [_HEAD, *(_table(kind) for kind in _KINDS), _joining(), _common(), _learned()]
    parts += ["## One by one\n", *(_section(name) for name in sorted(OURS.choices()))]
    return "\n".join(part for part in parts if part)


# ---------------------------------------------------------------------- the tables


def _table(kind: str) -> str:
    names = [name for name, choice in OURS.choices().items() if choice.kind == kind]
    rows = [
        (f"[`{name}`](#{name})", FOR.get(name, ""), _formula(name), _paper(name), _code(_defaults(name)), _cost(name))
        for name in sorted(names)
    ]
    return f"## {_KINDS[kind]}\n\n" + _rows(["name", "for", "formula", "paper", "defaults", "cost"], rows)


def _formula(name: str) -> str:
    """The first block of the docstring that is set in, up to an empty line; of a whole without one, its halves."""
    block = re.search(r"(?:^    .*\n)+", _docstring(name) + "\n", re.MULTILINE)
    if block is None:
        return " with ".join(f"[`{half}`](#{half})" for half in _halves(name)) or "–"
    lines = [re.sub(r",? {3,}", ",  ", line.strip()).replace("`", "") for line in block[0].splitlines()]
    whole: list[str] = []
    for line in lines:  # a line that only goes on is one with the line before
        if whole and (whole[-1].endswith((" or", ",")) or re.match(r"r < 1\)", line)):
            whole[-1] += f" {line}"
        else:
            whole.append(line)
    return "<br>".join(f"<code>{_escaped(line)}</code>" for line in whole)


def _halves(name: str) -> list[str]:
    """Halves of ours that a whole is made of."""
    if OURS.choices()[name].kind != "whole":
        return []
    modules = [base.__module__.removeprefix(f"{FOLDER}.") for base in plugin_class(name, FOLDER).__mro__[1:]]
    return [module for module in modules if module in OURS.choices()]


def _paper(name: str) -> str:
    found = re.search(r"arXiv\s+(\d{4}\.\d{4,5})", _docstring(name))
    return "" if found is None else f"[{found[1]}](https://arxiv.org/abs/{found[1]})"


def _defaults(name: str) -> list[str]:
    """Of common keys, those that differ; the aggregation first and always."""
    model = config_class(name, FOLDER)
    usual = PolicyGradientConfig.model_fields
    differ = [
        each for each in usual if each != "name" and _default(model, each) != _default(PolicyGradientConfig, each)
    ]
    return [f"{each}={_default(model, each)}" for each in dict.fromkeys(["aggregate", *differ])]


def _default(model: type[Config], name: str) -> str:
    """As YAML."""
    return to_line(plain(model.model_fields[name].get_default(call_default_factory=True)))


def _cost(name: str) -> str:
    """What a step does beyond one pass and update of the policy, from the algorithm's declarations."""
    algorithm: Algorithm = plugin_class(name, FOLDER)()
    config = algorithm.config
    prompt = Prompt(id="", index=0, messages=(), token_ids=(0,))
    found = []
    if extra := len(algorithm.requests(prompt)) - config.group_size:
        found.append(f"{extra} more answer a prompt")
    roles = {"policy": "the policy", "reference": "the reference", "critic": "the critic"}
    before = algorithm.before_advantages | algorithm.passes_before_loss
    found += [f"a pass of {words}" for role, words in roles.items() if role in before]
    if algorithm.two_pass:
        found.append("another pass of the policy each update")
    found += [f"updates of {roles[role]}" for role in algorithm.trains if role != "policy"]
    if (updates := config.minibatches * config.epochs) > 1:
        found.append(f"{updates} updates")
    return ", ".join(found) or "–"


# ---------------------------------------------------------------------- a section each


def _section(name: str) -> str:
    choice = OURS.choices()[name]
    whole = plugin_class(name, FOLDER)
    halves = whole.halves or dict.fromkeys(["objective", "estimator"], whole)
    said = {"whole": "A whole algorithm", "objective": "An objective", "estimator": "An estimator"}[choice.kind]
    if choice.kind != "whole":
        other = next(half for kind, half in halves.items() if kind != choice.kind)
        module = other.__module__.removeprefix(f"{FOLDER}.")
        said += f"; alone it goes with [`{module}`](#{module})"
    lines = [f"### {name}\n", f"*{said}. `treadle/algorithms/{name}.py`*\n", _markdown(_docstring(name))]
    own = [each for each in choice.own.model_fields if each not in PolicyGradientConfig.model_fields]
    return "\n".join([*lines, _keys(choice.own, own)] if own else lines)


def _docstring(module: str) -> str:
    return inspect.getdoc(importlib.import_module(f"{FOLDER}.{module}")) or ""


def _markdown(text: str) -> str:
    """A docstring as a page has it: blocks that are set in become drawings, papers links, files links to sections."""
    parts = re.split(r"((?:^    .*\n|^\n(?=    ))*^    .*$\n?)", text + "\n", flags=re.MULTILINE)
    made = []
    for number, part in enumerate(parts):
        if number % 2:
            made.append(f"```text\n{inspect.cleandoc(part)}\n```\n")
        else:
            made.append(_tables(_linked(part)))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(made)).strip() + "\n"


def _linked(text: str) -> str:
    text = re.sub(r"arXiv\s+(\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    names = "|".join(OURS.choices())
    text = re.sub(rf"`({names})(\.py)?`", r"[`\1`](#\1)", text)
    return text.replace("`kl.py`", "[`kl.py`](#kl-to-a-reference)")


def _tables(text: str) -> str:
    """Tables that docstrings draw with lines of = signs, as Markdown has them."""
    found = re.search(r"^(=+(?: +=+)+)\n(.+)\n\1\n((?:.+\n)+?)\1\n", text, re.MULTILINE)
    if found is None:
        return text
    edges = [match.span() for match in re.finditer(r"=+", found[1])]
    head, *rows = ([line[start:end].strip() for start, end in edges] for line in (found[2], *found[3].splitlines()))
    return text[: found.start()] + _rows(head, [tuple(map(_escaped, row)) for row in rows]) + text[found.end() :]


# ---------------------------------------------------------------------- joining


def _joining() -> str:
    refused = "\n".join(f"- {names}: {reason}" for names, reason in _refused())
    return f"""## How halves join

```yaml
algorithm: {{name: gspo+rloo, clip_high: 5e-4}}
```

is GSPO's objective on RLOO's advantages, with the keys of both; the order of the names does not matter. Where both have
a default of their own for a key, the objective's counts. A class of your own is a half like ours:
`gspo+my_module:MyEstimator`. Refused, before anything is loaded:

- two of a kind (`rloo+opo`, or a whole with a half that it has): both say the same thing;
- a class that derives from neither `Estimator` nor `Objective`: it would have to say both halves itself;
{refused}
"""


def _refused() -> Iterator[tuple[str, str]]:
    """Pairs of ours that do not go together, by the objective, and the reason."""
    halves = {kind: [n for n, choice in OURS.choices().items() if choice.kind == kind] for kind in _KINDS}
    for objective in halves["objective"]:
        reasons: dict[str, str] = {}
        for estimator in halves["estimator"]:
            name = f"{objective}+{estimator}"
            try:
                load(config_class(name, FOLDER), None, base={"name": name})
            except ConfigError as error:
                reasons[estimator] = str(error).replace(name, "the other")
        if reasons:
            others = ", ".join(f"`{name}`" for name in reasons)
            [reason] = set(reasons.values())
            yield f"`{objective}` with {others}", reason


# ---------------------------------------------------------------------- what all have


def _common() -> str:
    parts = [_COMMON, _markdown(_docstring("policy_gradient").partition("\n\n")[2].partition("\n\n")[2])]
    for title, names in _GROUPS.items():
        parts.append(f"### {title}\n")
        parts.append(_keys(PolicyGradientConfig, names, "algorithm."))
        if title == "The batch":
            parts.append(_markdown(_docstring("aggregate").partition("\n\n")[2]))
        if title == "KL to a reference":
            parts.append(_markdown(_docstring("kl").partition("\n\n")[2]))
    parts.append("### Correction\n\nKeys of the section `algorithm.correction`.\n")
    correction = PolicyGradientConfig.model_fields["correction"].annotation
    assert isinstance(correction, type)
    assert issubclass(correction, Config)
    parts += [_keys(correction, correction.model_fields, "algorithm.correction."), _markdown(_docstring("correction"))]
    return "\n".join(parts)


def _keys(model: type[Config], names: Iterable[str], above: str = "") -> str:
    fields = {name: model.model_fields[name] for name in names}
    cells = (
        (f"`{above}{name}`", field.description or "", _code([_default(model, name)])) for name, field in fields.items()
    )
    return _rows(["key", "meaning", "default"], cells)


# ---------------------------------------------------------------------- what was learned


def _learned() -> str:
    """Rewards before and after, over seeds, if they were measured."""
    if not LEARNED.exists():
        return ""
    runs: dict[str, list[Mapping[str, float]]] = {}
    for row in json.loads(LEARNED.read_text(encoding="utf-8")):
        runs.setdefault(row["algorithm"], []).append(row)
    rows = [
        (f"`{name}`", str(len(found)), *(_spread([run[when] for run in found]) for when in ("before", "after")))
        for name, found in sorted(runs.items())
    ]
    return f"""## What each learned

The mean reward of the first and of the last steps of a short run of each, as `benchmarks/catalogue.py` makes them; mean
over seeds ± standard deviation. The task is easy and the settings are one for all: this shows whether each learns, not
which is best.

{_rows(["algorithm", "seeds", "before", "after"], rows)}"""


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


# ---------------------------------------------------------------------- Markdown


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "&#124;") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines, ""])


def _code(texts: Iterable[str]) -> str:
    return " ".join(f"<code>{_escaped(text)}</code>" for text in texts)


def _escaped(text: str) -> str:
    """Text in which nothing is Markdown or HTML."""
    return re.sub(r"[|*_\\\[\]`]", lambda match: f"&#{ord(match[0])};", html.escape(text, quote=False))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
