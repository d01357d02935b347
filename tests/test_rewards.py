"""Rewards: what counts as one, several together, worker processes that hang, die and print."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.reward_help import score_many, trajectory
from treadle.config import dump, load
from treadle.config.yaml_text import from_text
from treadle.errors import ConfigError, RewardError
from treadle.rewards.scorer import RewardConfig, function_name, make_scorer
from treadle.types import Reward, Trajectory

ALLOWED = "allowed: a number of at most ±1e+06, or treadle.Reward"


class Broken:
    """Offers itself as a number and fails where it is looked at."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __float__(self) -> float:
        if self.where == "float":
            raise OSError("no float")
        return 1.0

    @property
    def ndim(self) -> int:
        return int(self.where == "repr")

    def __repr__(self) -> str:
        raise OSError("no repr")


def score(function: Callable[..., Any], what: Trajectory | None = None, **config: Any) -> Reward:
    """One call of one function through a scorer."""
    return score_many({"m:f": function}, {"m:f": 1.0}, what or trajectory(), **config)


def fault(function: Callable[..., Any], what: Trajectory | None = None, **config: Any) -> str:
    with pytest.raises(RewardError) as error:
        score(function, what, **config)
    message = str(error.value)
    assert "'m:f'" in message
    assert "'d.jsonl:7'" in message
    return message


def in_main(source: str) -> Callable[..., Any]:
    """A function as a notebook has it: it belongs to `__main__`, where no import finds it."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(source), space)
    return space["f"]


def both(body: str) -> list[Callable[..., Any]]:
    """The same function for a worker process and for the event loop."""
    return [in_main(f"{kind} f(t):\n{textwrap.indent(textwrap.dedent(body), '    ')}") for kind in ("def", "async def")]


# ---------------------------------------------------------------------- what is a reward


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (torch.tensor(0.5), 0.5),
        (Decimal("0.125"), 0.125),
    ],
)
def test_numbers(value: Any, number: float) -> None:
    async def f(_: Trajectory) -> Any:
        return value

    reward = score(f)
    assert reward == Reward(number, {"m:f": number})
    assert type(reward.value) is float


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "it is None (NoneType), not a number"),
        ("1.0", "it is '1.0' (str)"),
        (np.str_("1"), "not a number"),
        (b"1", "(bytes)"),
        ([1.0], "it is [1.0] (list)"),
        (np.ones(1), "(ndarray)"),
        (np.ones((2, 3)), "(ndarray)"),
        (torch.ones(1), "(Tensor)"),
        ({"value": 1.0}, "(dict)"),
        (1j, "(complex)"),
        (np.complex64(1), "not a number"),
        (float("nan"), "it is nan, not finite"),
        (np.float64("inf"), "it is inf, not finite"),
        (10**400, "it is inf, not finite"),
        (1.0001e6, "it is 1.0001e+06, too large"),
        (Reward(0.0, turns=(-2e6, 2e6)), "Reward.turns[0] is -2e+06, too large"),
        (np.array("abc"), "it is array('abc', dtype='<U3') (ndarray), not a number"),
        (np.array(1 + 2j), "it is array(1.+2.j) (ndarray), not a number"),
        (Decimal("sNaN"), "it is a Decimal that cannot be read (ValueError: cannot convert signaling NaN to float)"),
        (Broken("float"), "it is a Broken that cannot be read (OSError: no float)"),
        (Broken("repr"), "it is a Broken that cannot be read (OSError: no repr)"),
        (Reward(1.0, {"\ud800": 1.0}), r"the name '\ud800' in Reward.parts is not UTF-8 text"),
        (Reward(float("nan")), "Reward.value is nan"),
        (Reward(None), "Reward.value is None"),  # type: ignore[arg-type]
        (Reward(1.0, {"style": float("nan")}), "Reward.parts['style'] is nan"),
        (Reward(1.0, {"style": "good"}), "Reward.parts['style'] is 'good'"),  # type: ignore[dict-item]
        (Reward(1.0, [1.0]), "Reward.parts is a list"),  # type: ignore[arg-type]
        (Reward(1.0, turns=(1.0,)), "Reward.turns has 1 numbers, but the trajectory has 2 turns"),
        (Reward(1.0, turns=(0.0, 0.5)), "Reward.turns sum to 0.5, but Reward.value is 1"),
        (Reward(1.0, turns=(float("nan"), 1.0)), "Reward.turns[0] is nan"),
        (Reward(1.0, turns=1.0), "Reward.turns is a float"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_reward_is_an_error_at_once(value: Any, words: str) -> None:
    calls = []

    async def f(_: Trajectory) -> Any:
        calls.append(1)
        return value

    message = fault(f, trajectory(turns=2), retries=3)
    assert words in message
    assert ALLOWED in message
    assert len(calls) == 1


def test_a_worker_judges_alike() -> None:
    assert "it is None" in fault(in_main("def f(t): return None"))
    assert "it is nan" in fault(in_main("def f(t): return float('nan')"))
    assert "cannot be read (ValueError: cannot" in fault(
        in_main("def f(t):\n import decimal\n return decimal.Decimal('sNaN')")
    )
    assert score(in_main("def f(t):\n import numpy\n return numpy.float32(0.5)")).value == 0.5
    assert score(in_main("def f(t):\n from treadle.types import Reward\n return Reward(1.0, {'x': 2})")) == Reward(
        1.0, {"m:f": 1.0, "m:f/x": 2.0}
    )


def test_several_rewards_add_up_with_their_weights_and_land_on_turns() -> None:
    async def by_turn(_: Trajectory) -> Reward:
        return Reward(3.0, {"found": 1.0}, (1.0, 0.0, 2.0))

    async def whole(_: Trajectory) -> float:
        return 5.0

    functions = {"m:turn": by_turn, "m:whole": whole}
    reward = score_many(functions, {"m:turn": 2.0, "m:whole": -0.1}, trajectory(turns=3))
    assert reward.turns == (2.0, 0.0, 3.5)
    assert reward.value == 5.5
    assert reward.parts == {"m:turn": 3.0, "m:turn/found": 1.0, "m:whole": 5.0}
    no_turns = score_many(functions | {"m:turn": whole}, {"m:turn": 2.0, "m:whole": -0.1}, trajectory(turns=0))
    assert no_turns == Reward(9.5, {"m:turn": 5.0, "m:whole": 5.0})


@pytest.mark.parametrize("value", [1e6, Reward(1e6, turns=(4e5, 6e5))])
def test_weights_that_make_a_reward_huge(value: Any) -> None:
    async def f(_: Trajectory) -> Any:
        return value

    with pytest.raises(RewardError, match=r"\['m:f'\] of prompt 'd.jsonl:7': the weighted sum .* too large; allowed:"):
        score_many({"m:f": f}, {"m:f": 1e6}, trajectory(turns=2))


# ---------------------------------------------------------------------- failures of the world outside


@pytest.mark.parametrize("function", both("raise KeyError('lost')"))
def test_one_that_raises(function: Callable[..., Any]) -> None:
    message = fault(function, retries=1)
    assert "failed 2 times; the last time it raised\nTraceback" in message
    assert message.rstrip().endswith("KeyError: 'lost'")
    assert "in f" in message


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_an_async_one_that_raises_what_ends_programs(ending: type[BaseException]) -> None:
    async def f(_: Trajectory) -> float:
        raise ending

    message = fault(f, retries=1)
    assert "failed 2 times; the last time it raised\nTraceback" in message
    assert message.rstrip().endswith(ending.__name__)


def test_a_cancelled_async_call_ends_whatever_the_function_makes_of_it() -> None:
    calls = []

    async def f(_: Trajectory) -> float:
        calls.append(1)
        try:
            await asyncio.sleep(60)
        finally:
            raise SystemExit

    async def run() -> None:
        async with make_scorer(RewardConfig(functions={"m:f": 1.0}), {"m:f": f}) as scorer:
            call = asyncio.create_task(scorer(trajectory()))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(run())
    assert len(calls) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef f(t): time.sleep(60)",
        "def f(t):\n while True: pass",
        "import subprocess\ndef f(t): subprocess.run(['sleep', '60'])",
        "import asyncio\nasync def f(t): await asyncio.sleep(60)",
    ],
)
def test_one_that_hangs(source: str) -> None:
    start = time.monotonic()
    message = fault(in_main(source), retries=1, timeout_s=0.2)
    assert "failed 2 times; the last time it ran past reward.timeout_s=0.2" in message
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os; os._exit(3)", "its worker process died (exit code 3)"),
        ("import os; os.kill(os.getpid(), 9)", "its worker process died (signal SIGKILL)"),
        ("import sys; sys.exit(4)", "SystemExit: 4"),
    ],
)
def test_one_that_ends_its_process(body: str, words: str) -> None:
    assert words in fault(in_main(f"def f(t): {body}"), retries=0)


def test_a_lost_worker_is_replaced_and_the_call_tried_again(tmp_path: Path) -> None:
    marks = str(tmp_path / "marks")
    function = in_main(f"""
        import os, time
        def f(t):
            tries = os.path.getsize({marks!r}) if os.path.exists({marks!r}) else 0
            with open({marks!r}, "a") as file: file.write("x")
            if tries == 0: os._exit(1)
            if tries == 1: time.sleep(60)
            if tries == 2: raise OSError
            return tries
    """)
    assert score(function, retries=3, workers=1, timeout_s=1.0).value == 3.0


def test_an_async_one_is_tried_again() -> None:
    calls = []

    async def f(_: Trajectory) -> float:
        calls.append(1)
        if len(calls) < 3:
            raise TimeoutError("the judge is slow")
        return 1.0

    assert score(f, retries=2).value == 1.0
    calls.clear()
    assert "TimeoutError: the judge is slow" in fault(f, retries=1)


def test_one_failure_does_not_cut_its_siblings() -> None:
    async def bad(_: Trajectory) -> float:
        raise OSError("gone")

    async def run() -> None:
        functions = {"m:bad": bad, "m:good": in_main("def f(t): return 1")}
        config = RewardConfig(functions={"m:bad": 1.0, "m:good": 1.0}, retries=0, workers=1)
        async with make_scorer(config, functions) as scorer:
            for _ in range(3):
                with pytest.raises(RewardError, match="'m:bad'"):
                    await scorer(trajectory())

    asyncio.run(run())


def test_a_scorer_that_is_cancelled_cancels_its_functions_once() -> None:
    """What they clean up then is not interrupted, and is waited for."""
    told: list[str] = []

    async def tidy(_: Trajectory) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            told.append("tidied up")
        return 0.0

    async def quick(_: Trajectory) -> float:
        await asyncio.sleep(60)
        return 0.0

    async def run() -> None:
        config = RewardConfig(functions={"m:tidy": 1.0, "m:quick": 1.0})
        async with make_scorer(config, {"m:tidy": tidy, "m:quick": quick}) as scorer:
            call = asyncio.ensure_future(scorer(trajectory()))
            await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert told == ["tidied up"]

    asyncio.run(run())


# ---------------------------------------------------------------------- worker processes


def test_printing_and_reading_do_not_disturb_the_frames(capfd: pytest.CaptureFixture[str]) -> None:
    function = in_main("""
        import os, sys
        def f(t):
            print("said by print", flush=True)
            os.write(1, b"said by write\\n")
            os.system("echo said by a child")
            return len(sys.stdin.read())
    """)
    assert score(function).value == 0.0
    captured = capfd.readouterr()
    assert captured.out == ""
    assert all(f"said by {who}" in captured.err for who in ("print", "write", "a child"))


def test_one_that_forks_and_returns_twice() -> None:
    async def two(pretend: str) -> list[float]:
        """The rewards of two answers of different length from one worker."""
        function = in_main(f"""
            import os
            def f(t):
                own = os.getpid()
                if os.fork() == 0: {pretend}
                return len(t.response)
        """)
        config = RewardConfig(functions={"m:f": 1.0}, workers=1, retries=0)
        async with make_scorer(config, {"m:f": function}) as scorer:
            return [(await scorer(trajectory(text))).value for text in ("a", "bb", "ccc")]

    assert asyncio.run(two("pass")) == [1.0, 2.0, 3.0]
    with pytest.raises(RewardError, match="gave the answer to another call"):
        asyncio.run(two("os.getpid = lambda: own"))


def test_workers_run_side_by_side_and_are_kept() -> None:
    function = in_main("import os, time\ndef f(t):\n time.sleep(0.05)\n return os.getpid()")

    async def run() -> None:
        async with make_scorer(RewardConfig(functions={"m:f": 1.0}, workers=2), {"m:f": function}) as scorer:
            assert not scorer._pool._idle  # none before the first call
            rewards = await asyncio.gather(*(scorer(trajectory()) for _ in range(12)))
            pids = {int(r.value) for r in rewards}
            assert len(pids) == 2
            assert int((await scorer(trajectory())).value) in pids
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(run())


def test_a_cancelled_call_takes_its_worker_along(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    function = in_main(
        f"import os, time\ndef f(t):\n open({str(note)!r}, 'w').write(str(os.getpid()))\n time.sleep(60)"
    )

    async def run() -> None:
        async with make_scorer(RewardConfig(functions={"m:f": 1.0}), {"m:f": function}) as scorer:
            call = asyncio.create_task(scorer(trajectory()))
            pid = await asyncio.to_thread(_written, note)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(run())


def test_a_worker_is_light_unforked_and_out_of_reach_of_ctrl_c() -> None:
    function = in_main("""
        import os, sys, threading
        def f(t):
            assert not {"torch", "transformers", "pydantic"} & set(sys.modules)
            assert threading.current_thread() is threading.main_thread()
            return os.getpgid(0) == os.getpid()
    """)
    threading.Thread(target=time.sleep, args=(0.5,)).start()  # a fork would copy its locks
    assert score(function).value == 1.0


def test_a_plain_function_that_hands_on_a_coroutine() -> None:
    function = in_main("import asyncio\nasync def g(t):\n await asyncio.sleep(0)\n return 2\ndef f(t): return g(t)")
    assert score(function).value == 2.0
    assert score(functools.partial(in_main("async def f(x, t): return x"), 3)).value == 3.0


def test_a_callable_object() -> None:
    class Judge:
        async def __call__(self, what: Trajectory) -> float:
            return float(len(what.response))

    assert score(Judge(), trajectory("four")).value == 4.0
    assert function_name(Judge()).endswith(":test_a_callable_object.<locals>.Judge")


def test_functions_that_cannot_be_sent_or_loaded() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"m:f cannot be sent to a worker process: .*lock.*async def"):
        score(lambda _: lock.locked())
    message_of = in_main("""
        class Fragile:
            def __call__(self, t): return 1
            def __setstate__(self, state): raise RuntimeError("not here")
            def __getstate__(self): return {"x": 1}
        f = Fragile()
    """)
    with pytest.raises(RewardError, match=r"cannot load the reward functions(.|\n)*RuntimeError: not here"):
        score(message_of)


def test_a_prompt_that_cannot_be_sent() -> None:
    with pytest.raises(RewardError, match=r"prompt 'd.jsonl:7' cannot be sent .* must be plain data"):
        score(in_main("def f(t): return 1"), trajectory(lock=threading.Lock()))


def _written(note: Path) -> int:
    """The number that a process writes into a file, once it has."""
    deadline = time.monotonic() + 30
    while not (note.exists() and note.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(note.read_text())


SCRIPT = """
import asyncio
import numpy as np
print("the script runs")
from treadle.rewards.scorer import RewardConfig, function_name, make_scorer
from treadle.types import Ended, Prompt, Trajectory

WHAT = Trajectory(
    Prompt("p", 0, (), (5,)), np.arange(2), np.arange(2, dtype=np.uint8), np.zeros(2), np.zeros(2), (1,),
    Ended.TERMINATED, messages=({"role": "assistant", "content": "four"},),
)
FACTOR = 3

def mine(t):
    return FACTOR * len(t.response)

async def main():
    name = function_name(mine)
    async with make_scorer(RewardConfig(functions={name: 1.0}), {name: mine}) as scorer:
        print(await scorer(WHAT))

asyncio.run(main())
"""


def test_a_function_of_an_unguarded_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "queue.py").write_text("raise SystemExit('shadows the standard library')")
    done = subprocess.run(
        [sys.executable, "-P", str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.stdout == "the script runs\nReward(value=12.0, parts={'__main__:mine': 12.0}, turns=())\n"
    assert done.stderr == ""


def test_a_stuck_worker_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    stuck = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "script.py").write_text(SCRIPT.replace("return FACTOR * len(t.response)", stuck))
    root = str(Path(__file__).parent.parent)
    owner = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env={**os.environ, "PYTHONPATH": root})
    worker = _written(note)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and "State:\tZ" not in Path(f"/proc/{worker}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---------------------------------------------------------------------- configuration


def test_the_short_form_and_a_dump() -> None:
    short = RewardConfig.model_validate("number")
    assert short == RewardConfig(functions={"number": 1.0})
    assert load(RewardConfig, None, [], from_text(dump(short), "dump")) == short


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("functions={nmber: 1}", ["functions: there is no 'nmber'", "did you mean number?", "math"]),
        ("functions={scorer: 1}", ["there is no 'scorer'"]),
        ("functions={my.module.fn: 1}", ["did you mean my.module:fn (a colon)?"]),
        ("functions={}", ["functions", "at least 1 long"]),
        ("functions={number: x}", ["functions.number"]),
        ("functions={number: -1.1e6}", ["functions: the weight of 'number' is -1.1e+06; allowed: -1e+06 to 1e+06"]),
        ("functions={number: .inf}", ["functions.number"]),
        (f"retries={10**400}", ["retries: 1000", "≤ 100"]),
        (f"workers={10**400}", ["workers: 1000", "≤ 1024"]),
        ("timeout_s=0", ["timeout_s: 0", "a number > 0"]),
        ("max_failed=2", ["max_failed: 2", "≤ 1"]),
        ("retries=-1", ["retries: -1"]),
    ],
)
def test_configuration_mistakes(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(RewardConfig, None, ["functions={number: 1}", override])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("os:nothing", "os has no 'nothing'"),
        ("os:name", "os:name is a str, not a function"),
        ("none.at:all", "no module"),
    ],
)
def test_names_that_lead_nowhere(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_scorer(RewardConfig(functions={name: 1.0}))


def test_a_function_by_its_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_reward.py").write_text("def length(t):\n    return len(t.response)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert score_many({}, {"users_reward:length": 2.0}, trajectory("abc")).value == 6.0
