"""The verifier of the prompt's own reasoning-gym family, 0 to 1. For prompts of the source `reasoning_gym`."""

from __future__ import annotations

import re

from treadle.errors import ConfigError
from treadle.types import Trajectory

try:
    from reasoning_gym import create_dataset
except ImportError:
    raise ConfigError("the reward `reasoning_gym` needs the package: pip install 'treadle[tasks]'") from None

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reward(trajectory: Trajectory) -> float:
    """Scores what stands in the last `<answer>…</answer>`, or else the whole response."""
    problem = trajectory.prompt.metadata
    if "family" not in problem or "entry" not in problem:
        raise ValueError("the prompt is not one of the source `reasoning_gym`")
    tagged = _TAGGED.findall(trajectory.response)
    answer = (tagged[-1] if tagged else trajectory.response).strip()
    family = create_dataset(problem["family"], size=1, seed=0, **problem["options"])
    return float(family.score_answer(answer, problem["entry"]))
