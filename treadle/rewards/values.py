"""What a reward function may return, and how several become one."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from typing import Any, SupportsFloat, cast

from treadle.types import Reward

LIMIT = 1e6
"""Of a reward, a part and a weight: sums over a batch, squared, stay far from what float32 can hold."""

ALLOWED = (
    f"allowed: a number of at most ±{LIMIT:g}, or treadle.Reward(value, parts={{name: number}}, turns=(number, …)) "
    "with one number per turn that sum to value"
)

_SUM = "the weighted sum of the rewards"


_SHOWN = 4000
"""Characters of what a function raised, which go into a log line and into the books of its sample."""


class NotAReward(ValueError):
    """The function returned, but not a reward; trying again would not help."""


def as_reward(value: Any, turns: int) -> Reward:
    """What a function returned for a trajectory of `turns` turns, checked and as Python floats. Raises NotAReward."""
    try:
        return _checked(value, turns)
    except NotAReward:
        raise
    except Exception as error:  # an object of the user's may raise anything where it is looked at
        reason = in_words(error, with_place=False)
        raise NotAReward(f"it is a {type(value).__name__} that cannot be read ({reason}); {ALLOWED}") from error


def in_words(error: BaseException, with_place: bool = True) -> str:
    """What an exception of the user's says, as UTF-8 text of bounded length, its middle left out; or its traceback."""
    lines = traceback.format_exception(error) if with_place else traceback.format_exception_only(error)[-1:]
    text = "".join(lines).strip().encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def _checked(value: Any, turns: int) -> Reward:
    if not isinstance(value, Reward):
        return Reward(_number(value, "it"))
    total = _number(value.value, "Reward.value")
    if not isinstance(value.parts, Mapping):
        raise NotAReward(f"Reward.parts is a {type(value.parts).__name__}, not a mapping; {ALLOWED}")
    parts = {_text(name): _number(part, f"Reward.parts[{name!r:.80}]") for name, part in value.parts.items()}
    if len(parts) < len(value.parts):
        raise NotAReward(f"two names in Reward.parts are the same as text; {ALLOWED}")
    by_turn = tuple(_number(x, f"Reward.turns[{i}]") for i, x in enumerate(_sequence(value.turns)))
    if by_turn and len(by_turn) != turns:
        raise NotAReward(f"Reward.turns has {len(by_turn)} numbers, but the trajectory has {turns} turns; {ALLOWED}")
    if by_turn and not math.isclose(sum(by_turn), total, rel_tol=1e-5, abs_tol=1e-6):
        raise NotAReward(f"Reward.turns sum to {sum(by_turn):g}, but Reward.value is {total:g}; {ALLOWED}")
    return Reward(total, parts, by_turn)


def combine(rewards: Mapping[str, Reward], weights: Mapping[str, float], turns: int) -> Reward:
    """Σ weight × value; parts keep each function's own value (`number`) and its parts (`number/format`).

    If one of them came by turn, so does the sum: rewards for the whole episode land on its last turn. Raises NotAReward
    where weights make the sum too large.
    """
    parts: dict[str, float] = {}
    for name, reward in rewards.items():
        parts[name] = reward.value
        parts |= {f"{name}/{part}": value for part, value in reward.parts.items()}
    value = math.fsum(weights[name] * reward.value for name, reward in rewards.items())
    if not any(reward.turns for reward in rewards.values()):
        return Reward(_number(value, _SUM), parts)
    import numpy as np

    by_turn = np.zeros(turns)
    for name, reward in rewards.items():
        if reward.turns:
            by_turn += weights[name] * np.asarray(reward.turns)
        else:
            by_turn[-1] += weights[name] * reward.value
    return Reward(_number(by_turn.sum(), _SUM), parts, tuple(_number(x, f"{_SUM} of a turn") for x in by_turn))


def _number(value: Any, what: str) -> float:
    """Python, NumPy and torch scalars and booleans; nothing with a length, nothing non-finite or huge."""
    import numpy as np

    scalar = isinstance(value, SupportsFloat) and not isinstance(value, str | bytes | complex)
    if isinstance(value, np.ndarray | np.generic):
        scalar = value.dtype.kind not in "cSU"  # complex or text: NumPy would take the real part, or what it reads
    if not scalar or np.ndim(cast(Any, value)) != 0:
        raise NotAReward(f"{what} is {value!r:.80} ({type(value).__name__}), not a number; {ALLOWED}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NotAReward(f"{what} is {number}, not finite; {ALLOWED}")
    if abs(number) > LIMIT:
        raise NotAReward(f"{what} is {number:g}, too large; {ALLOWED}")
    return number


def _text(name: Any) -> str:
    text = str(name)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which no file takes
        raise NotAReward(f"the name {text!r:.80} in Reward.parts is not UTF-8 text; {ALLOWED}") from None
    return text


def _sequence(turns: Any) -> list[Any]:
    import numpy as np

    if not isinstance(turns, tuple | list | np.ndarray):
        raise NotAReward(f"Reward.turns is a {type(turns).__name__}, not a tuple; {ALLOWED}")
    return list(turns)
