"""The records that travel between prompts, engines, rewards and algorithms.

Suffixes name the axes: N trajectories · T tokens of all of them laid end to end · N1 is N + 1 · V vocabulary.
Prompt → Request (one sample asked for) → Trajectory (what an agent run produced) → Sample → Group → `Batch`
(in `batch.py`: the packed form that trains).

Token ids are the truth and text is a view: nothing that trains is ever made by encoding text again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Message = Mapping[str, Any]
"""One chat message, e.g. `{"role": "user", "content": "What is 2 + 3?"}`."""


class Provenance(IntEnum):
    """Where a token came from."""

    PROMPT = 0
    SAMPLED = 1
    ENVIRONMENT = 2


class Ended(StrEnum):
    """How a trajectory ended."""

    TERMINATED = "terminated"  # the policy or the environment finished: nothing comes after
    TRUNCATED = "truncated"  # cut by a limit: a critic bootstraps from the last state
    FAILED = "failed"  # the world outside broke: never trained, never a reward of zero


class Kind(StrEnum):
    """What a sample is for."""

    TRAIN = "train"
    BASELINE = "baseline"  # enters the baseline of its group, is not trained (ReMax's greedy sample)
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The distribution that tokens are drawn from, and when to stop. `temperature=0` is greedy."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, rendered.

    `Prompt(id="train.jsonl:17", index=93, messages=({"role": "user", "content": "What is 2 + 3?"},),
    token_ids=(1, 4093, …), answer="5")`
    """

    id: str  # identity in the data, the same in every epoch
    index: int  # position in the order of this run; grows over epochs, so it is unique
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """One sample asked of a prompt. An algorithm lists them: `[Request(prompt)] * 8`."""

    prompt: Prompt
    kind: Kind = Kind.TRAIN
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One call of a rollout engine: token ids in.

    `noise` and `position` fix the sampling noise of every token: it is a function of (seed, sample, position) and
    of nothing else, so an aborted, resumed or re-routed request goes on with the noise it would have had.
    """

    id: str  # the sample it belongs to
    token_ids: tuple[int, ...]
    params: SamplingParams
    noise: int  # 64 bits, see `noise_key`
    position: int = 0  # tokens this sample has sampled before this request
    prefix: str = ""  # requests with the same non-empty prefix key and token ids share one prompt pass
    priority: int = 1  # smaller goes first; evaluation is 0


@dataclass(frozen=True, slots=True)
class Completion:
    """Token ids out. `C` tokens sampled by this request, the stop token included."""

    token_C: np.ndarray  # int64
    logprob_C: np.ndarray  # float32, of the distribution really sampled from
    version_C: np.ndarray  # int32, the weights that sampled each token
    finish: str  # "stop" · "length"
    extras_C: Mapping[str, np.ndarray] = field(default_factory=dict)  # [C, …], e.g. expert routing


def noise_key(seed: int, sample_id: str) -> int:
    """64 bits that identify a sample's noise; stable across processes and Python versions."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Reward:
    """What an episode earned.

    `Reward(1.2, parts={"correct": 1.0, "format": 0.2})` for an episode, `Reward(0.5, turns=(0.0, 0.5))` by turn:
    then `value` is their sum and each lands on its turn's last sampled token.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)  # by name, before weighting
    turns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What one agent run produced, token by token. Its arrays become read-only: who judges it cannot rewrite it.

    Prompt `[5, 6]`, sampled `[7, 8]`, a tool's answer `[9]`, sampled `[2]`::

        token_T      [5, 6, 7, 8, 9, 2]
        provenance_T [0, 0, 1, 1, 2, 1]
        logprob_T    [nan, nan, -0.1, -0.7, nan, -0.2]
        version_T    [-1, -1, 3, 3, -1, 4]
        turn_ends    (3, 5)
    """

    prompt: Prompt
    token_T: np.ndarray  # int64
    provenance_T: np.ndarray  # uint8, `Provenance`
    logprob_T: np.ndarray  # float32, sampling log-prob; NaN where nothing was sampled
    version_T: np.ndarray  # int32, the weights that sampled; -1 where nothing was sampled
    turn_ends: tuple[int, ...]  # index of each turn's last sampled token
    ended: Ended
    messages: tuple[Message, ...] = ()  # for people and for rewards: the whole conversation as text
    reward: Reward | None = None
    temperature: float = 1.0  # of the distribution sampled from
    bundle: int | None = None  # rows of one sample or group that must not be parted, e.g. a preference pair
    branch_of: int | None = None  # this one rewrote the history of that trajectory of its sample
    extras_T: Mapping[str, np.ndarray] = field(default_factory=dict)  # [T, …], e.g. expert routing
    extras_N: Mapping[str, np.ndarray] = field(default_factory=dict)  # […] for the whole trajectory

    def __post_init__(self) -> None:
        arrays = (self.token_T, self.provenance_T, self.logprob_T, self.version_T)
        for array in (*arrays, *self.extras_T.values(), *self.extras_N.values()):
            array.flags.writeable = False

    @property
    def response(self) -> str:
        """Text of the last assistant message ("" if there is none): what most rewards look at."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return str(message["content"])
        return ""

    @property
    def sampled_tokens(self) -> int:
        return int((self.provenance_T == Provenance.SAMPLED).sum())


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a prompt, done. Several trajectories (compacted context, sub-agents) share its reward."""

    id: str
    kind: Kind
    trajectories: tuple[Trajectory, ...]
    failure: str | None = None  # why it failed; then it has no reward

    @property
    def reward(self) -> Reward | None:
        return self.trajectories[-1].reward if self.trajectories else None


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt, compared with each other. `index` counts groups in the order they started."""

    index: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    started_version: int = 0

    @property
    def usable(self) -> tuple[Sample, ...]:
        """Samples that did not fail."""
        return tuple(s for s in self.samples if s.failure is None)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token; the starting version where nothing was sampled."""
        versions = [t.version_T[t.version_T >= 0] for s in self.usable for t in s.trajectories]
        return min((int(v.min()) for v in versions if v.size), default=self.started_version)


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as numerator and denominator, so that parts combine without becoming a mean of means."""

    total: float
    weight: float = 1.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True, slots=True)
class Max:
    """A metric whose parts combine by the larger."""

    value: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Spread:
    """A standard deviation over the values of all parts (divided by their number, not by one less).

    Parts are kept as count, mean and sum of squared deviations, which merge without the cancellation of plain sums of
    squares (Chan, Golub & LeVeque 1983). No value, no spread: NaN.
    """

    count: int
    mean: float
    squares: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        wide = values.astype("float64", copy=False)
        mean = float(wide.mean()) if wide.size else 0.0
        apart = wide - mean
        return cls(wide.size, mean, float(apart @ apart))

    def __add__(self, other: Spread) -> Spread:
        count = max(self.count + other.count, 1)
        apart = other.mean - self.mean
        between = apart * apart * self.count * other.count / count
        mean = self.mean + apart * other.count / count
        return Spread(self.count + other.count, mean, self.squares + other.squares + between)

    @property
    def value(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's correlation over the pairs of all parts, merged as `Spread` is. NaN where a side never varies."""

    x: Spread
    y: Spread
    products: float  # sum of (x - mean of x) · (y - mean of y)

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> Correlation:
        one, two = Spread.of(x), Spread.of(y)
        apart_x, apart_y = x.astype("float64", copy=False) - one.mean, y.astype("float64", copy=False) - two.mean
        return cls(one, two, float(apart_x @ apart_y))

    def __add__(self, other: Correlation) -> Correlation:
        apart = (other.x.mean - self.x.mean) * (other.y.mean - self.y.mean)
        between = apart * self.x.count * other.x.count / max(self.x.count + other.x.count, 1)
        return Correlation(self.x + other.x, self.y + other.y, self.products + other.products + between)

    @property
    def value(self) -> float:
        scale = math.sqrt(self.x.squares) * math.sqrt(self.y.squares)
        return min(max(self.products / scale, -1.0), 1.0) if scale > 0 else math.nan


Statistic = Mean | Max | Spread | Correlation
Statistics = Mapping[str, Statistic]
"""What is measured, by name (`treadle.metrics` defines each), in a form whose parts combine to the whole's value."""


def merge(*parts: Statistics) -> dict[str, Any]:
    """Combine statistics of parts (micro-batches, mini-batches, ranks) into those of the whole."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            whole[name] = whole[name] + value if name in whole else value
    return whole


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that are never parted."""

    rows: Sequence[int]
    cost: float
    family: int
    """Units of one family cost less together (they share a prompt, say), so they stay together where that is fair."""
    part: int = 0
    """Each part is spread evenly by itself, as if it were all there is."""
