"""M2PO: the second moment of the log-ratios is bounded, over the batch (Zheng et al. 2025, arXiv 2510.01161).

    −r·A, without the tokens of the largest (log r)², as many as it takes for the mean over the others to be at most τ

Both are of the tokens that go on away from π_p (A > 0 and r > 1, or A < 0 and r < 1; Algorithm 1 of the paper); all
others stay. A clip at a fixed ratio cuts far more as data grow stale; this one cuts just the outliers that make the
mean large. It looks at a whole mini-batch, so the current log-probs take a pass of their own. Tokens left out still
count in the denominator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.kl import FAR
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate
from treadle.algorithms.ratio import ratio
from treadle.config import key, key_of
from treadle.handles import Aggregate, Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class M2POConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="m2po")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")
    limit: float = key("τ: largest mean of the squared log-ratio, nats²", default=0.04, gt=0, le=1e3)


class M2PO(Objective):
    Config = M2POConfig
    config: M2POConfig
    two_pass = True

    def select(self, batch: Batch, outputs: Outputs) -> Batch:
        import torch

        assert outputs.logprob_T is not None
        assert batch.advantage_T is not None
        moved_T = (outputs.logprob_T - self.old_logprob(batch, outputs)).double().clamp(-FAR, FAR)
        away_T = ((batch.advantage_T > 0) & (moved_T > 0)) | ((batch.advantage_T < 0) & (moved_T < 0))
        largest_A, order_A = moved_T[away_T].square().sort(descending=True)
        # Mean over what is left once the first 0, 1, 2, … are out: it falls with each.
        left_A = largest_A.flip(0).cumsum(0).flip(0)
        count_A = torch.arange(len(left_A), 0, -1, device=moved_T.device)
        out = int((left_A > self.config.limit * count_A * (1 + 1e-12)).sum())
        chosen_T = away_T.nonzero()[:, 0][order_A[:out]]
        keep_T = torch.ones_like(moved_T, dtype=torch.float32).index_fill(0, chosen_T, 0.0)
        return batch.replace(extras_T={**batch.extras_T, "moves_T": keep_T})

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        keep_T = batch.extras_T["moves_T"]
        return Surrogate(-ratio(logprob_T, old_T) * batch.advantage_T * keep_T, keep_T == 0)
