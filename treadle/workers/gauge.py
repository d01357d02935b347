"""How fast a rank computes, whatever works there."""

from __future__ import annotations

from treadle.controller.verbs import everywhere


class Gauge:
    """Holds nothing, so it has nothing to leave the devices with."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    @everywhere
    def rate(self) -> float:
        """Operations a second of a large matrix product, while the other ranks make one, too."""
        import torch

        from treadle.engines.speed import matrix_rate

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return matrix_rate(getattr(torch, self._dtype), device)

    def offload(self) -> None:
        """Nothing is there."""

    def onload(self) -> None:
        """Nothing comes back."""
