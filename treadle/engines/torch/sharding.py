"""What is special to sharded models (FSDP2, with replicas HSDP).

Each decoder layer is a unit whose weights exist whole only while it computes. What is left, the embeddings, the last
norm and the head, is one more; it stays whole from the forward to the backward pass. So does a value head, a unit of
its own because it computes in float32.

Gradients are summed over ranks, not averaged: each rank divides by the counts of the whole mini-batch already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from treadle.engines.torch.mesh import REPLICATE, SHARD, most
from treadle.errors import ModelError

if TYPE_CHECKING:
    from treadle.engines.torch.network import Network

T = TypeVar("T")


@torch.no_grad()
def shard(network: Network, mesh: DeviceMesh, *, trainable: bool, cpu_offload: bool) -> None:
    """Spread the weights of rank 0's network over all ranks, tensor by tensor; others may have none (`load_sharded`).

    Trained weights are float32, whatever computes. Raises `ModelError` where a weight does not lie as it should.
    """
    if not network.layers:
        raise ModelError(f"{network.name} has no decoder layers that are known as such, so it cannot be sharded")
    half = network.dtype if trainable and network.dtype.itemsize < 4 else None
    taken = _emptied(network.root, torch.float32 if half else None)
    buffers = dict(network.root.named_buffers())
    cuda = mesh.device_type == "cuda"  # not run by the tests
    offload = CPUOffloadPolicy(pin_memory=cuda) if cpu_offload else OffloadPolicy()
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False) if half else exact
    for layer in network.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    if network.value_head is not None:
        fully_shard(network.value_head, mesh=mesh, mp_policy=exact, offload_policy=offload, reshard_after_forward=False)
    fully_shard(network.root, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    for unit in units(network.root):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # a factor is otherwise a kind of sum that only NCCL knows
    network.mesh, network.device = mesh, torch.device(mesh.device_type)
    network.root.to_empty(device="cpu" if cpu_offload else network.device)
    check(network, mesh)
    for name, parameter in network.root.named_parameters():
        _fill(parameter, taken.pop(name))
    for module in network.root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(network.device))
    for name, buffer in network.root.named_buffers():  # not in any checkpoint, or not on this rank
        if dist.get_rank() == 0:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, 0)


def units(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def part(root: nn.Module) -> None:
    """Let go of weights that are whole: after passes without gradient some still are, and would not see an update."""
    for unit in units(root):
        unit.reshard()


@torch.no_grad()
def check(network: Network, mesh: DeviceMesh) -> None:
    """Every weight is cut by its rows over the "shard" ranks and every layer is a unit; raises `ModelError` if not."""
    for name, p in network.root.named_parameters():
        rows = _rows(p.shape[0], mesh)
        expected = (rows.stop - rows.start, *p.shape[1:])
        found = tuple(p.to_local().shape) if isinstance(p, DTensor) and p.device_mesh == mesh else "not sharded"
        if found != expected:
            raise ModelError(f"{network.name}: of '{name}' {tuple(p.shape)} this rank has {found}, not {expected}")
    expected = {network.root, *network.layers} | ({network.value_head} if network.value_head is not None else set())
    if (found := set(units(network.root))) != expected:
        raise ModelError(f"{network.name} has {len(found)} sharded units, not {len(expected)}: its layers and the rest")


def passes(network: Network, own: Sequence[T]) -> Iterator[T]:
    """This rank's passes one by one, and then, unseen, as many that change nothing as other ranks have more.

    With gradient, ranks exchange it once: in the last pass. Afterwards no weights are whole any more.
    """
    if network.mesh is None:
        yield from own
        return
    root = network.root
    assert isinstance(root, FSDPModule)
    count = most(len(own), network.mesh)
    for i in range(count):
        root.set_requires_gradient_sync(i == count - 1)
        root.set_is_last_backward(i == count - 1)
        if i < len(own):
            yield own[i]
        elif (nothing := network.idle()).requires_grad:
            nothing.backward()
    part(root)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_here(tensor: Tensor) -> slice:
    """Those of a tensor's rows that this rank has."""
    return _rows(tensor.shape[0], tensor.device_mesh if isinstance(tensor, DTensor) else None)


def like(parameter: Tensor, own: Tensor) -> Tensor:
    """`own` as this rank's part of a tensor that is sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """All of a sharded tensor in this precision, on rank 0. A collective."""
    converted = tensor.to(dtype) if isinstance(tensor, DTensor) else tensor
    full = converted.full_tensor() if isinstance(converted, DTensor) else tensor
    return full if dist.get_rank() == 0 else None


def total_norm(own: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The norm of a gradient of which each rank has a part of norm `own`: the same bits on every rank."""
    if mesh is None:
        return own
    square = own.to(mesh.device_type, torch.float64).square()
    dist.all_reduce(square, group=mesh.get_group(SHARD))
    dist.broadcast(square, group=mesh.get_group(REPLICATE), group_src=0)
    return square.sqrt().to(own)


def _rows(count: int, mesh: DeviceMesh | None) -> slice:
    """Equal numbers, but for the last ranks, which get fewer or none."""
    at, ranks = (mesh.get_local_rank(SHARD), mesh[SHARD].size()) if mesh is not None else (0, 1)
    each = -(-count // ranks)
    return slice(min(count, at * each), min(count, (at + 1) * each))


def _emptied(root: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Parameters by name, of which the modules keep no more than their shapes, in this precision (None: as it is).

    Swapped, not replaced, so that tied ones stay one.
    """
    taken: dict[str, Tensor] = {}
    for name, parameter in root.named_parameters():
        shape = torch.empty_like(parameter, dtype=dtype, device="meta")
        other = nn.Parameter(shape, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)
        taken[name] = other.detach()
    return taken


def _fill(parameter: Tensor, full: Tensor) -> None:
    """Give each rank its part of rank 0's tensor; `full` of other ranks is looked at for nothing."""
    assert isinstance(parameter, DTensor)
    mesh, own = parameter.device_mesh, parameter.to_local()
    if mesh.get_local_rank(REPLICATE) == 0:
        source = full if dist.get_rank() == 0 else torch.empty(parameter.shape)
        found = distribute_tensor(source.to(own.dtype), mesh[SHARD], parameter.placements[-1:], src_data_rank=0)
        own.copy_(found.to_local())
    if mesh[REPLICATE].size() > 1:
        moved = own.to(mesh.device_type)
        dist.broadcast(moved, group=mesh.get_group(REPLICATE), group_src=0)
        own.copy_(moved)
