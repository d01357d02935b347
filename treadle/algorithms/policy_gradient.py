"""What all policy-gradient algorithms have in common, and the two halves that each is made of.

An *estimator* says how good each token was (`advantages`), an *objective* what that does to the policy (`surrogate`).
The file of a paper holds the half that it is about. `algorithm: {name: gspo}` or `{name: rloo}` is that half and a
usual other one (`group_relative`, `clip`); `{name: gspo+rloo}` names both. Where the two have a default for the same
key, the objective's counts.

Loss of a token, with the parts that have a coefficient:

    w · surrogate(π, π_p, A) + β · KL(π, π_ref) − η · H(π)

w and π_p are of `correction.py`. The KL may be charged to the reward instead. Suffixes: N trajectories · T trained
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from treadle.algorithms.advantages import samples
from treadle.algorithms.base import Algorithm, AlgorithmConfig, Role
from treadle.algorithms.correction import CorrectionConfig, corrected, interpolated, weights
from treadle.algorithms.joining import join
from treadle.algorithms.kl import Estimator as KLEstimator
from treadle.algorithms.kl import adapted, kl
from treadle.algorithms.metrics import KL_REFERENCE, POLICY_METRICS, policy_metrics
from treadle.config import key
from treadle.config.plugins import Joined
from treadle.errors import ConfigError, TrainingError
from treadle.handles import Loss, Outputs
from treadle.types import Provenance

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch
    from treadle.types import Group


class PolicyGradientConfig(AlgorithmConfig):
    by_token: ClassVar[bool] = False
    """Whether the tokens of one trajectory may have different advantages."""

    kl_coefficient: float = key("weight of the KL to the reference; 0: no reference", default=0.0, ge=0, le=1e3)
    kl_in: Literal["loss", "reward"] = key("where the KL is charged", default="loss")
    kl_estimator: KLEstimator = key(
        "k1, k2, k3, abs; with +: gradient of k2, the right one in a loss (see kl.py)", default="k3+"
    )
    kl_target: float | None = key("adapts kl_coefficient to this KL, nats per token", default=None, gt=0, le=1e3)
    entropy_coefficient: float = key("weight of the entropy bonus", default=0.0, ge=0, le=1e3)
    dynamic_sampling: bool = key(
        "drop groups whose rewards are all equal and sample others in their place", default=False
    )
    truncated: Literal["train", "reject"] = key(
        "answers cut at the token limit: trained, or rejected (no loss, no baseline, no denominator)", default="train"
    )
    overlong_share: float = key(
        "last part of the token limit in which an answer loses reward, more with every token; 0: none",
        default=0.0,
        ge=0,
        le=1,
    )
    overlong_penalty: float = key("what an answer at the limit loses by that", default=1.0, ge=0, le=1e6)
    correction: CorrectionConfig = key("of the gap between sampler and trainer", default=CorrectionConfig)

    @model_validator(mode="after")
    def _policy_gradient_rules(self) -> PolicyGradientConfig:
        if self.kl_coefficient > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator is k1, whose expected gradient in a loss is zero; use k1+ (its value, the right "
                "gradient), k2, k3, abs, k3+ or abs+, charge it with kl_in=reward, or set kl_coefficient=0"
            )
        if self.kl_target is not None and self.kl_coefficient == 0:
            raise ValueError(
                "kl_target adapts kl_coefficient by factors, so it cannot start at 0; "
                "set kl_coefficient above 0 (0.01, say) or leave kl_target out"
            )
        return self


class GroupConfig(PolicyGradientConfig):
    """Keys of an estimator that compares the samples of a prompt with each other."""

    @model_validator(mode="after")
    def _group_rules(self) -> GroupConfig:
        if self.group_size < 2:
            raise ValueError(
                f"group_size is 1, but {self.name} compares the samples of a prompt with each other and would never "
                "learn from one; allowed: 2 or more (8 is usual). For one sample per prompt use name=ppo"
            )
        return self


@dataclass(frozen=True, slots=True)
class Surrogate:
    """What an objective makes of the tokens: terms to be minimised, and a bool mask of those whose gradient it cut or
    bounded (None: of none)."""

    term_T: Tensor
    cut_T: Tensor | None = None


class PolicyGradient(Algorithm):
    """Base of both halves, and of algorithms that are both."""

    Config: ClassVar[type[AlgorithmConfig]] = PolicyGradientConfig
    config: PolicyGradientConfig
    metrics = (*POLICY_METRICS, KL_REFERENCE)
    needs = frozenset({"logprob", "entropy"})
    skips_no_signal = True
    partner: ClassVar[str] = ""
    """Module of the other half, for a class that is one."""

    def __init__(self, config: AlgorithmConfig | None = None) -> None:
        super().__init__(config)
        for half in type(self).__mro__:
            keys = vars(half).get("Config")
            if isinstance(keys, type) and not isinstance(self.config, keys):
                raise ConfigError(
                    f"the configuration of {type(self).__qualname__} lacks the keys of {half.__qualname__}; write a "
                    "Config that is derived from both halves' own, or join them: Half.joined(OtherHalf)"
                )
        self.kl_coefficient = self.config.kl_coefficient
        charged = self.kl_coefficient > 0
        policy, reference = frozenset[Role]({"policy"}), frozenset[Role]({"reference"})
        if charged:
            self.uses = self.uses | reference
        if charged and self.config.kl_in == "reward":
            self.before_advantages = self.before_advantages | policy | reference
        elif charged:
            self.before_loss = self.before_loss | reference
        if self.config.correction.needs_pass:
            self.before_advantages = self.before_advantages | policy
        if (charged and self.config.kl_in == "reward") or self.config.overlong_share > 0:
            # Advantages are of the charged rewards: what holds for those that were recorded is not promised.
            self.zero_on_equal_group, self.on_shift, self.on_scale = False, None, None
        # A critic, a KL and an entropy bonus learn from rows whose rewards say nothing, too.
        in_loss = charged and self.config.kl_in == "loss"
        if in_loss or self.config.entropy_coefficient > 0 or "critic" in self.uses:
            self.skips_no_signal = False

    @classmethod
    def joined(cls, *others: type[Joined]) -> type[Any]:
        return join((cls, *others), PolicyGradient)

    @property
    def passes_before_loss(self) -> frozenset[Role]:
        found = super().passes_before_loss
        return found if self.config.correction.proximal == "step" else found - {"policy"}

    # ------------------------------------------------------------------ generation

    def keep(self, group: Group) -> str | None:
        if not self.config.dynamic_sampling:
            return None
        values = {s.reward.value for s in group.usable if s.reward is not None}
        return "all rewards are equal" if len(values) < 2 else None

    # ------------------------------------------------------------------ before the update

    def estimate(self, batch: Batch, version: int = 0) -> Batch:
        config = self.config
        if config.correction.proximal == "interpolated":
            batch = batch.replace(extras_T={**batch.extras_T, "age_T": version - batch.version_T})
        if config.overlong_share > 0:
            batch = batch.replace(extras_N={**batch.extras_N, "overlong_N": self._overlong(batch)})
        compact = batch.compact()
        if config.correction.needs_pass or config.truncated == "reject":
            compact = self._narrowed(compact)
        if bool(compact.mask_T.all()):
            return self._estimated(batch, compact)
        before_N, batch = batch.trained_N, batch.expanded(compact)
        del compact  # as large as the batch
        rejected_N = (_by_sample(batch, before_N, "sum") > 0) & (_by_sample(batch, batch.trained_N, "sum") == 0)
        return self._estimated(batch, batch.compact(), ~rejected_N)

    def _narrowed(self, batch: Batch) -> Batch:
        """A compact batch with importance weights, and a mask without what is rejected."""
        if self.config.truncated == "reject":
            batch = batch.replace(mask_T=batch.mask_T & ~batch.truncated_N[batch.row_T])
        return corrected(batch, self.config.correction) if self.config.correction.needs_pass else batch

    def _estimated(self, batch: Batch, compact: Batch, keep_N: Tensor | None = None) -> Batch:
        """Advantages of the rows to keep: a sample of which nothing is left is in no baseline. Its rows have no trained
        token, so those of the others stay where they are."""
        part = compact if keep_N is None or bool(keep_N.all()) else compact.select(keep_N.nonzero()[:, 0])
        found = self._checked(self.advantages(self._charged(part.replace(counts=None))), part)
        names = ("advantage_T", "return_T", "weight_T", "mask_T", "extras_T")
        compact = compact.replace(**{name: getattr(found, name) for name in names})
        if len(found) == len(compact):
            compact = compact.replace(signal_N=found.signal_N, extras_N=found.extras_N)
        return self._marked(batch.expanded(compact))

    def _overlong(self, batch: Batch) -> Tensor:
        """What each row's sample loses for its length, that of its longest trajectory; float64 [N]."""
        if not self.max_tokens:
            raise TrainingError(
                "overlong_share needs the token limit of an answer, which a run takes from sampling.max_tokens; "
                f"outside of one set {type(self).__name__}().max_tokens"
            )
        span = self.max_tokens * self.config.overlong_share
        sampled_N = batch.count_N(batch.provenance_T == Provenance.SAMPLED).double()
        over_N = ((sampled_N - self.max_tokens + span) / span).clamp(0, 1)
        return self.config.overlong_penalty * _by_sample(batch, over_N, "amax")

    def _charged(self, batch: Batch) -> Batch:
        """With the rewards that advantages are made of; the recorded ones stay what they are."""
        config, reward_N, reward_T = self.config, batch.reward_N, batch.reward_T
        if self.kl_coefficient > 0 and config.kl_in == "reward":
            assert batch.old_logprob_T is not None
            assert batch.reference_logprob_T is not None
            price_T = self.kl_coefficient * kl(batch.old_logprob_T, batch.reference_logprob_T, config.kl_estimator)
            reward_T = reward_T - price_T
            reward_N = reward_N - _by_sample(batch, batch.sum_N(price_T.double()), "sum")
        if config.overlong_share > 0:
            price_N, filled_N = batch.extras_N["overlong_N"], batch.length_N > 0
            reward_N = reward_N - price_N
            reward_T = reward_T.index_add(0, batch.offset_N1[1:][filled_N] - 1, -price_N[filled_N].to(reward_T.dtype))
        return batch.replace(reward_N=reward_N, reward_T=reward_T)

    # ------------------------------------------------------------------ the update

    def old_logprob(self, batch: Batch, outputs: Outputs) -> Tensor:
        assert outputs.logprob_T is not None
        match self.config.correction.proximal:
            case "step":
                return super().old_logprob(batch, outputs)
            case "sampler":
                return batch.sampling_logprob_T
            case "interpolated":
                return interpolated(batch, outputs.logprob_T.detach())

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        """What the advantages do to the policy, token by token; the objective's half."""
        self._undefined("surrogate(batch, logprob_T, old_T)")

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert outputs.logprob_T is not None
        assert outputs.entropy_T is not None
        config, old_T = self.config, self.old_logprob(batch, outputs)
        found = self.surrogate(batch, outputs.logprob_T, old_T)
        metrics, peaks = policy_metrics(outputs, old_T, found.cut_T)
        weight_T = batch.weight_T
        if config.correction.proximal == "interpolated" and config.correction.weight != "none":
            weight_T = weights(batch, old_T, config.correction)
        if weight_T is not None:
            metrics["weight"] = weight_T
            peaks["weight_max"] = weight_T
        terms = [self.term(found.term_T if weight_T is None else found.term_T * weight_T)]
        if batch.reference_logprob_T is not None:
            kl_T = kl(outputs.logprob_T, batch.reference_logprob_T, config.kl_estimator)
            metrics["kl_reference"] = kl_T.detach()
            if config.kl_in == "loss":
                terms.append(self.term(kl_T, self.kl_coefficient))
        if config.entropy_coefficient > 0:
            terms.append(self.term(-outputs.entropy_T, config.entropy_coefficient))
        return Loss(terms, metrics, peaks)

    # ------------------------------------------------------------------ the adaptive coefficient

    def after_step(self, metrics: Mapping[str, float]) -> None:
        # Not measured in critic warm-up, and not a number where every optimizer step was skipped.
        measured = metrics.get("policy/kl_reference", math.nan)
        if self.config.kl_target is not None and math.isfinite(measured):
            self.kl_coefficient = adapted(self.kl_coefficient, measured, self.config.kl_target)

    def state(self) -> dict[str, Any]:
        return {"kl_coefficient": self.kl_coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        # A checkpoint of before every algorithm had one: then it was fixed.
        self.kl_coefficient = state.get("kl_coefficient", self.config.kl_coefficient)


class Estimator(PolicyGradient):
    """Base of the half that defines `advantages`."""

    partner = "clip"


class Objective(PolicyGradient):
    """Base of the half that defines `surrogate`."""

    partner = "group_relative"


def uncharged(config: PolicyGradientConfig, why: str) -> None:
    """Raises ValueError where something is taken off rewards that an estimator cannot take it off."""
    if config.kl_coefficient > 0 and config.kl_in == "reward":
        raise ValueError(f"kl_in=reward cannot be charged: {why}; use kl_in=loss")
    if config.overlong_share > 0:
        raise ValueError(f"overlong_share cannot be charged: {why}; set overlong_share=0 and let the reward say it")


def whole_sequences(config: PolicyGradientConfig, what: str, mend: str) -> None:
    """Raises ValueError where an objective looks at whole sequences and the estimator at single tokens."""
    if config.by_token:
        raise ValueError(
            f"{what} has one term for a whole answer, but {config.name} gives each token an advantage of its own, so "
            f"there is none for the answer; {mend}, or use an estimator of whole answers (group_relative, rloo, …)"
        )


def _by_sample(batch: Batch, value_N: Tensor, how: str) -> Tensor:
    """Combined over the trajectories of each sample, by row."""
    of_N = samples(batch).of_N
    zero_S = value_N.new_zeros(int(of_N.max()) + 1 if len(of_N) else 0)
    return zero_S.scatter_reduce(0, of_N, value_N, how, include_self=False)[of_N]
