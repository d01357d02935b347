"""KL-Cov: tokens that would use up the entropy are held back by a KL (Cui et al. 2025, arXiv 2505.22617, §4.2).

    −r·A + β·|log r| for the `share` of tokens with the largest covariance (`clip_cov.py`),   −r·A for all others

At the first optimizer step of a batch r is 1 and the KL has no slope: it acts from the second one on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.covariance import covariance, largest
from treadle.algorithms.kl import kl
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate
from treadle.algorithms.ratio import ratio
from treadle.config import key, key_of
from treadle.handles import Aggregate, Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class KLCovConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="kl_cov")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")
    share: float = key("tokens that are held back, of all of the mini-batch; one at least", default=2e-3, gt=0, le=1)
    beta: float = key("β: how strongly", default=1.0, gt=0, le=1e3)


class KLCov(Objective):
    Config = KLCovConfig
    config: KLCovConfig
    two_pass = True
    skips_no_signal = False  # a row without an advantage has covariances

    def select(self, batch: Batch, outputs: Outputs) -> Batch:
        assert outputs.logprob_T is not None
        assert batch.advantage_T is not None
        held_T = largest(covariance(outputs.logprob_T, batch.advantage_T), self.config.share)
        return batch.replace(extras_T={**batch.extras_T, "held_T": held_T})

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        held_T = batch.extras_T["held_T"]
        penalty_T = self.config.beta * kl(logprob_T, old_T, "abs")
        return Surrogate(
            -ratio(logprob_T, old_T) * batch.advantage_T + penalty_T.where(held_T, 0.0), batch.mask_T & False
        )
