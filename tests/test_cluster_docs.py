"""The page about clusters: its files are what they say they are, its configurations load, its example runs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs_reader import Block, blocks, check_treadle, commands, load_fragment
from tests.runs import ROOT
from treadle.recipes.config import RLConfig, load_config

PAGE = ROOT / "docs" / "cluster.md"
SLURM, RAYJOB, TRAIN = (ROOT / "docs" / "cluster" / name for name in ("slurm.sh", "rayjob.yaml", "train.yaml"))


def of(language: str) -> list[Block]:
    return [block for block in blocks(PAGE) if block.language == language]


def loaded(command: str) -> RLConfig:
    """The configuration of a `treadle train` command, with its overrides."""
    program, verb, path, *overrides = shlex.split(command)
    assert (program, verb) == ("treadle", "train")
    assert Path(path).name == TRAIN.name
    check_treadle([verb, str(TRAIN), *overrides], command)
    return load_config(TRAIN, overrides)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_configurations_of_the_page_load(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert "controller" in yaml.safe_load(block.text)
    load_fragment(block.text)


def test_the_script_for_slurm() -> None:
    subprocess.run(["bash", "-n", SLURM], check=True)
    if (shellcheck := shutil.which("shellcheck")) is not None:
        subprocess.run([shellcheck, SLURM], check=True)
    text = SLURM.read_text()
    (command,) = re.findall(r"^treadle .*$", text, re.MULTILINE)
    config = loaded(command.replace("$address:$port", "first:6379"))
    assert config.controller.address == "first:6379"
    nodes, gpus = (int(n) for n in re.findall(r"^#SBATCH --(?:nodes|gpus-per-node)=(\d+)$", text, re.MULTILINE))
    assert sum(pool.ranks * pool.gpus for pool in config.controller.pools.values()) == nodes * gpus


def test_the_job_for_kuberay() -> None:
    job: dict[str, Any] = yaml.safe_load(RAYJOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    (command,) = commands(job["spec"]["entrypoint"])
    config = loaded(command)
    assert config.controller.address == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    gpus = 0
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        named = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == named
        gpus += int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) * group.get("replicas", 1)
    assert sum(pool.ranks * pool.gpus for pool in config.controller.pools.values()) == gpus
    mounted = next(p for p in shlex.split(command) if p.endswith(".yaml"))
    mounts = workers["template"]["spec"]["containers"][0]["volumeMounts"]
    assert any(mounted.startswith(mount["mountPath"]) for mount in mounts)


def test_the_page_shows_these_files() -> None:
    shown = re.findall(r'--8<-- "(.*)"', PAGE.read_text())
    assert {ROOT / "docs" / name for name in shown} == {SLURM, RAYJOB}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_example_runs_and_prints_what_the_page_says() -> None:
    (example,) = of("python")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example.text, str(PAGE), "exec"), {"__name__": "__main__"})
    found = list(blocks(PAGE))
    assert out.getvalue() == found[found.index(example) + 1].text
