"""How weights travel from the trainer to rollout engines in processes of their own."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from treadle.config import Config as Base
from treadle.config import key


class WeightsConfig(Base):
    """Weights travel as a stream of named full tensors, cut into buckets."""

    transport: Literal["shared_memory", "files", "broadcast", "cuda_ipc"] = key(
        "shared_memory: processes of one machine; files: a directory that both sides see; broadcast: a process group "
        "(gloo, NCCL on GPUs); cuda_ipc: processes that share one GPU",
        default="shared_memory",
    )
    directory: str | None = key("where `files` puts its buckets; null: inside the run directory", default=None)
    bucket_mb: int = key(
        "megabytes of one bucket; a larger tensor is a bucket of its own", default=256, ge=1, le=1 << 16
    )
    staged: bool = key(
        "receive all buckets while generation goes on, which then stops for the loading alone: costs a copy of the "
        "weights; false: stop first and hold a bucket at a time",
        default=True,
    )
    delta: bool = key(
        "send only elements that changed since the last publish, bit for bit: each side keeps a copy of what was sent",
        default=False,
    )
    timeout: float = key("seconds without progress after which a publish has failed", default=120.0, gt=0, le=86400)

    @model_validator(mode="after")
    def _fits(self) -> WeightsConfig:
        if self.delta and self.transport == "cuda_ipc":
            raise ValueError("delta=true finds changes in the host's memory, and transport=cuda_ipc never goes there")
        return self
