"""Clip-Cov: tokens that would use up the entropy get no gradient (Cui et al. 2025, arXiv 2505.22617, §4.2).

    cov = (log π − mean log π)·(A − mean A) over the mini-batch

Entropy falls as a token's log-prob and its advantage vary together, and few tokens carry nearly all of it. Of those
with a covariance between `cov_low` and `cov_high`, which the clip has not cut, a share is drawn and detached, under
PPO's clip for all others. They still count in the denominator. The draw is a function of each covariance's own bits, so
it does not depend on the order of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.clip import Clip, ClipConfig
from treadle.algorithms.covariance import covariance, drawn
from treadle.algorithms.policy_gradient import Surrogate
from treadle.config import key, key_of
from treadle.handles import Aggregate, Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class ClipCovConfig(ClipConfig):
    name: str = key_of(AlgorithmConfig, "name", default="clip_cov")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")
    cov_low: float = key("smallest covariance of a token that may be drawn", default=1.0, ge=0, le=1e6)
    cov_high: float = key("largest one", default=5.0, ge=0, le=1e6)
    share: float = key("tokens drawn, of all of the mini-batch; one at least", default=2e-4, gt=0, le=1)


class ClipCov(Clip):
    Config = ClipCovConfig
    config: ClipCovConfig
    two_pass = True

    def select(self, batch: Batch, outputs: Outputs) -> Batch:
        assert outputs.logprob_T is not None
        assert batch.advantage_T is not None
        cov_T = covariance(outputs.logprob_T, batch.advantage_T)
        able_T = (cov_T > self.config.cov_low) & (cov_T < self.config.cov_high)
        cut_T = super().surrogate(batch, outputs.logprob_T, self.old_logprob(batch, outputs)).cut_T
        assert cut_T is not None
        able_T &= ~cut_T
        held_T = drawn(cov_T, able_T, self.config.share)
        return batch.replace(extras_T={**batch.extras_T, "held_T": held_T})

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        found, held_T = super().surrogate(batch, logprob_T, old_T), batch.extras_T["held_T"]
        assert found.cut_T is not None
        return Surrogate(found.term_T.where(~held_T, found.term_T.detach()), found.cut_T | held_T)
