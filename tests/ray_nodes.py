"""A program for tests about clusters of their own: a process can be part of one only. Each part prints a line of JSON.

`python -m tests.ray_nodes nodes`: two nodes on this machine. `python -m tests.ray_nodes store`: one, with little memory
and a disk that counts as full.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from tests.ray_help import Loom, config, make, pool
from treadle.controller.config import PoolConfig
from treadle.controller.host import Seat
from treadle.controller.ray import RayBackend
from treadle.controller.verbs import one
from treadle.errors import TreadleError


class Placed(Loom):
    @one
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def make_placed(seat: Seat) -> Placed:
    return Placed(seat.rank, seat.ranks)


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


async def refused(part: str, address: str, pools: dict[str, PoolConfig]) -> None:
    start = time.monotonic()
    try:
        backend = await RayBackend.open(config(address=address), pools)
    except TreadleError as error:
        say(part=part, kind=type(error).__name__, said=str(error), seconds=time.monotonic() - start)
    else:
        await backend.close()
        say(part=part, said="opened")


async def placed(address: str, left: str, right: str) -> None:
    pools = {
        "left": PoolConfig(cpus=0.5, resources={"left": 1}),
        "right": PoolConfig(ranks=2, cpus=0.5, resources={"right": 1}),
        "both": PoolConfig(ranks=3, cpus=0.5, resources={"any": 1}),
    }
    backend = await RayBackend.open(config(address=address), pools)
    nodes = {}
    for name in pools:
        singles = await backend.singles("where", name, Placed, [make_placed] * pools[name].ranks)
        found = [await single.node() for single in singles]
        nodes[name] = [{left: "left", right: "right"}[node] for node in found]
    total = await (await backend.group("warp", "both", Loom, make)).total(1.0)
    await backend.close()
    say(part="placed", nodes=nodes, total=total, joined=ray.is_initialized())


async def lost(address: str, cluster: Cluster, node: Any) -> None:
    """A node goes away while the ranks on it, and the one that is not, are in a call."""
    backend = await RayBackend.open(config(address=address), {"both": PoolConfig(ranks=3, resources={"any": 1})})
    singles = await backend.singles("where", "both", Placed, [make_placed] * 3)
    there = [rank for rank, single in enumerate(singles) if await single.node() == node.node_id]
    warp = await backend.group("warp", "both", Loom, make)
    call = asyncio.create_task(warp.stuck(there[0]))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(cluster.remove_node, node, False)
    start = time.monotonic()
    try:
        await asyncio.wait_for(call, 50)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    seconds = time.monotonic() - start
    await backend.close()
    say(part="lost", there=there, said=said, seconds=seconds)


async def full() -> None:
    """What is too large for the store is refused, and the next call goes on."""
    said = []
    for ranks in (1, 2):
        async with pool(ranks) as backend:
            warp = await backend.group("warp", "all", Loom, make)
            for megabytes in (10, 150, 10):
                try:
                    said.append(await warp.take(torch.zeros(megabytes << 18)))
                except TreadleError as error:
                    said.append(f"{type(error).__name__}: {error}")
            said.append(await warp.total(1.0))
    say(part="full", said=said)


def store() -> None:
    system: Any = {"local_fs_capacity_threshold": 0.01, "automatic_object_spilling_enabled": False}
    quiet: Any = {"logging_level": "error", "log_to_driver": False, "include_dashboard": False}
    ray.init(num_cpus=4, object_store_memory=100 << 20, _system_config=system, **quiet)
    asyncio.run(full())
    ray.shutdown()


def nodes() -> None:
    web = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    silent = socket.create_server(("127.0.0.1", 0))
    for part, port in {"nobody": 1, "no Ray": web.server_port, "silence": silent.getsockname()[1]}.items():
        asyncio.run(refused(part, f"127.0.0.1:{port}", {}))
    asyncio.run(refused("no port", "localhost", {}))

    head: Any = {"num_cpus": 2, "resources": {"left": 1, "any": 1}, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    right = cluster.add_node(num_cpus=3, resources={"right": 2, "any": 2})
    try:
        for part, pools in {
            "no such node": {"all": PoolConfig(resources={"h200": 1})},
            "too many": {"one": PoolConfig(ranks=2), "two": PoolConfig(ranks=4)},
            "no gpu": {"all": PoolConfig(gpus=1)},
        }.items():
            asyncio.run(refused(part, cluster.address, pools))
        asyncio.run(placed(cluster.address, cluster.head_node.node_id, right.node_id))
        asyncio.run(lost(cluster.address, cluster, right))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    {"nodes": nodes, "store": store}[sys.argv[1]]()
