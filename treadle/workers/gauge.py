"""How fast the ranks of a pool compute, whatever works there later."""

from __future__ import annotations

from treadle.controller.verbs import everywhere


class Gauge:
    """Keeps nothing on the devices between calls, so it has nothing to leave them with."""

    def __init__(self, dtype: str, ranks: int) -> None:
        self._dtype, self._ranks = dtype, ranks

    @everywhere
    def rate(self) -> float:
        """Operations a second of a large matrix product, while the other ranks make one, too."""
        import torch
        import torch.distributed as dist

        from treadle.engines.speed import matrix_rate

        if self._ranks > 1:
            dist.barrier()
        cuda = torch.cuda.is_available()
        found = matrix_rate(getattr(torch, self._dtype), torch.device("cuda" if cuda else "cpu"))
        if cuda:  # not run by the tests
            torch.cuda.empty_cache()
        return found

    def offload(self) -> None:
        """Nothing is there."""

    def onload(self) -> None:
        """Nothing comes back."""
