"""Back end `local`: a group of one rank in this process. For laptops, debuggers and most tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from treadle.controller.device import LocalDevice
from treadle.controller.verbs import arguments, verb_of

_FIRST = 0  # learning overtakes generation on the devices they share


class LocalGroup:
    """The worker's methods as coroutines, each run on the group's devices when their turn comes.

    `await LocalGroup(PolicyWorker(…), device).step(batch)`. With one rank the three verbs are the same call; that a
    method carries one is checked all the same, so that a program that runs here runs on a cluster. Coroutine methods
    run beside. An exception is the worker's own, as it was raised.
    """

    def __init__(self, worker: Any, device: LocalDevice) -> None:
        self._worker = worker
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        verb_of(type(self._worker), name)
        method = getattr(self._worker, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = arguments(type(self._worker), name, args, kwargs)
            if inspect.iscoroutinefunction(method):
                return await method(*args, **kwargs)
            return await self._device.run(partial(method, *args, **kwargs), _FIRST)

        return call
