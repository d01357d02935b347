"""Rewards that nobody would write: a finite reward or a RewardError that names both function and prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests import hostile_rewards
from tests.hostile import EXTENT, outcome, tries
from tests.reward_help import trajectory
from treadle.errors import RewardError
from treadle.rewards.config import RewardConfig
from treadle.rewards.scorer import RewardScorer, make_scorer
from treadle.rewards.values import LIMIT, NotAReward, as_reward, combine
from treadle.types import Reward

LOST_S = 200.0
"""Wall-clock time after which a call counts as hung, on however busy a machine."""

errors = st.sampled_from(
    [
        *("KeyboardInterrupt()", "SystemExit(3)", "SystemExit('\\ud800')", "GeneratorExit()", "StopIteration(1)"),
        *(
            "StopAsyncIteration()",
            "asyncio.CancelledError()",
            "asyncio.TimeoutError()",
            "RecursionError()",
            "MemoryError()",
        ),
        *(
            "ValueError('x' * 300_000)",
            "ValueError('x\\n' * 100_000)",
            "ValueError('\\ud800\\0\\x1b[31m')",
            "OSError(9, 'x')",
        ),
        *(
            "UnicodeDecodeError('utf-8', b'\\xff', 0, 1, 'r')",
            "ExceptionGroup('g', [ValueError()] * 99)",
            "AssertionError()",
        ),
        *("BaseExceptionGroup('g', [KeyboardInterrupt()])", "type('Ünï', (Exception,), {})()", "ConfigError('x')"),
        *(
            "RewardError('x')",
            "type('Mute', (Exception,), {'__str__': None})()",
            "Exception(evil('__repr__', OSError()))",
        ),
        "type('Bad', (BaseException,), {'__str__': lambda self: 1 / 0})()",
    ]
)
places = [
    "__float__",
    "__repr__",
    "__eq__",
    "__array__",
    "__len__",
    "__class__",
    "__getattribute__",
    "__index__",
    "__bool__",
    "__hash__",
]
single = st.sampled_from(
    [
        *(
            "1",
            "0.5",
            "True",
            "None",
            "-0.0",
            "float('nan')",
            "float('inf')",
            "-float('inf')",
            "10**400",
            "10**6 + 1",
            "-10**6",
        ),
        *(
            "'1'",
            "b'1'",
            "bytearray(b'1')",
            "1j",
            "1e-320",
            "np.float32(1)",
            "np.float64('nan')",
            "np.float16('inf')",
            "np.int8(1)",
        ),
        *(
            "np.array(1.0)",
            "np.array([1.0])",
            "np.array('1')",
            "np.array(None)",
            "np.array(1 + 1j)",
            "np.datetime64('nat')",
        ),
        *(
            "np.bool_(True)",
            "np.void(b'12')",
            "np.timedelta64(1, 's')",
            "np.array(evil('__float__', OSError()))",
            "np.zeros(0)",
        ),
        *("decimal.Decimal('NaN')", "decimal.Decimal('sNaN')", "decimal.Decimal('1e999')", "fractions.Fraction(1, 3)"),
        *(
            "decimal.Decimal('1e999999')",
            "fractions.Fraction(10**400, 3)",
            "range(10**12)",
            "(i for i in [1])",
            "loop()",
        ),
        *(
            "deep(50_000)",
            "object()",
            "Reward",
            "Reward(1.0)",
            "Ellipsis",
            "lambda: 1",
            "threading.Lock()",
            "{1.0}",
            "[0.0] * 10**6",
        ),
        *(
            "np.ma.masked",
            "'\\ud800'",
            "'x' * 10**7",
            "t",
            "type",
            "{'value': 1.0}",
            "iter(int, 1)",
            "np.float64(1e300)",
        ),
        *(
            "type('Real', (float,), {'__float__': lambda self: self})(1)",
            "type('Real', (float,), {'__repr__': None})('nan')",
        ),
    ]
)
awkward = single | st.builds(lambda place, error: f"evil({place!r}, {error})", st.sampled_from(places), errors)
names = st.sampled_from(
    [
        "'a'",
        "1",
        "None",
        "'\\ud800'",
        "'é'",
        "''",
        "'x' * 10**5",
        "evil('__str__', OSError())",
        "(1, 2)",
        "'a/b'",
        "'\\0'",
    ]
)
mappings = st.lists(st.builds(lambda n, v: f"{n}: {v}", names, awkward), max_size=3).map(
    lambda e: "{" + ", ".join(e) + "}"
)
tuples = st.lists(awkward, max_size=3).map(lambda e: "(" + "".join(f"{x}, " for x in e) + ")")
results = awkward | st.builds(
    lambda value, parts, turns: f"Reward({value}, parts={parts}, turns={turns})",
    st.just("1.0") | awkward,
    st.just("{}") | mappings | awkward,
    st.just("(0.5, 0.5)") | st.just("()") | tuples | awkward,
)
bodies = st.one_of(
    results.map(lambda r: f"return {r}"),
    results.map(lambda r: f"return {r}"),
    errors.map(lambda e: f"raise {e}"),
    errors.map(lambda e: f"try:\n    1 / 0\nfinally:\n    raise {e}"),
    st.sampled_from(
        [
            *(
                "return recurse()",
                "pass",
                "print('x' * 10**5)\nreturn 1.0",
                "print('\\ud800')\nreturn 1.0",
                "yield 1.0",
            ),
            *(
                "del t.prompt",
                "t.token_T[0] = 9",
                "object.__setattr__(t, 'turn_ends', None)\nreturn 1.0",
                "return t.nothing",
            ),
        ]
    ),
)
in_worker = bodies | st.sampled_from(
    [
        *(
            "os._exit(0)",
            "os._exit(3)",
            "os.kill(os.getpid(), 9)",
            "os.kill(os.getpid(), 35)",
            "os.abort()",
            "return one()",
        ),
        *(
            "os.closerange(0, 99)\nreturn 1.0",
            "os.close(1)\nreturn 1.0",
            "sys.stdout.close()\nreturn 1.0",
            "sys.stdin.read()",
        ),
        *(
            "sys.stdout = None\nreturn 1.0",
            "for fd in range(3, 9):\n    try:\n        os.write(fd, bytes(64))\n    except OSError:\n        pass",
        ),
        *(
            "os.write(1, b'x' * 4096)\nreturn 1.0",
            "sys.stdout.buffer.write(b'\\0\\xff')\nreturn 1.0",
            "os.killpg(0, 15)",
        ),
        *(
            "signal.alarm(1)\nsignal.pause()",
            "os.chdir('/')\nreturn 1.0",
            "os.environ.clear()\nreturn 1.0",
            "return asyncio.sleep(0)",
        ),
        *(
            "threading.Thread(target=lambda: 1 / 0).start()\nreturn 1.0",
            "return os.fork()",
            "sys.setrecursionlimit(10**9)\nrecurse()",
        ),
    ]
)


def wholesome(reward: Reward, turns: int) -> None:
    """Plain finite numbers under names that a file takes."""
    assert type(reward) is Reward
    for number in (reward.value, *reward.parts.values(), *reward.turns):
        assert type(number) is float
        assert math.isfinite(number)
        assert abs(number) <= LIMIT
    assert all(type(name) is str and name.encode() is not None for name in reward.parts)
    assert len(reward.turns) in (0, turns)


@contextmanager
def scorer(function: Any, **config: Any) -> Iterator[Any]:
    """Scores one body after the other, each followed by one that must work."""

    async def score(made: RewardScorer, body: str) -> Reward:
        async with asyncio.timeout(LOST_S):
            return await made(trajectory(answer=body, turns=2))

    def check(body: str) -> None:
        found = outcome(lambda: runner.run(score(made, body)), RewardError, "'m:f'")
        if isinstance(found, Reward):
            wholesome(found, 2)
        else:
            assert "'d.jsonl:7'" in found
        assert runner.run(score(made, "return 0.25")).value == 0.25

    with asyncio.Runner() as runner:
        settings = RewardConfig(functions={"m:f": 1.0}, retries=0, workers=1, **{"timeout_s": 100.0, **config})
        made = make_scorer(settings, {"m:f": function})
        try:
            yield check
        finally:
            runner.run(made.close())


def judged(value: Any, weight: float) -> str:
    """Why it is no reward; "" if it is one."""
    try:
        reward = as_reward(value, 2)
        wholesome(reward, 2)
        wholesome(combine({"f": reward, "g": Reward(1.0, {}, (1.0, 0.0))}, {"f": weight, "g": -weight}, 2), 2)
    except NotAReward as error:
        return str(error)
    except BaseException as error:
        if isinstance(error, Exception):  # of the others, the worker takes care
            raise
    return ""


@EXTENT
def test_any_object_is_a_reward_or_is_not(extent: int) -> None:
    @tries(300 * extent)
    @given(results, st.floats(-LIMIT, LIMIT))
    @example("Reward(1.0, parts={1: 2.0, '1': 3.0})", 1.0)
    def check(result: str, weight: float) -> None:
        what = trajectory(answer=f"return {result}", turns=2)
        try:
            value = hostile_rewards.obey(what)
        except BaseException:  # the making of it failed
            return
        fault = judged(value, weight)
        fault.encode()
        assert len(fault) < 5000
        assert not fault or "allowed" in fault

    check()


@EXTENT
def test_in_this_process(extent: int) -> None:
    with scorer(hostile_rewards.obey_here) as check:

        @tries(100 * extent)
        @given(bodies)
        def each(body: str) -> None:
            check(body)

        each()


@EXTENT
def test_in_a_worker_process(extent: int) -> None:
    with scorer(hostile_rewards.obey) as check:

        @tries(80 * extent)
        @given(in_worker)
        @example("os.kill(os.getpid(), 35)")
        @example("raise ValueError('x' * 300_000)")
        @example("for fd in range(3, 9):\n    try:\n        os.write(fd, bytes(64))\n    except OSError:\n        pass")
        def each(body: str) -> None:
            check(body)

        each()


@pytest.mark.parametrize(
    "body",
    [
        "import time\ntime.sleep(1000)",
        "while True:\n    try:\n        signal.pause()\n    except BaseException:\n        pass",
        "os.kill(os.getpid(), 19)",
    ],
)
def test_one_that_hangs_ends_in_time(body: str) -> None:
    async def score() -> str:
        config = RewardConfig(functions={"m:f": 1.0}, retries=0, workers=1, timeout_s=2.0)
        async with asyncio.timeout(LOST_S), make_scorer(config, {"m:f": hostile_rewards.obey}) as made:
            with pytest.raises(RewardError) as error:
                await made(trajectory(answer=body))
        return str(error.value)

    assert "reward.timeout_s=2" in asyncio.run(score())
