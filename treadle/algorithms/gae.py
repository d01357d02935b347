"""Generalised advantage estimation over packed sequences, as a scan.

Suffixes: N trajectories · N1 is N + 1 · T trained tokens of all of them, laid end to end · K blocks · B positions of a
block. The tokens of a compact batch are the policy's actions: what a tool or an environment said in between is not
among them, so the estimate steps over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64


def gae(reward_T: Tensor, value_T: Tensor, bootstrap_N: Tensor, offset_N1: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages, [T] (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    A_t = Σ_k (γλ)^k · δ_{t+k} to the end of the trajectory, with δ_t = r_t + γ·V_{t+1} − V_t. `bootstrap_N` is the
    value after a trajectory's last token: 0 where it terminated, the critic's where it was truncated.
    """
    filled_M = offset_N1.diff().nonzero()[:, 0]
    next_T = value_T.roll(-1)
    next_T[offset_N1[1:][filled_M] - 1] = bootstrap_N[filled_M].to(value_T.dtype)
    return discounted_sums(reward_T + gamma * next_T - value_T, offset_N1, gamma * lam)


def discounted_sums(term_T: Tensor, offset_N1: Tensor, decay: float) -> Tensor:
    """y_t = Σ_k decay^k · x_{t+k} to the end of each trajectory, [T].

    Each trajectory is cut into blocks; one matrix product sums inside all of them, and the sums carried from block to
    block are the same problem, 1/B as long. Only powers ≤ 1 of the decay are ever formed and nothing is divided by
    them, so no length and no decay in [0, 1] over- or underflows.
    """
    import torch

    length_N = offset_N1.diff()
    block_N1 = torch.cat([offset_N1.new_zeros(1), ((length_N + BLOCK - 1) // BLOCK).cumsum(0)])
    blocks = int(block_N1[-1])
    at_T = torch.arange(len(term_T), device=term_T.device)
    at_T += torch.repeat_interleave(block_N1[:-1] * BLOCK - offset_N1[:-1], length_N)
    term_KB = term_T.new_zeros(blocks * BLOCK).scatter_(0, at_T, term_T).view(blocks, BLOCK)

    power_B = decay ** torch.arange(BLOCK + 1, dtype=term_T.dtype, device=term_T.device)
    step_BB = torch.arange(BLOCK, device=term_T.device).unsqueeze(1) - torch.arange(BLOCK, device=term_T.device)
    sum_KB = term_KB @ power_B[step_BB.clamp(min=0)].tril()
    if blocks > int((length_N > 0).sum()):
        carry_K = discounted_sums(sum_KB[:, 0], block_N1, decay**BLOCK).roll(-1)
        carry_K[block_N1[1:][length_N > 0] - 1] = 0  # the last block of a trajectory has nothing after it
        sum_KB.addr_(carry_K, power_B[1:].flip(0))
    return sum_KB.view(-1)[at_T]


def running_sums(term_T: Tensor, offset_N1: Tensor) -> Tensor:
    """y_t = Σ_{k ≤ t} x_k from the start of each trajectory, [T]; float64, for sums of long batches are subtracted."""
    import torch

    sum_T1 = torch.nn.functional.pad(term_T.double().cumsum(0), (1, 0))
    return sum_T1[1:] - torch.repeat_interleave(sum_T1[offset_N1[:-1]], offset_N1.diff())
