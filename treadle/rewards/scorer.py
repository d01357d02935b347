"""From a configuration to a scorer: reward functions by name, their weights, time limits and retries."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from treadle.config import resolve
from treadle.errors import ConfigError, RewardError
from treadle.rewards.config import FOLDER, MODEL, OFFERS, RewardConfig
from treadle.rewards.pool import CallFailed, Pool
from treadle.rewards.values import NotAReward, as_reward, combine, in_words

if TYPE_CHECKING:
    from treadle.handles import RewardFunction
    from treadle.rewards.model import ModelReward
    from treadle.types import Reward, Trajectory


def make_scorer(
    config: RewardConfig, functions: Mapping[str, RewardFunction] | None = None, model: ModelReward | None = None
) -> RewardScorer:
    """The scorer that `config` describes; names found in `functions` are these callables, the others are imported.
    `model` goes by the name `model`.

    Raises ConfigError for a name that leads nowhere or to something that cannot be called.
    """
    given = functions or {}
    names = [name for name in config.functions if model is None or name != MODEL]
    return RewardScorer(config, {name: given[name] if name in given else _found(name) for name in names}, model)


def function_name(function: Callable[..., Any]) -> str:
    """The key under which a callable given from Python stands in `reward.functions`."""
    named = function if inspect.isroutine(function) else type(function)
    return f"{named.__module__}:{named.__qualname__}"


class RewardScorer:
    """Gives trajectories their rewards: a `Scorer`. Close it, or use it in `async with`.

    Async functions run in this process's event loop, all others in worker processes that start with the first call. A
    reward model waits for its turn on its devices, as every role does, without a limit; its failure is the run's.
    """

    def __init__(
        self, config: RewardConfig, functions: Mapping[str, RewardFunction], model: ModelReward | None = None
    ) -> None:
        self._config, self._model = config, model
        self._here = {name: f for name, f in functions.items() if _is_async(f)}
        away = {name: f for name, f in functions.items() if name not in self._here}
        self._pool = Pool(away, config.workers, config.timeout_s)

    async def __call__(self, trajectory: Trajectory) -> Reward:
        """Raises RewardError, naming function and prompt, when the retries are spent or the answer is no reward."""
        names = list(self._config.functions)
        calls = [asyncio.ensure_future(self._settled(name, trajectory)) for name in names]
        try:
            outcomes = await asyncio.gather(*calls)
        except BaseException:  # a role failed, or this call is to end
            for call in calls:
                if not call.cancelling():  # by this one's own cancellation: a second would interrupt what it cleans up
                    call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        rewards: dict[str, Reward] = {}
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, RewardError):
                raise outcome
            rewards[name] = outcome
        try:
            return combine(rewards, self._config.functions, len(trajectory.turn_ends))
        except NotAReward as error:
            raise RewardError(f"the rewards {names} of prompt {trajectory.prompt.id!r}: {error}") from None

    async def close(self) -> None:
        await self._pool.close()

    async def __aenter__(self) -> RewardScorer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _settled(self, name: str, trajectory: Trajectory) -> Reward | RewardError:
        """One function's reward, or why there is none: one that fails must not cancel its siblings in mid-call. Raises
        what the reward model raises: then the run ends."""
        tries = self._config.retries + 1
        fault = ""
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(min(0.1 * 2**attempt, 5.0))
            try:
                if self._model is not None and name == MODEL:
                    return as_reward(await self._model(trajectory), len(trajectory.turn_ends))
                if name in self._here:
                    return await self._await_here(name, trajectory)
                return await self._pool.call(name, trajectory)
            except NotAReward as error:
                return RewardError(f"reward {name!r} of prompt {trajectory.prompt.id!r} is not a reward: {error}")
            except CallFailed as error:
                fault = str(error)
            except RewardError as error:
                return error
        times = "once" if tries == 1 else f"{tries} times"
        return RewardError(f"reward {name!r} of prompt {trajectory.prompt.id!r} failed {times}; the last time {fault}")

    async def _await_here(self, name: str, trajectory: Trajectory) -> Reward:
        limit, task = asyncio.timeout(self._config.timeout_s), asyncio.current_task()
        assert task is not None
        try:
            async with limit:
                value = await self._here[name](trajectory)  # type: ignore[misc]
            return as_reward(value, len(trajectory.turn_ends))
        except NotAReward:
            raise
        except BaseException as error:  # the user's function may raise anything, `sys.exit` included
            if task.cancelling():  # this call is to end, whatever the function made of that
                raise asyncio.CancelledError from error
            if limit.expired():
                raise CallFailed(f"it ran past reward.timeout_s={self._config.timeout_s:g}") from None
            raise CallFailed(f"it raised\n{in_words(error)}") from error


def _found(name: str) -> RewardFunction:
    if name == MODEL:
        raise ConfigError(f"reward.functions: {MODEL} is what a reward model says; name one in reward_model.model")
    thing = resolve(name, FOLDER, OFFERS)
    function: Any = thing.reward if isinstance(thing, ModuleType) else thing
    if not callable(function):
        raise ConfigError(f"reward.functions: {name} is a {type(function).__name__}, not a function")
    return cast("RewardFunction", function)


def _is_async(function: RewardFunction) -> bool:
    """`async def`, or an object whose `__call__` is."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
