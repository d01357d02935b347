"""What every policy objective reports of itself. Suffix T: trained tokens; all without gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.kl import kl
from treadle.algorithms.ratio import ratio
from treadle.metrics import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.handles import Outputs


POLICY_METRICS = (
    Metric("policy/ratio", "1", "π / π_old of a token of a row with signal"),
    Metric("policy/ratio_max", "1", "the largest of these", "max"),
    Metric("policy/clip_fraction", "share", "tokens whose gradient the objective has cut or bounded"),
    Metric("policy/kl_old", "nats", "k3 estimate of KL(π_old ‖ π): how far the step's updates have gone so far"),
    Metric("policy/entropy", "nats", "entropy of the policy where it chose a token"),
    Metric("policy/weight", "1", "importance weight by which `correction` multiplied a token's term"),
    Metric("policy/weight_max", "1", "the largest of these", "max"),
)
CRITIC_METRICS = (
    Metric("critic/value", "reward", "value of the state in which a token was chosen"),
    Metric("critic/return", "reward", "what the value should have been: GAE's advantage plus the old value"),
    Metric("critic/value_error", "reward²", "squared difference of the two"),
    Metric("critic/value_clip_fraction", "share", "tokens whose value gradient the clip has cut"),
)
KL_REFERENCE = Metric("policy/kl_reference", "nats", "estimate of KL(π ‖ π_ref) by the configured estimator")


def policy_metrics(
    outputs: Outputs, old_logprob_T: Tensor, cut_T: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Metrics and peaks for `Loss`: those of `POLICY_METRICS`."""
    assert outputs.logprob_T is not None
    logprob_T = outputs.logprob_T.detach()
    ratio_T = ratio(logprob_T, old_logprob_T)
    metrics = {
        "ratio": ratio_T,
        "clip_fraction": logprob_T.new_zeros(len(logprob_T)) if cut_T is None else cut_T.to(logprob_T.dtype),
        "kl_old": kl(old_logprob_T, logprob_T, "k3"),
    }
    if outputs.entropy_T is not None:
        metrics["entropy"] = outputs.entropy_T.detach()
    return metrics, {"ratio_max": ratio_T}
