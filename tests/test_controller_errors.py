"""Clusters that are not what was asked for: one clear error, before anything starts where that is possible."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.ray_help import Loom, config, make, pool
from tests.runs import ROOT
from treadle.config import load
from treadle.config.environment import child_environment
from treadle.controller.config import ControllerConfig, PoolConfig
from treadle.controller.host import Report, versions
from treadle.controller.ray import RayBackend, _same, fits
from treadle.errors import ConfigError, WorkerError

SMALL, LARGE = {"CPU": 4.0, "node:10.0.0.1": 1.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 2.0, "h200": 2.0}


@pytest.mark.parametrize(
    ("nodes", "pools", "message"),
    [
        ([SMALL], {"a": {"ranks": 4}}, None),
        ([SMALL], {"a": {"ranks": 40, "cpus": 0.1}}, None),
        ([SMALL], {"a": {"ranks": 5}}, "pools.a: there is room for 4 of its 5 ranks of {CPU: 1} beside"),
        ([SMALL], {"a": {"ranks": 1, "cpus": 5}}, "room for 0 of its 1 ranks of {CPU: 5} .* has {CPU: 4}. Take fewer"),
        ([SMALL], {"a": {"gpus": 1}}, "room for 0 of its 1 ranks of {CPU: 1, GPU: 1}"),
        ([SMALL], {"a": {"ranks": 3}, "b": {"ranks": 2}}, "pools.b: there is room for 1 of its 2 ranks"),
        ([SMALL, LARGE], {"a": {"ranks": 2, "gpus": 1}, "b": {"ranks": 10}}, None),
        ([SMALL, LARGE], {"a": {"ranks": 2, "gpus": 0.5, "resources": {"h200": 1}}}, None),
        (
            [SMALL, LARGE],
            {"a": {"ranks": 3, "resources": {"h200": 1}}},
            "room for 2 of its 3 ranks of {CPU: 1, h200: 1}",
        ),
        ([], {"a": {}}, "the cluster has no node"),
    ],
)
def test_what_does_not_fit_is_named(nodes: list[dict[str, float]], pools: dict[str, Any], message: str | None) -> None:
    wanted = {name: PoolConfig(**pool) for name, pool in pools.items()}
    if message is None:
        fits(wanted, nodes)
    else:
        with pytest.raises(ConfigError, match=message.replace("{", r"\{").replace("}", r"\}")):
            fits(wanted, nodes)


@pytest.mark.parametrize("name", ["python", "treadle", "torch", "ray"])
@pytest.mark.parametrize("there", ["0.0.1", None])
def test_a_node_with_other_code_is_named(name: str, there: str | None) -> None:
    ours = versions()
    theirs = {k: v for k, v in ours.items() if k != name} | ({name: there} if there else {})
    _same("train", [Report("first", "10.0.0.1", ours)])
    with pytest.raises(ConfigError) as caught:
        _same("train", [Report("first", "10.0.0.1", ours), Report("second", "10.0.0.2", theirs)])
    assert str(caught.value) == (
        f"controller.pools.train: second (10.0.0.2) has {name} {there or 'missing'}, this process has {ours[name]}; "
        "install the same on all nodes"
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"backend": "ray", "roles": {"policy": "train"}}, r"roles\.policy='train' is no pool; there are: none yet"),
        ({"backend": "ray", "pools": {"a": {}}, "roles": {"critic": "b"}}, r"roles\.critic='b' is no pool; .*: a"),
        (
            {"pools": {"a": {}, "b": {}}},
            r"pools\.a needs other processes; set controller\.backend=ray, or leave it out",
        ),
        ({"pools": {"a": {"ranks": 2}}}, r"pools\.a needs other processes"),
        ({"pools": {"a": {"offload": True}}}, r"pools\.a\.offload=true needs other processes"),
        ({"address": "auto"}, "address='auto' needs other processes"),
        ({"backend": "ray", "pools": {"a": {"ranks": 0}}}, r"pools\.a\.ranks"),
        ({"backend": "ray", "pools": {"a": {"rank": 2}}}, "ranks"),
        (
            {"backend": "ray", "roles": {"polcy": "a"}},
            "'polcy' is no role; there are: policy, reference, critic, reward_model, rollout",
        ),
        ({"backend": "rey"}, "ray"),
    ],
)
def test_a_section_that_says_what_cannot_be(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ControllerConfig, None, (), section)


# ---------------------------------------------------------------------- on the cluster of all tests


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_that_others_use_and_a_pool_that_is_not_there() -> None:
    async def main() -> None:
        async with pool(1) as backend:
            with pytest.raises(ConfigError, match="'train' is no pool of this cluster; there are: all"):
                await backend.group("warp", "train", Loom, make)
            large = PoolConfig(cpus=8)  # as many as there are, one of which is in use
            with pytest.raises(
                WorkerError, match=r"pools\.large: no room for it within 1 s .*start_timeout.*`ray status`"
            ):
                await RayBackend.open(config(start_timeout=1.0), {"large": large})
            assert (await (await backend.group("warp", "all", Loom, make)).where())[0] == 0
        async with asyncio.timeout(60):  # what was asked for in vain is not asked for any longer
            backend = await RayBackend.open(config(), {"large": PoolConfig(cpus=7.9)})
            await backend.close()

    asyncio.run(main())


# ---------------------------------------------------------------------- on clusters of their own


@cache
def parts(program: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ray_nodes", program],
        cwd=ROOT,
        env=child_environment(RAY_USAGE_STATS_ENABLED="0"),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    return {part["part"]: part for part in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("nobody", "controller.address=127.0.0.1:1: nothing answers there"),
        ("no Ray", "what answers there is no Ray; give host:port of `ray start --head`"),
        ("silence", "nothing answers there (timed out)"),
        ("no port", "controller.address=localhost: nothing answers there"),
        ("no such node", "controller.pools.all: there is room for 0 of its 1 ranks of {CPU: 1, h200: 1}"),
        ("too many", "controller.pools.two: there is room for 3 of its 4 ranks of {CPU: 1}"),
        ("no gpu", "the cluster has {CPU: 2, any: 1, left: 1} · {CPU: 3, any: 2, right: 2}"),
    ],
)
def test_an_address_or_a_cluster_that_is_not_right_is_refused_in_seconds(part: str, message: str) -> None:
    found = parts("nodes")[part]
    assert found["kind"] == "ConfigError"
    assert message in found["said"]
    assert found["seconds"] < 30


@pytest.mark.slow
def test_resources_place_pools_on_the_nodes_that_have_them() -> None:
    found = parts("nodes")["placed"]
    assert found["nodes"] == {"left": ["left"], "right": ["right"] * 2, "both": found["nodes"]["both"]}
    assert sorted(found["nodes"]["both"]) == ["left", "right", "right"]
    assert found["total"] == 3.0
    assert not found["joined"]  # a cluster that was joined was left


@pytest.mark.slow
def test_a_node_that_goes_away_is_one_error_that_names_a_rank_on_it() -> None:
    found = parts("nodes")["lost"]
    named = "|".join(map(str, found["there"]))
    assert re.match(rf"WorkerError: warp\.stuck on rank ({named}) of 3: ", found["said"]), found["said"]
    assert found["seconds"] < 40


@pytest.mark.slow
def test_a_full_object_store_is_named_and_the_next_call_goes_on() -> None:
    said = parts("store")["full"]["said"]
    fine, refused, again, total = said[:4]
    assert (fine, again, total) == ("Tensor", "Tensor", 1.0)
    assert refused.startswith("WorkerError: Ray's object store is full")
    assert "--object-store-memory" in refused
    assert said[4:] == [fine, refused, again, 2.0]
