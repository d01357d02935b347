"""What an algorithm is: declarations that the loop and the engines obey, and a few pure functions.

Every method but `requests` and `keep` sees *compact* batches: trained tokens only, `T` of them in `N` trajectories, so
masked positions cannot reach it. The loop never asks which algorithm it runs; it reads the declarations below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from treadle.batch import Batch
from treadle.config import Config, key
from treadle.config.plugins import Joined
from treadle.errors import ConfigError, TrainingError
from treadle.handles import Aggregate, Loss, Outputs, Quantity, Term
from treadle.metrics import Metric
from treadle.types import Request

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.types import Group, Prompt

Role = Literal["policy", "reference", "critic"]


class AlgorithmConfig(Config):
    """Keys that every algorithm has."""

    name: str = key("module of treadle.algorithms, my.module:Class, two joined by +", default="grpo")
    group_size: int = key("samples asked of each prompt", default=8, ge=1, le=2**16)
    aggregate: Aggregate = key("how per-token terms become one loss", default="token-mean")
    constant_length: int = key("L of aggregate=constant, tokens", default=1024, ge=1, le=2**31)
    minibatches: int = key("optimizer steps per batch", default=1, ge=1, le=2**20)
    epochs: int = key("passes over each batch", default=1, ge=1, le=2**16)

    def check_run(self, steps: int) -> None:
        """Raises ValueError that names both keys where a key of the algorithm does not fit the run's `steps`."""


class Algorithm(Joined):
    """Base of all algorithms. A subclass in a notebook works as well as a file of ours."""

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig

    uses: frozenset[Role] = frozenset()
    """Roles beside the policy."""
    needs: frozenset[Quantity] = frozenset({"logprob"})
    """Per-token quantities of the current policy that `loss` looks at."""
    before_advantages: frozenset[Role] = frozenset()
    """Roles whose pass (old log-probs, reference log-probs, values) `advantages` looks at."""
    observes: frozenset[Quantity] = frozenset({"logprob"})
    """What the policy's pass before the advantages brings: `old_logprob_T`, any other as an extra (`old_sum_p2_T`)."""
    before_loss: frozenset[Role] = frozenset()
    """Roles whose pass `loss` looks at. "policy" (old log-probs) is added by the loop where a batch takes more than one
    optimizer step; with one, old := the detached current log-probs."""
    skips_no_signal: bool = False
    """True promises that rows with all-zero advantages have zero loss terms (no KL, no entropy bonus, no critic): then
    their passes are left out. They still count in denominators."""
    metrics: tuple[Metric, ...] = ()
    """Definitions of what `loss` and `value_loss` report, as `Metric("policy/entropy", "nats", "…")`."""
    two_pass: bool = False
    """`select` is to be called with the current policy's outputs over the whole mini-batch."""
    zero_on_equal_group: bool = False
    """True promises advantages of exactly 0 where all samples of a group earned the same: by rule, for the rounding of
    a mean or a deviation would become a direction to train in."""
    across_groups: bool = False
    """True: a group's advantages depend on the other groups of the batch, as when they are whitened over it."""
    on_shift: Literal["same"] | None = None
    """What rewards that are all larger by the same do to advantages; None: nothing is promised."""
    on_scale: Literal["same", "linear"] | None = None
    """What rewards multiplied by a positive number do to advantages; None: nothing is promised."""
    max_tokens: int = 0
    """The limit of an answer, known once a run begins."""

    def __init__(self, config: AlgorithmConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()
        if not isinstance(self.config, type(self).Config):
            raise ConfigError(
                f"{type(self).__qualname__} reads a {type(self).Config.__name__}, and was given a "
                f"{type(self.config).__name__}; give {type(self).__qualname__}.Config(…)"
            )

    @classmethod
    def joined(cls, *others: type[Joined]) -> type[Joined]:
        if others:
            raise ConfigError(
                f"{cls.__qualname__} is no half of an algorithm; allowed beside a + are subclasses of Estimator and "
                "Objective (treadle.algorithms.policy_gradient)"
            )
        return cls

    def first_step(self, role: Role) -> int:
        """Steps that pass before a role is updated (critic warm-up delays the policy)."""
        return 0

    @property
    def trains(self) -> tuple[Role, ...]:
        """The roles that learn."""
        return ("policy", "critic") if "critic" in self.uses else ("policy",)

    @property
    def passes_before_loss(self) -> frozenset[Role]:
        """`before_loss`, and the old log-probs where several optimizer steps need them, less what is there already."""
        several = frozenset[Role]({"policy"} if self.config.epochs * self.config.minibatches > 1 else ())
        return (self.before_loss | several) - self.before_advantages

    def estimate(self, batch: Batch, version: int = 0) -> Batch:
        """`advantages` on the trained tokens of a full batch, and rows without signal marked. `version` is the
        policy's.

        Raises TrainingError for a result that is not the batch with an advantage for each token.
        """
        compact = batch.compact()
        return self._marked(batch.expanded(self._checked(self.advantages(compact), compact)))

    def _marked(self, batch: Batch) -> Batch:
        """With rows without signal marked, but for batches that a pass of the policy or the reference has seen: later
        passes must be cut the same way, or ratio and KL of equal weights would differ from 1 and 0 in their last
        bits."""
        cut_already = self.before_advantages & {"policy", "reference"}
        return batch.mark_signal() if self.skips_no_signal and not cut_already else batch

    # ------------------------------------------------------------------ generation

    def requests(self, prompt: Prompt) -> list[Request]:
        """The samples to ask of a prompt."""
        return [Request(prompt)] * self.config.group_size

    def keep(self, group: Group) -> str | None:
        """None to train this group, or why it is filtered (it then gives its slot back and is not counted)."""
        return None

    # ------------------------------------------------------------------ training

    def advantages(self, batch: Batch) -> Batch:
        """Fill `advantage_T` (and `return_T` for a critic); may narrow `mask_T`. The whole batch at once."""
        self._undefined("advantages(batch)")

    def select(self, batch: Batch, outputs: Outputs) -> Batch:
        """Narrow the mask or set weights from the current policy over the whole mini-batch (`two_pass`)."""
        return batch

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        """Per-token terms of the policy objective for some whole trajectories."""
        self._undefined("loss(batch, outputs)")

    def value_loss(self, batch: Batch, outputs: Outputs) -> Loss:
        """Per-token terms of the critic's objective."""
        self._undefined("value_loss(batch, outputs)")

    # ------------------------------------------------------------------ state

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Adapt coefficients to what a step measured, by the names of `metrics.jsonl` (`policy/…` where the policy
        was updated)."""

    def state(self) -> dict[str, Any]:
        """What must survive a restart (an adaptive coefficient)."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    # ------------------------------------------------------------------ help for subclasses

    def term(self, term_T: Tensor, coefficient: float = 1.0) -> Term:
        """One addend of the loss, put together as the configuration says."""
        return Term(term_T, self.config.aggregate, self.config.constant_length, coefficient)

    def old_logprob(self, batch: Batch, outputs: Outputs) -> Tensor:
        """Log-probs at the weights the step started with; float32 [T].

        With one optimizer step per batch they are the current ones, detached: the ratio is exactly 1 and no separate
        pass is needed.
        """
        if batch.old_logprob_T is not None:
            return batch.old_logprob_T
        assert outputs.logprob_T is not None
        return outputs.logprob_T.detach()

    # ------------------------------------------------------------------ mistakes of subclasses

    def _checked(self, found: Any, batch: Batch) -> Batch:
        """What `advantages` made of this compact batch, if it can be used."""
        from torch import Tensor

        fault = None
        if not isinstance(found, Batch):
            fault = f"a {type(found).__name__}"
        elif found.advantage_T is None:
            fault = "a Batch without advantage_T"
        else:
            for name in ("advantage_T", "return_T", "weight_T", "mask_T"):
                value_T = getattr(found, name)
                if isinstance(value_T, Tensor) and value_T.shape != batch.token_T.shape:
                    fault = f"a Batch whose {name} has shape {tuple(value_T.shape)}"
                elif not isinstance(value_T, Tensor | None):
                    fault = f"a Batch whose {name} is a {type(value_T).__name__}"
        if fault is not None:
            raise TrainingError(
                f"{type(self).__qualname__}.advantages returned {fault}; allowed: batch.replace(advantage_T=…) with "
                f"one value for each of the {len(batch.token_T)} tokens"
            )
        return found

    def _undefined(self, method: str) -> NoReturn:
        raise TrainingError(f"{type(self).__qualname__} does not define {method}; a subclass of Algorithm must")
