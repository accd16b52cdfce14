"""Parameters that FSDP2 shards over processes: each process works on its own rows, and sums over rows are added up.

A sharded parameter is a `DTensor`. To these functions an ordinary tensor is one that a process holds whole.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

Tensors = Mapping[str, torch.Tensor]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds, not a copy.

    Example:
        >>> local(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Which row of the whole tensor is the first that this process holds, and how many it holds; a number is one row.

    Example:
        >>> held_rows(torch.ones(2))
        (0, 2)
    """
    if isinstance(tensor, DTensor):
        return _start(tensor.shape[0], tensor.device_mesh), len(tensor.to_local())
    return 0, tensor.shape[0] if tensor.dim() else 1


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the rows of all processes, which must all call this.

    Example:
        >>> whole(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, parameter: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """A whole tensor, cut along `dim` as the rows of `parameter` are; itself if they are not, or if it is cut already.

    Example:
        >>> shard_like(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    if not isinstance(parameter, DTensor) or isinstance(tensor, DTensor):
        return tensor
    mesh, size = parameter.device_mesh, tensor.shape[dim]
    start = _start(size, mesh)
    part = tensor.narrow(dim, start, min(_most_rows(size, mesh), size - start)).clone()
    return DTensor.from_local(
        part, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def copy_whole_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    dim = target.placements[0].dim if isinstance(target, DTensor) else 0
    local(target).copy_(local(shard_like(source, target, dim)))


def total(terms: Sequence[torch.Tensor], tensors: Tensors, zero: torch.Tensor) -> torch.Tensor:
    """`zero` plus all terms, and those of the other processes if they hold other rows of `tensors`.

    Example:
        >>> total([torch.tensor(1.0), torch.tensor(2.0)], {"w": torch.ones(2)}, zero=torch.tensor(0.0))
        tensor(3.)
    """
    value, mesh = torch.stack([zero, *terms]).sum(0), mesh_of(tensors)
    if mesh is not None:
        dist.all_reduce(value, group=mesh.get_group())
    return value


def total_by_group(
    terms: Sequence[torch.Tensor], groups: Sequence[int], tensors: Tensors, zeros: torch.Tensor
) -> torch.Tensor:
    """`total` of the terms of each group.

    Example:
        >>> terms = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)]
        >>> total_by_group(terms, groups=[0, 1, 1], tensors={"w": torch.ones(2)}, zeros=torch.zeros(2))
        tensor([1., 5.])
    """
    value, mesh = zeros, mesh_of(tensors)
    if terms:
        index = torch.tensor(groups, device=zeros.device)
        value = zeros.index_add(0, index, torch.stack(list(terms)).to(zeros.dtype))
    if mesh is not None:
        dist.all_reduce(value, group=mesh.get_group())
    return value


def gathered(matrix: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """The matrices of all processes that hold rows of `tensors`, one below the other."""
    mesh = mesh_of(tensors)
    if mesh is None:
        return matrix
    matrices = [torch.empty_like(matrix) for _ in range(mesh.size())]
    dist.all_gather(matrices, matrix.contiguous(), group=mesh.get_group())
    return torch.cat(matrices)


def mesh_of(tensors: Tensors) -> DeviceMesh | None:
    """The processes that `tensors` are sharded over, if they are."""
    return next((tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)), None)


def is_sharded(model: nn.Module) -> bool:
    """Whether its parameters are.

    Example:
        >>> is_sharded(nn.Linear(1, 1))
        False
    """
    return mesh_of(dict(model.named_parameters())) is not None


def is_first_process(tensors: Tensors) -> bool:
    """Whether this process is the first of those that hold parts of `tensors`, the one that writes files of them."""
    mesh = mesh_of(tensors)
    return mesh is None or mesh.get_local_rank() == 0


def reshard(model: nn.Module) -> None:
    """Let go of the whole weights that FSDP2 keeps after a forward pass: the next one gathers them anew.

    Without a backward pass it keeps some, and would not see that the rows below were changed in place.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def class_of(model: nn.Module) -> type:
    """The class that a model was made by; `fully_shard` gives it another one, derived from that.

    Example:
        >>> class_of(nn.Linear(1, 1)).__name__
        'Linear'
    """
    return type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)


def check_sharding(parameters: Tensors) -> None:
    """Raise a `ValueError` unless all parameters are sharded by rows over the same processes, or none is."""
    mesh = mesh_of(parameters)
    if mesh is None:
        return
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"model: {name!r} is whole on each process while others are sharded. Shard all trainable parameters "
                "(FSDP2), or none."
            )
        if parameter.device_mesh != mesh or tuple(parameter.placements) != (Shard(0),):
            raise ValueError(
                f"model: {name!r} is sharded as {parameter.placements}, which is not supported. Shard by rows over "
                "one group of processes: `DistributedConfig(fsdp_size=...)`, without a `tp_plan` or replicas."
            )


def _most_rows(num_rows: int, mesh: DeviceMesh) -> int:
    return math.ceil(num_rows / mesh.size())


def _start(num_rows: int, mesh: DeviceMesh) -> int:
    """As `torch.chunk` cuts: all but the last processes have the same number of rows."""
    return min(num_rows, mesh.get_local_rank() * _most_rows(num_rows, mesh))
