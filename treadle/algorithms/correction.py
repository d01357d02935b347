"""Correction for the gap between the policy that sampled and the one that trains.

Three policies have a part in a step: the *sampler* π_s that the rollout engine drew tokens from (older weights, other
kernels), the *proximal* policy π_p that the ratio of an objective is taken to, and the current one π. `proximal` says
which π_p is:

- `step`: the trainer's weights at the start of the step. With a weight or a rejection that takes a pass of its own;
  without, nothing is corrected. With a weight this is decoupled PPO (Hilton et al. 2021, arXiv 2110.00641; AReaL,
  Fu et al. 2025, arXiv 2505.24298).
- `sampler`: π_p = π_s. Two policies, no pass: the ratio itself is the correction.
- `interpolated`: log π_p = (log π_s + d · log π) / (d + 1) for a token sampled d versions ago: decoupled PPO without
  its pass (A-3PO, Li et al. 2025, arXiv 2512.06547).

The weight w = π_p / π_s multiplies what the objective says of a token: token by token, or one product for the whole
sequence. Beyond its bounds it is held at them (truncated importance sampling, Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training") or is 0 (IcePop, Ling team 2025, arXiv 2510.18855): such tokens
still count in denominators. What is *rejected* counts nowhere: no loss, no denominator, and a sample of which nothing
is left is in no baseline.

Suffixes: N trajectories · T trained tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from treadle.algorithms.ratio import SATURATION, ratio
from treadle.config import Config, key

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class CorrectionConfig(Config):
    proximal: Literal["step", "sampler", "interpolated"] = key(
        "the policy that ratios are taken to: the step's first weights, the sampler, or between them by age",
        default="step",
    )
    weight: Literal["none", "token", "sequence"] = key(
        "importance weight proximal / sampler: none, of each token, or one of the sequence", default="none"
    )
    weight_low: float = key("smallest weight", default=0.0, ge=0, le=1)
    weight_high: float = key("largest weight", default=2.0, ge=1, le=1e6)
    outside: Literal["truncate", "zero"] = key(
        "weights beyond the bounds: held at them (TIS), or 0 (IcePop)", default="truncate"
    )
    normalize: bool = key("divide weights by their mean over the batch's trained tokens", default=False)
    reject: Literal["none", "token", "sequence-sum", "sequence-mean", "sequence-max"] = key(
        "what leaves the step where proximal / sampler is out of bounds: a token by its ratio, or a sequence by the "
        "product of its ratios, their geometric mean, or the one furthest off",
        default="none",
    )
    reject_low: float = key("smallest ratio that is not rejected", default=0.5, ge=0, le=1)
    reject_high: float = key("largest ratio that is not rejected", default=2.0, ge=1, le=1e6)

    @model_validator(mode="after")
    def _rules(self) -> CorrectionConfig:
        if self.proximal == "sampler" and self.weight != "none":
            raise ValueError(
                "weight corrects from the sampler to the proximal policy, and with proximal=sampler they are one: set "
                "weight=none (the ratio is the correction), or proximal=step or interpolated"
            )
        if self.proximal != "step" and (self.reject != "none" or self.normalize):
            raise ValueError(
                f"reject and normalize need the whole batch's log-probs before the update; set proximal=step instead "
                f"of {self.proximal}"
            )
        if self.normalize and self.weight == "none":
            raise ValueError("normalize divides weights, and weight=none has none; set weight=token or sequence")
        return self

    @property
    def needs_pass(self) -> bool:
        """Whether the old log-probs of the whole batch are looked at before the advantages."""
        return self.proximal == "step" and (self.weight != "none" or self.reject != "none")


def corrected(batch: Batch, config: CorrectionConfig) -> Batch:
    """A compact batch with `weight_T` and a narrowed mask, from its old log-probs (`proximal=step`)."""
    assert batch.old_logprob_T is not None
    keep_T = batch.mask_T & kept(batch, batch.old_logprob_T, config)
    weight_T = None
    if config.weight != "none":
        weight_T = weights(batch, batch.old_logprob_T, config)
        if config.normalize:
            mean = weight_T[keep_T].double().mean()
            weight_T = weight_T / mean.float() if mean > 0 else weight_T
    return batch.replace(mask_T=keep_T, weight_T=weight_T)


def weights(batch: Batch, proximal_T: Tensor, config: CorrectionConfig) -> Tensor:
    """Importance weights, [T]; without gradient and finite whatever the log-probs."""
    weight_T = ratio(proximal_T, batch.sampling_logprob_T)
    if config.weight == "sequence":
        weight_T = _exp(batch.sum_N(proximal_T - batch.sampling_logprob_T))[batch.row_T]
    held_T = weight_T.clamp(config.weight_low, config.weight_high)
    return held_T if config.outside == "truncate" else weight_T.where(held_T == weight_T, 0.0)


def kept(batch: Batch, proximal_T: Tensor, config: CorrectionConfig) -> Tensor:
    """Tokens that are not rejected, bool [T]."""
    x_T = proximal_T - batch.sampling_logprob_T
    match config.reject:
        case "none":
            return batch.mask_T
        case "token":
            return _within(_exp(x_T), config)
        case "sequence-sum":
            return _within(_exp(batch.sum_N(x_T)), config)[batch.row_T]
        case "sequence-mean":
            return _within(_exp(batch.sum_N(x_T) / batch.trained_N.clamp(min=1)), config)[batch.row_T]
        case "sequence-max":
            outside_T = ~_within(_exp(x_T), config)
            return (batch.count_N(outside_T) == 0)[batch.row_T]


def interpolated(batch: Batch, logprob_T: Tensor) -> Tensor:
    """Log-probs between the sampler's and these, by the age of each token (`extras_T["age_T"]`, versions)."""
    age_T = batch.extras_T["age_T"].to(logprob_T.dtype)
    return batch.sampling_logprob_T + (logprob_T - batch.sampling_logprob_T) * (age_T / (age_T + 1))


def _within(ratio: Tensor, config: CorrectionConfig) -> Tensor:
    return (ratio >= config.reject_low) & (ratio <= config.reject_high)


def _exp(x: Tensor) -> Tensor:
    return x.clamp(-SATURATION, SATURATION).exp()
