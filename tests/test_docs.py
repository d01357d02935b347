"""The documentation holds: every block runs or is checked, every name it mentions exists, the site builds strictly."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import treadle
from tests.conftest import _load
from tests.docs_reader import FENCE, Block, Reader, blocks, check, same
from tests.runs import ROOT
from treadle.algorithms.grpo import GRPO
from treadle.algorithms.ppo import PPO
from treadle.metrics import OURS, Registry
from treadle.runtime import train

HOOKS = _load(ROOT / "docs" / "hooks.py")
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
METRICS = Registry((*GRPO.metrics, *PPO.metrics))
METRIC_FAMILIES = {metric.name.partition("/")[0] for metric in (*OURS, *GRPO.metrics, *PPO.metrics)}
RUN_FILES = {"runs", "models", "samples", "checkpoints", "model"}
"""Folders that exist only where somebody has trained."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def clone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that looks like a clone in which `make smoke` was run."""
    root = tmp_path_factory.mktemp("clone")
    (root / "examples").symlink_to(ROOT / "examples")
    (root / "models").mkdir()
    (root / "models" / "tiny").symlink_to(tiny_model)
    before = Path.cwd()
    os.chdir(root)
    try:
        train("examples/smoke.yaml", overrides=["threads=1"])
    finally:
        os.chdir(before)
    return root


@pytest.fixture
def in_a_clone(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current directory is a copy of the clone; what is imported from it is forgotten afterwards."""
    here = tmp_path / "clone"
    shutil.copytree(clone, here, symlinks=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield
    for module in [m for m, found in sys.modules.items() if str(here) in str(getattr(found, "__file__", ""))]:
        del sys.modules[module]


# ---------------------------------------------------------------------- blocks


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name)
@pytest.mark.usefixtures("in_a_clone")
def test_every_block_of_the_page_holds(page: Path) -> None:
    reader = Reader(only_check=page == README)  # its commands train a real model
    for block in blocks(page):
        reader.follow(block)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_are_of_one_kind_and_closed(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert sum(FENCE.match(line) is not None for line in lines) == 2 * len(list(blocks(page)))
    assert not any(line.lstrip().startswith("~~~") for line in lines)


@pytest.mark.parametrize(
    ("language", "text", "marker"),
    [
        ("sh", "treadle trian examples/smoke.yaml", "checked"),
        ("sh", "treadle train examples/smoke.yaml stesp=3", "checked"),
        ("sh", "treadle inspect runs/smoke --stpe 3", "checked"),
        ("sh", "make nothing", "checked"),
        ("sh", "python examples/nothing.py", "checked"),
        ("sh", "pip install 'treadle[nothing]'", "checked"),
        ("sh", "frobnicate", "checked"),
        ("sh", "treadle inspect runs/nothing", None),
        ("sh", "treadle inspect runs/smoke", "fails"),
        ("python", "assert 1 + 1 == 3", None),
        ("python", "1 + 1", "fails"),
        ("yaml", "algorithm: {group_sise: 8}", None),
        ("json", "{", None),
        ("toml", "a = 1", None),
    ],
)
@pytest.mark.usefixtures("in_a_clone")
@pytest.mark.slow
def test_a_block_that_does_not_hold_is_found(language: str, text: str, marker: str | None) -> None:
    with pytest.raises((AssertionError, ValueError, treadle.TreadleError)):
        Reader().follow(Block(README, 1, language, None, marker, text))


def test_output_is_compared_word_by_word_and_number_by_any_number() -> None:
    assert same("step 3   reward 0.5\n…\ndone", "step 17  reward -1e-3\nmore\nand more\ndone\n")
    assert not same("step 3   reward 0.5", "step 17  loss 0.5")
    assert not same("step 3", "step 17\ndone")


# ---------------------------------------------------------------------- names


def inline_code(page: Path) -> list[tuple[int, str]]:
    """Code within sentences, with its line."""
    found, fenced = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            found += [(number, code) for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", line)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_keys_commands_metrics_and_names_in_sentences_exist(page: Path) -> None:
    for line, code in inline_code(page):
        where = f"{name(page)}:{line}: `{code}`"
        if code.startswith(("treadle ", "make ")) and "…" not in code:
            check(f"{code} --help" if re.fullmatch(r"treadle \w+", code) else code, where)  # a command is only named
        elif re.fullmatch(r"[\w./-]+/[\w.-]*\.?\w*", code) and looks_like_a_file(code):
            assert (ROOT / code).exists() or (ROOT / "treadle" / code).exists(), where
        elif match := re.fullmatch(r"treadle\.(\w+)(\.\w+)*(\(.*\))?", code):
            known = match[1] in treadle.__all__ or importlib.util.find_spec(f"treadle.{match[1]}") is not None
            assert known, where
        elif re.fullmatch(r"\w+/[\w@:/]*[\w@:]", code) and code.partition("/")[0] in METRIC_FAMILIES:
            assert METRICS.find(code) is not None, where
        elif code == "reward_model.ground_truth":
            continue  # a column of data, known by this name
        elif (match := re.fullmatch(r"(\w+)((\.\w+)+)(=.*)?", code)) and match[1] in config_sections():
            key = match[1] + match[2]
            assert any(k == key or k.startswith(f"{key}.") for k in HOOKS.anchors()), where


def looks_like_a_file(code: str) -> bool:
    """A file of this repository, not one of a run or of a reader's own, nor the name of a metric."""
    first, suffix = code.split("/")[0], Path(code).suffix
    ours = first not in METRIC_FAMILIES or (ROOT / "treadle" / first).is_dir()
    return first not in RUN_FILES and (suffix != "" or (code.endswith("/") and ours))


@cache
def config_sections() -> set[str]:
    return {key.partition(".")[0] for key in HOOKS.anchors() if "." in key}


# ---------------------------------------------------------------------- the page of algorithms

ALGORITHMS = _load(ROOT / "docs" / "algorithms_page.py")


def test_the_page_of_algorithms_is_up_to_date() -> None:
    assert ALGORITHMS.PAGE.read_text(encoding="utf-8") == ALGORITHMS.page(), "run `make docs-algorithms`"


def test_the_page_of_algorithms_has_a_row_and_a_section_of_each() -> None:
    page = ALGORITHMS.page()
    for algorithm in ALGORITHMS.OURS.choices():
        assert ALGORITHMS.FOR[algorithm] in page, algorithm
        assert len(re.findall(rf"^\| \[`{algorithm}`\]", page, re.MULTILINE)) == 1
        assert page.count(f"### {algorithm}\n") == 1
        assert "arxiv.org/abs/" in ALGORITHMS._paper(algorithm)


def test_costs_are_what_algorithms_declare() -> None:
    costs = {algorithm: ALGORITHMS._cost(algorithm) for algorithm in ALGORITHMS.OURS.choices()}
    assert costs["grpo"] == "–"
    assert costs["remax"] == "1 more answer a prompt"
    assert costs["optimal_token"] == "a pass of the policy"
    assert costs["clip_cov"] == "another pass of the policy each update"
    assert costs["ppo"] == "a pass of the policy, a pass of the critic, updates of the critic, 4 updates"


def test_docstrings_become_markdown() -> None:
    made = ALGORITHMS._markdown("What (arXiv\n2402.03300), see `clip.py`:\n\n    a·b\n\n    c < d\n\n- one\n  more")
    assert "[arXiv 2402.03300](https://arxiv.org/abs/2402.03300)), see [`clip`](#clip)" in made
    assert "```text\na·b\n\nc < d\n```" in made
    assert made.endswith("- one\n  more\n")


# ---------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does: any warning is an error, dead links and anchors among them."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text()):
            assert not re.search(r"(src|href)=\"?(https?:)?//", tag), f"{page}: {tag}"


def test_every_configuration_key_has_its_place_in_the_reference(site: Path) -> None:
    html = (site / "reference" / "configuration.html").read_text()
    for key, anchor in HOOKS.anchors().items():
        assert f'id="{anchor}"' in html, key


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    html = (site / "reference" / "python.html").read_text()
    for public in treadle.__all__:
        assert f'id="{public}"' in html, public


def test_keys_in_a_text_lead_to_their_place(site: Path) -> None:
    html = (site / "concepts.html").read_text()
    assert '<a href="reference/configuration.html#max_staleness"><code>max_staleness</code></a>' in html
