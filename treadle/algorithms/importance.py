"""The plain policy gradient with importance weights, and its truncated form.

    −r·A                             r = π / π_p; at one optimizer step a batch its gradient is that of −A·log π
    −sg(min(r, truncate))·A·log π    with `truncate`: no token's gradient is weighted by more

No clip: whatever the ratio, a token keeps its gradient (Espeholt et al. 2018, IMPALA, arXiv 1802.01561, truncates so).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.algorithms.base import AlgorithmConfig
from treadle.algorithms.policy_gradient import Objective, PolicyGradientConfig, Surrogate
from treadle.algorithms.ratio import ratio
from treadle.config import key, key_of
from treadle.handles import Aggregate

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.batch import Batch


class ImportanceConfig(PolicyGradientConfig):
    name: str = key_of(AlgorithmConfig, "name", default="importance")
    aggregate: Aggregate = key_of(AlgorithmConfig, "aggregate", default="token-mean")
    truncate: float | None = key("largest ratio that weights a gradient; null: none", default=None, ge=1, le=1e6)


class Importance(Objective):
    Config = ImportanceConfig
    config: ImportanceConfig

    def surrogate(self, batch: Batch, logprob_T: Tensor, old_T: Tensor) -> Surrogate:
        assert batch.advantage_T is not None
        ratio_T, most = ratio(logprob_T, old_T), self.config.truncate
        if most is None:
            return Surrogate(-ratio_T * batch.advantage_T)
        held_T = ratio_T.detach().clamp(max=most)
        return Surrogate(-held_T * batch.advantage_T * logprob_T)
