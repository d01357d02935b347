"""Configuration of the controller: who works where."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from annotated_types import Gt, Le
from pydantic import field_validator, model_validator

from treadle.config import Config, key

Place = Literal["policy", "reference", "critic", "reward_model", "rollout"]
"""What can be given devices of its own."""


class PoolConfig(Config):
    """Equal processes, each with its share of a machine. Roles of one pool share them by turns."""

    ranks: int = key("processes", default=1, ge=1, le=1 << 16)
    cpus: float = key("CPU cores of each, or a share of one", default=1.0, gt=0, le=4096)
    gpus: float = key("GPUs of each, or a share of one", default=0.0, ge=0, le=1024)
    resources: dict[str, Annotated[float, Gt(0), Le(1 << 20)]] = key(
        "of Ray's own resources, what each needs, as {h200: 1}: that is how nodes are told apart", default={}
    )
    threads: int | None = key("CPU threads of each; null: its cores", default=None, ge=1, le=1024)
    offload: bool = key(
        "its roles give up device memory to each other between turns; false: all of them fit beside each other",
        default=False,
    )


class ControllerConfig(Config):
    """One process programs the algorithm; its stages run here, or on a cluster."""

    backend: Literal["local", "ray"] = key(
        "where roles work: in this process, or in processes of a Ray cluster", default="local"
    )
    address: str | None = key(
        "head of a running Ray cluster, host:port or auto; null: Ray on this machine", default=None
    )
    timeout: float = key(
        "seconds that one call of a worker may take, after which it counts as hung", default=3600.0, gt=0, le=1 << 20
    )
    start_timeout: float = key("seconds that all processes may take to start", default=600.0, gt=0, le=86400)
    pools: dict[str, PoolConfig] = key("processes by a name of yours; {}: one, for all roles together", default={})
    roles: dict[Place, str] = key("which pool each role works in; the first one where nothing is said", default={})

    @field_validator("roles", mode="before")
    @classmethod
    def _known(cls, roles: object) -> object:
        if isinstance(roles, dict) and (unknown := [role for role in roles if role not in get_args(Place)]):
            raise ValueError(f"{unknown[0]!r} is no role; there are: {', '.join(get_args(Place))}")
        return roles

    @model_validator(mode="after")
    def _rules(self) -> ControllerConfig:
        for role, pool in self.roles.items():
            if pool not in self.pools:
                known = ", ".join(self.pools) or "none yet: add it to controller.pools"
                raise ValueError(f"roles.{role}={pool!r} is no pool; there are: {known}")
        if self.backend == "local":
            wrong = [f"pools.{name}" for name, pool in self.pools.items() if pool.ranks > 1 or len(self.pools) > 1]
            wrong += [f"pools.{name}.offload=true" for name, pool in self.pools.items() if pool.offload]
            wrong += [f"address={self.address!r}"] if self.address is not None else []
            if wrong:
                raise ValueError(f"{wrong[0]} needs other processes; set controller.backend=ray, or leave it out")
        places = {self.pool_of(place) for place in get_args(Place)}
        if idle := [name for name in self.pools if name not in places]:
            raise ValueError(f"pools.{idle[0]} has no work: name it in controller.roles, or leave it out")
        return self

    def pool_of(self, role: Place) -> str:
        """The name of its pool."""
        return self.roles.get(role) or next(iter(self.pools), "all")

    def pool(self, name: str) -> PoolConfig:
        return self.pools.get(name) or PoolConfig()
