"""1 if the response's final mathematical answer equals the answer, else 0 (by the package math-verify)."""

from __future__ import annotations

from treadle.errors import ConfigError
from treadle.types import Trajectory

try:
    from math_verify import parse, verify
except ImportError:
    raise ConfigError("the reward `math` needs the package math-verify: pip install 'treadle[tasks]'") from None


def reward(trajectory: Trajectory) -> float:
    r"""The answer is a number or LaTeX, `\frac{1}{2}`, with or without `$…$` or `\boxed{…}` around it.

    math-verify keeps its own limits of some seconds: a response that is too hard to read or to compare earns 0.
    """
    text = str(trajectory.prompt.answer)
    marked = text if "$" in text or r"\boxed" in text else rf"\boxed{{{text}}}"
    wanted = parse(marked, raise_on_error=True)
    if not wanted:
        raise ValueError(f"the answer {trajectory.prompt.answer!r} cannot be read as mathematics")
    return float(verify(wanted, parse(trajectory.response)))
