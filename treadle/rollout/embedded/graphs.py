"""Decode steps replayed as CUDA graphs, so that a small model does not wait for Python. Not run by the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.rollout.embedded.plans import FlashPlan, Plan

Pass = Callable[[Plan, Tensor, Tensor, Tensor | None], Tensor]
_OFTEN = 8  # equal steps before one is captured, which takes as long as many of them
_MOST = 32  # graphs that are kept


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    plan: FlashPlan
    token_R: Tensor
    position_R: Tensor
    logit_RV: Tensor


class Replay:
    """A pass of the model. Decode steps over the same shelves with as many rows in each are captured, then replayed."""

    def __init__(self, run: Pass) -> None:
        self._run = run
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def forget(self) -> None:
        """The weights have changed: graphs hold what was made of them."""
        self._seen.clear()
        self._graphs.clear()

    def __call__(self, plan: Plan, token_R: Tensor, position_R: Tensor, keep_R: Tensor | None) -> Tensor:
        if not isinstance(plan, FlashPlan):
            return self._run(plan, token_R, position_R, keep_R)
        shape = plan.shape()
        self._seen[shape] += 1
        if shape not in self._graphs:
            if self._seen[shape] < _OFTEN:
                return self._run(plan, token_R, position_R, keep_R)
            if len(self._graphs) == _MOST:
                self.forget()
            self._graphs[shape] = self._captured(plan, token_R, position_R)
        found = self._graphs[shape]
        found.plan.take_lengths(plan)
        found.token_R.copy_(token_R)
        found.position_R.copy_(position_R)
        found.graph.replay()
        return found.logit_RV

    def _captured(self, plan: FlashPlan, token_R: Tensor, position_R: Tensor) -> _Graph:
        token_R, position_R, graph = token_R.clone(), position_R.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logit_RV = self._run(plan, token_R, position_R, None)
        return _Graph(graph, plan, token_R, position_R, logit_RV)
