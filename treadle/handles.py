"""What loops, agents and rewards see of the rest of the system: protocols, no implementation.

A loop that is written against these cannot tell one process from a cluster, nor one engine from another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch
    from treadle.types import Completion, Group, Prompt, Request, Reward, Statistics, TokenRequest, Trajectory

T = TypeVar("T")

Quantity = Literal["logprob", "entropy", "sum_p2", "given", "value"]
"""Per-token quantities an objective may ask for. `sum_p2` is Σ_v p(v)², a cheap measure of peakedness; `given` are the
log-probs of the ids in `batch.extras_T["given_id_T"]` [T, K], e.g. a teacher's most likely ones."""

Aggregate = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]
"""How terms become one number (the normaliser rule); see `algorithms/aggregate.py`."""

OnPublish = Literal["drain", "resume", "continue"]
"""What happens to generations in flight when new weights arrive: they finish first · they stop, keep their tokens and
go on from them under the new weights, the KV cache recomputed · the weights change under them, the KV cache kept."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the current model says about a compact batch: `T` counts its trained tokens. Only what was asked for."""

    logprob_T: Tensor | None = None  # float32, at the temperature that sampled
    entropy_T: Tensor | None = None  # float32, nats
    sum_p2_T: Tensor | None = None
    given_T: Tensor | None = None  # [T, K]
    value_T: Tensor | None = None  # of the state in which the token was chosen


@dataclass(frozen=True, slots=True)
class Term:
    """One addend of a loss: per-token terms and how they become one number."""

    term_T: Tensor
    aggregate: Aggregate = "token-mean"
    length: int = 1  # L of "constant": Σ / (N·L)
    coefficient: float = 1.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Per-token terms; the engine sums them and divides once by the counts of the global mini-batch."""

    terms: Sequence[Term]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # [T], each a token-weighted mean over rows with signal
    peaks: Mapping[str, Tensor] = field(default_factory=dict)  # [T], each reported as its maximum


@dataclass(frozen=True, slots=True)
class Learned:
    """What an optimizer step leaves behind beside the weights."""

    statistics: Statistics
    seen: Mapping[str, Tensor] = field(default_factory=dict)
    """Batch fields that it found on its way, where no pass had filled them: the old log-probs of a batch's only step,
    NaN for tokens that were not run."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations in the matrix products of one forward pass, by what they are counted for."""

    token: float  # each token, without the head
    logits: float  # each position whose logits are made
    pair: float  # each pair of a token and one that it looks at, itself included


@dataclass(frozen=True, slots=True)
class Objective:
    """All that a training engine knows of an algorithm.

    `loss(batch, outputs)` sees compact micro-batches of whole trajectories. An objective that needs statistics of the
    current model over the whole mini-batch gives `select`: then the engine makes a pass without gradient, calls
    `select(batch, outputs)` once on the whole compact mini-batch, and trains what it returns (a narrower mask).
    """

    loss: Callable[[Batch, Outputs], Loss]
    needs: frozenset[Quantity] = frozenset({"logprob"})
    select: Callable[[Batch, Outputs], Batch] | None = None


class TrainingEngine(Protocol):
    """A model that trains. Nine methods, and it knows no algorithm by name."""

    def quantities(self, batch: Batch, needs: Set[Quantity]) -> Mapping[str, Tensor]:
        """What the current weights say of every trained token at the batch's temperatures, by the names of `Outputs`;
        float32 [T], NaN elsewhere."""
        ...

    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value of the state in which each trained token was chosen, float32 [T] (NaN elsewhere), and of the state
        after each trajectory's last token, float32 [N] (0 unless truncated)."""
        ...

    def step(self, batch: Batch, objective: Objective) -> Statistics:
        """One optimizer step on one mini-batch."""
        ...

    def export(self) -> Iterable[tuple[str, Tensor]]:
        """Full tensors in Hugging Face names and compute dtype, one at a time."""
        ...

    def save(self, path: Path) -> None:
        """Everything that training needs to go on bit for bit, into a new directory."""
        ...

    def load(self, path: Path) -> None: ...
    def offload(self) -> None:
        """Leave the devices to another role (placement decides when); `onload` comes back."""
        ...

    def onload(self) -> None: ...
    def close(self) -> None: ...


class BackgroundSaving(Protocol):
    """What a training engine can do, too: those that several ranks share must."""

    def save_async(self, path: Path) -> Callable[[], None]:
        """`save` in the background; the result waits until all of it is on disk."""
        ...


class Scoring(Protocol):
    """What a training engine can do, too: one that holds a reward model must."""

    def scores(self, batch: Batch) -> Tensor:
        """The score of each trajectory as a whole, [N]: the same bits whatever else is in the batch."""
        ...


class Generator(Protocol):
    """Token ids in, token ids out: all that an agent sees of an engine."""

    async def generate(self, request: TokenRequest) -> Completion: ...


Weights = Iterable[tuple[str, "Tensor"]]
"""Full tensors by name."""


class Shipment(Protocol):
    """Weights on their way to other processes: where to, and what was sent."""

    @property
    def address(self) -> Any: ...
    @property
    def version(self) -> int: ...
    async def verify(self, who: str, manifests: Sequence[Mapping[str, str]]) -> None:
        """Raises `WeightSyncError` for the first tensor that arrived otherwise than it was sent."""
        ...


class RolloutHandle(Generator, Protocol):
    """A generation engine, or a pool of them."""

    async def load(
        self, weights: Weights | Shipment | None, version: int, on_publish: OnPublish
    ) -> Mapping[str, float]:
        """Take these weights (None: they are shared with the trainer and already there) and stamp `version`.

        An engine in this process takes tensors, others a shipment. Returns seconds of its parts, if it measures any.
        Raises `WeightSyncError` for weights that do not fit or did not arrive, and for an engine that sleeps.
        """
        ...

    async def pause(self) -> None:
        """Stop between two tokens; everything in flight is kept."""
        ...

    async def resume(self) -> None: ...
    async def sleep(self) -> None:
        """Free the device memory (caches, weights that can be had again); `wake` undoes it."""
        ...

    async def wake(self) -> None: ...
    def stats(self) -> Mapping[str, float]: ...
    async def close(self) -> None: ...


class ModelHandle(Protocol):
    """A role that only looks: the reference policy's log-probs, a teacher's, a critic's values."""

    async def annotate(self, batch: Batch) -> Mapping[str, Tensor]:
        """The batch fields that this role fills, by name."""
        ...


class ScoringHandle(Protocol):
    """A reward model."""

    async def score(self, batch: Batch) -> Mapping[str, Tensor]:
        """`score_N`, of each trajectory as a whole."""
        ...


class TrainedHandle(ModelHandle, Protocol):
    """A role that learns: the policy, the critic."""

    async def step(self, batch: Batch, state: Mapping[str, Any]) -> Learned:
        """One optimizer step on a mini-batch under the algorithm's `state` (its adaptive coefficients).

        The statistics hold "<role>/updated", the share of steps that changed the weights.
        """
        ...

    async def save(self, path: Path) -> bool:
        """Write the state of now; True if that goes on in the background, until `saved` returns."""
        ...

    async def saved(self) -> None: ...
    async def load(self, path: Path) -> None: ...


class Publisher(Protocol):
    """Moves the policy's weights into the rollout engine and attests them."""

    async def __call__(self, version: int) -> Statistics:
        """Raises `WeightSyncError` when the engine does not answer with what the policy holds."""
        ...


class Agent(Protocol):
    """How one request becomes trajectories: a single turn, a tool loop, an environment, an outside program."""

    async def __call__(self, request: Request, sample_id: str, rollout: Generator) -> list[Trajectory]: ...


class Scorer(Protocol):
    """Gives a finished trajectory its reward; raises `RewardError` after its retries."""

    async def __call__(self, trajectory: Trajectory) -> Reward: ...


class PromptSource(Protocol):
    """Where prompts come from. Its position is exact: `state()` and `restore()` continue with the next prompt."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """How often a row was kept out so far, by reason."""
        ...

    def next(self) -> Prompt | None:
        """The next prompt, or None at the end of finite data."""
        ...

    def feedback(self, group: Group) -> None:
        """A group of this source is about to be trained or filtered, in start order (for curricula)."""
        ...

    def state(self) -> Mapping[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


RewardFunction = Callable[["Trajectory"], "float | Reward | Awaitable[float | Reward]"]


class Device(Protocol):
    """Devices that roles share by turns. One call at a time; smaller priorities first, then in order of asking."""

    async def run(self, call: Callable[[], T], priority: int = 1) -> T:
        """Run `call` when its turn comes, on the thread that owns these devices."""
        ...
