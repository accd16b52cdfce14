"""Parameters that FSDP2 shards over processes: each process works on its own rows, and sums over rows are added up.

A sharded parameter is a `DTensor`. To these functions an ordinary tensor is one that a process holds whole.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from .blocks import Tensors, first_row_of, local, mesh_of, rows_of_a_process


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
    start = first_row_of(size, mesh)
    part = tensor.narrow(dim, start, min(rows_of_a_process(size, mesh), size - start)).clone()
    return DTensor.from_local(
        part, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def copy_whole_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    dim = target.placements[0].dim if isinstance(target, DTensor) else 0
    local(target).copy_(local(shard_like(source, target, dim)))


def gathered(matrix: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """The matrices of all processes that hold rows of `tensors`, one below the other."""
    mesh = mesh_of(tensors)
    if mesh is None:
        return matrix
    matrices = [torch.empty_like(matrix) for _ in range(mesh.size())]
    dist.all_gather(matrices, matrix.contiguous(), group=mesh.get_group())
    return torch.cat(matrices)


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
