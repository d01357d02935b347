"""What every policy objective reports of itself. Suffix T: trained tokens; all without gradient.

==========================  ======================================================================================
metric                      definition (a mean over trained tokens of rows with signal, unless it says maximum)
==========================  ======================================================================================
ratio, ratio_max            π / π_old; mean, and maximum
clip_fraction               share of tokens whose gradient the clip has cut
kl_old                      k3 estimate of KL(π_old ‖ π): how far the optimizer steps on this batch have gone
entropy                     of the policy at the token's position, nats
sampler_logprob_gap, _max   |log π_old − log π_sampler|: what the trainer and the rollout engine disagree by, and what
                            the weights have moved since the token was sampled; mean, and maximum
kl_reference                estimate of KL(π ‖ π_ref) by the configured estimator
==========================  ======================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.kl import kl
from treadle.algorithms.ratio import ratio

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch
    from treadle.handles import Outputs


def policy_metrics(
    batch: Batch, outputs: Outputs, old_logprob_T: Tensor, cut_T: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Metrics and peaks for `Loss`; see the table above."""
    assert outputs.logprob_T is not None
    logprob_T = outputs.logprob_T.detach()
    ratio_T = ratio(logprob_T, old_logprob_T)
    gap_T = (old_logprob_T - batch.sampling_logprob_T).abs()
    metrics = {
        "ratio": ratio_T,
        "clip_fraction": cut_T.to(logprob_T.dtype),
        "kl_old": kl(old_logprob_T, logprob_T, "k3"),
        "sampler_logprob_gap": gap_T,
    }
    if outputs.entropy_T is not None:
        metrics["entropy"] = outputs.entropy_T.detach()
    return metrics, {"ratio_max": ratio_T, "sampler_logprob_gap_max": gap_T}
