"""DPPO: a trust region by divergence, not by ratio (Qi et al. 2026, "Rethinking the trust region in LLM RL", arXiv
2602.04879).

    −sg(min(r, 20))·A·log π, without gradient where a token goes on away from π_p (A > 0 and r > 1, or A < 0 and
    r < 1) and the divergence of "this token or another" already exceeds δ:

    tv   |π − π_p|                    kl   π_p·log(π_p / π) + (1 − π_p)·log((1 − π_p) / (1 − π))

A ratio clips rare tokens for changes of no weight and lets likely ones move far; a divergence does neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate
from treadle.algorithms.ratio import ratio
from treadle.config import key, key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch

TRUNCATE = 20.0


class DPPOConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="dppo")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")
    divergence: Literal["tv", "kl"] = key("what is bounded", default="tv")
    limit: float = key("δ: the divergence up to which a token moves on (kl: 0.05 is usual)", default=0.15, gt=0, le=1e3)


class DPPO(Objective):
    Config = DPPOConfig
    config: DPPOConfig

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        ratio_T, advantage_T = ratio(logprob_T, old_T).detach(), batch.advantage_T
        now_T, old_p_T = logprob_T.detach().exp(), old_T.exp()
        far_T = (now_T - old_p_T).abs() if self.config.divergence == "tv" else _binary_kl(old_p_T, now_T)
        away_T = ((advantage_T > 0) & (ratio_T > 1)) | ((advantage_T < 0) & (ratio_T < 1))
        cut_T = away_T & (far_T > self.config.limit)
        weight_T = ratio_T.clamp(max=TRUNCATE).masked_fill(cut_T, 0.0)
        return Surrogate(-weight_T * advantage_T * logprob_T, cut_T)


def _binary_kl(p_T: Tensor, q_T: Tensor) -> Tensor:
    """KL between "this token or another" under p and under q; finite where a probability is 0 or 1."""
    import torch

    tiny = torch.finfo(p_T.dtype).tiny
    rest_p_T, rest_q_T = (1 - p_T).clamp(min=0), (1 - q_T).clamp(min=0)
    logs = [torch.special.xlogy(x, x / y.clamp(min=tiny)) for x, y in ((p_T, q_T), (rest_p_T, rest_q_T))]
    return torch.nan_to_num(logs[0] + logs[1], posinf=torch.finfo(p_T.dtype).max)
