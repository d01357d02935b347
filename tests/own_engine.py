"""A rollout engine of somebody's own."""

from __future__ import annotations

from treadle.config import key
from treadle.rollout.embedded.config import Config as EmbeddedConfig
from treadle.rollout.embedded.engine import EmbeddedEngine
from treadle.types import Completion, TokenRequest


class OwnEngine(EmbeddedEngine):
    """Ours, counting."""

    class Config(EmbeddedConfig):
        name: str = key("this one", default="tests.own_engine:OwnEngine")  # type: ignore[assignment]

    asked = 0

    async def generate(self, request: TokenRequest) -> Completion:
        OwnEngine.asked += 1
        return await super().generate(request)
