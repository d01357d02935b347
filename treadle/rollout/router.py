"""Which replica serves a request. Pure functions over what the pool knows of its replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

_REMEMBERED = 1 << 16  # conversations and prompts; the one not used for longest goes


@dataclass(slots=True)
class Load:
    """What the router sees of a replica."""

    name: str
    capacity: int  # requests that it serves together
    running: int = 0
    tokens: int = 0  # outstanding: of their prompts, and those they may still sample


@dataclass
class Router:
    """Remembers where conversations and prompts were last served.

    A conversation stays where its keys and values are cached, even if it has to wait. The samples of a group go where
    the one before went while there is room, for they share their prompt. All others go where the fewest tokens are
    outstanding.
    """

    _conversations: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _prompts: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def choose(self, conversation: str, prompt: str, replicas: Iterable[Load]) -> str | None:
        """The replica to serve this request now; None: it waits."""
        there = {load.name: load for load in replicas}
        home = there.get(self._conversations.get(conversation, ""))
        if home is not None:
            return home.name if home.running < home.capacity else None
        free = [load for load in there.values() if load.running < load.capacity]
        if not free:
            return None
        near = there.get(self._prompts.get(prompt, "")) if prompt else None
        if near is not None and near.running < near.capacity:
            return near.name
        return min(free, key=lambda load: (load.tokens, load.running, load.name)).name

    def placed(self, conversation: str, prompt: str, name: str) -> None:
        """A request went there."""
        _remember(self._conversations, conversation, name)
        if prompt:
            _remember(self._prompts, prompt, name)


def _remember(memory: OrderedDict[str, str], key: str, name: str) -> None:
    memory[key] = name
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
