"""Millions of named numbers, walked in pieces: on all cores, in cache, in a fixed order; and the noise drawn for them.

A parameter that FSDP2 shards over processes is a `DTensor`. Each process walks its own rows, and sums over rows are
added up; to these functions an ordinary tensor is one that a process holds whole. What else sharding needs is in
`shards`.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import blake2b
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread
from time import sleep
from types import EllipsisType
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# 2**18 floats are 1 MiB: large enough to hide Python's overhead, small enough to stay in a cache.
BLOCK_SIZE = 2**18

Tensors = Mapping[str, torch.Tensor]
Result = TypeVar("Result")


# ---- A model's numbers by name --------------------------------------------------------------------------------------


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters, each once (tied weights too).

    It walks over all modules, which takes up to milliseconds: a training step does so once.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> _ = model.bias.requires_grad_(False)
        >>> list(parameters_by_name(model))
        ['weight']
    """
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def values_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """What the parameters hold, by name, not copies of it; without gradient.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> _ = values_of(parameters_by_name(model))["weight"].fill_(3)
        >>> model.weight.tolist()
        [[3.0, 3.0]]
    """
    return {name: parameter.detach() for name, parameter in parameters.items()}


# ---- Blocks ---------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Some rows of one named tensor, or all (`...`); if it is sharded, of those that this process holds."""

    name: str
    rows: slice | EllipsisType


class Block(NamedTuple):
    """Pieces of named tensors that one thread works on, on a GPU by one call of a `torch._foreach_*` function for all.

    Attributes:
        pieces: all of one group.
        group: the number of that.
        on_cpu: whether they are there.

    Example:
        >>> block = Block((Piece("weight", slice(2, 4)), Piece("bias", ...)))
        >>> block.of({"weight": torch.arange(6.0), "bias": torch.zeros(1)})
        [tensor([2., 3.]), tensor([0.])]
    """

    pieces: tuple[Piece, ...]
    group: int = 0
    on_cpu: bool = True

    def of(self, tensors: Tensors) -> list[torch.Tensor]:
        """Views of the pieces in `tensors`, whatever their memory layout."""
        return [local(tensors[name])[rows] for name, rows in self.pieces]


def blocks_of(tensors: Tensors, size: int | None = None, groups: Sequence[Iterable[str]] | None = None) -> list[Block]:
    """Cut large tensors along their first dimension and gather small ones, into blocks of about `size` numbers.

    The default size is for the CPU's caches; on a GPU, which is best given all at once, each group is one block. A
    sharded tensor is cut where the whole one would be.

    Args:
        tensors: by name.
        size: how many numbers.
        groups: names of tensors that may share a block; default is all.

    Example:
        >>> for block in blocks_of({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, size=4):
        ...     [tuple(piece) for piece in block.pieces]
        [('weight', slice(0, 2, None))]
        [('weight', slice(2, 3, None)), ('bias', Ellipsis)]
    """
    on_cpu = all(tensor.is_cpu for tensor in tensors.values())
    if size is None:
        size = BLOCK_SIZE if on_cpu else sys.maxsize
    groups = [tensors] if groups is None else groups
    return [
        Block(pieces, index, on_cpu)
        for index, names in enumerate(groups)
        for pieces in _pieces_of_blocks({name: tensors[name] for name in names}, size)
    ]


def _pieces_of_blocks(tensors: Tensors, size: int) -> Iterator[tuple[Piece, ...]]:
    pieces, filled = [], 0
    for name, tensor in tensors.items():
        row_size, step = tensor.shape[1:].numel(), rows_of_a_piece(tensor.shape, size)
        first, num_rows = held_rows(tensor)
        cuts = [0, *range(step - first % step, num_rows, step), num_rows] if num_rows * row_size else []
        for start, stop in pairwise(cuts):
            pieces.append(Piece(name, ... if stop - start == num_rows else slice(start, stop)))
            filled += (stop - start) * row_size
            if filled + row_size > size:
                yield tuple(pieces)
                pieces, filled = [], 0
    if pieces:
        yield tuple(pieces)


def rows_of_a_piece(shape: torch.Size, size: int = BLOCK_SIZE) -> int:
    """How many rows of a tensor make about `size` numbers, at least one."""
    return max(1, size // max(1, shape[1:].numel()))


def on_all_cores(function: Callable[[Block], Result], blocks: list[Block]) -> list[Result]:
    """`[function(block) for block in blocks]` without gradients, by as many threads as torch uses.

    Each block is one thread's work alone, and the results keep the order of the blocks, so that sums do not depend on
    the number of threads. None is still at work when this returns or raises. Blocks on a GPU are given to it by the
    calling thread, in its stream.

    Example:
        >>> weights = {"weight": torch.ones(6)}
        >>> on_all_cores(lambda block: block.of(weights)[0].sum().item(), blocks_of(weights, size=4))
        [4.0, 2.0]
    """
    at_work, is_over, answers = [], False, SimpleQueue()

    @torch.no_grad()  # the mode is per thread
    def results_of(some: list[Block]) -> list[Result]:
        return [function(block) for block in some]

    def work(first: int) -> None:
        at_work.append(first)  # before it looks whether all is over, and so seen by whoever said so before
        try:
            answer = [] if is_over else results_of(blocks[first::num_threads])
        except BaseException as error:
            answer = error
        at_work.pop()
        answers.put((first, answer))

    if not all(block.on_cpu for block in blocks):
        return results_of(blocks)
    num_threads = torch.get_num_threads()
    tasks = _tasks(os.getpid(), num_threads)
    try:
        for first in range(num_threads):
            tasks.put(partial(work, first))
        by_first = dict(answers.get() for _ in range(num_threads))
    finally:
        is_over = True
        while at_work:  # whoever is interrupted waits too, as they write into the model
            sleep(1e-4)
    results: list[Result] = [None] * len(blocks)
    for first, answer in sorted(by_first.items()):
        if isinstance(answer, BaseException):
            raise answer
        results[first::num_threads] = answer
    return results


@cache
def _tasks(process_id: int, num_threads: int) -> SimpleQueue:
    """For threads each of whose operations is its own work alone; a child process, to which none comes, has its own.

    No `ThreadPoolExecutor`: its locks are taken in Python, and an interrupt in the midst left them taken for ever.
    """
    tasks, are_there = SimpleQueue(), SimpleQueue()
    for _ in range(num_threads):
        Thread(target=_work_alone, args=(tasks, are_there), name="hf_deelbo", daemon=True).start()
    for _ in range(num_threads):
        are_there.get()
    torch.set_num_threads(num_threads)  # the last call decides for threads that start later
    return tasks


def _work_alone(tasks: SimpleQueue, are_there: SimpleQueue) -> None:
    torch.get_num_threads()  # asked first: with a thread's first question torch sets its number
    torch.set_num_threads(1)
    are_there.put(True)
    while True:
        tasks.get()()


# ---- Sums and updates -----------------------------------------------------------------------------------------------


def total(
    terms: Sequence[torch.Tensor], tensors: Tensors, zero: torch.Tensor, groups: Sequence[int] | None = None
) -> torch.Tensor:
    """`zero` plus all terms, and those of the other processes if they hold other rows of `tensors`.

    Args:
        terms: one of each block.
        tensors: what the blocks are of.
        zero: the shape and type of the sum.
        groups: the number of each term's group; then `zero` has a first dimension of groups, each with its own sum.

    Example:
        >>> terms, w = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)], {"w": torch.ones(2)}
        >>> total(terms, w, zero=torch.tensor(0.0)), total(terms, w, zero=torch.zeros(2), groups=[0, 1, 1])
        (tensor(6.), tensor([1., 5.]))
    """
    if groups is None:
        value = torch.stack([zero, *terms]).sum(0)
    elif terms:
        index = torch.tensor(groups, device=zero.device)
        value = zero.index_add(0, index, torch.stack(list(terms)).to(zero.dtype))
    else:
        value = zero.clone()
    if (mesh := mesh_of(tensors)) is not None:
        dist.all_reduce(value, group=mesh.get_group())
    return value


@torch.no_grad()
def check_finite(tensors: Tensors, whose: str) -> None:
    """Raise a `ValueError` that names the first tensor with a number that is nan or infinite, if there is one.

    Args:
        tensors: by name; those that do not hold floating-point numbers pass.
        whose: they are, for the error.

    Example:
        >>> check_finite({"w": torch.tensor([1.0, math.nan])}, "posterior")
        Traceback (most recent call last):
        ...
        ValueError: posterior: 'w' is not finite: it holds nan or infinite numbers.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not tensors:
        return
    device = next(iter(tensors.values())).device
    are_bad = torch.stack([(~torch.isfinite(local(tensor)).all()).float().to(device) for tensor in tensors.values()])
    are_bad = total([are_bad], tensors, zero=torch.zeros_like(are_bad))
    if are_bad.any():
        name = list(tensors)[int(are_bad.argmax())]
        raise ValueError(f"{whose}: {name!r} is not finite: it holds nan or infinite numbers.")


def squared_distance(
    one: list[torch.Tensor], other: list[torch.Tensor] | None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """The sum of the squared differences of all numbers, or of their squares if there is no other list.

    Each tensor is summed in its own precision, pairwise as torch does, and the sums of all in `dtype`.

    Example:
        >>> squared_distance([torch.ones(3)], [torch.zeros(3)])
        tensor(3., dtype=torch.float64)
    """
    if not one[0].is_cpu:
        differences = one if other is None else subtract(one, other)
        return torch.stack(torch._foreach_norm(differences, dtype=dtype)).square().sum()
    squares = (a * a for a in one) if other is None else (d.mul_(d) for d in subtract(one, other))
    return torch.stack([square.sum() for square in squares]).to(dtype).sum()


def subtract(one: list[torch.Tensor], other: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Their differences; on a CPU one after the other, so that one is in the cache when it is used.

    Example:
        >>> list(subtract([torch.ones(2)], [torch.tensor([0.0, 3.0])]))
        [tensor([ 1., -2.])]
    """
    if one[0].is_cpu:
        return (a - b for a, b in zip(one, other, strict=True))
    return torch._foreach_sub(one, other)  # one call for all


def add_scaled_(targets: list[torch.Tensor], tensors: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    """In place `target = target + scale * tensor`, for all of them.

    Example:
        >>> target = torch.ones(2)
        >>> add_scaled_([target], [torch.ones(2)], torch.tensor(0.5))
        >>> target
        tensor([1.5000, 1.5000])
    """
    if scale.is_cpu:
        alpha = scale.item()
        for target, tensor in zip(targets, tensors, strict=True):
            target.add_(tensor, alpha=alpha)
    else:  # reading the scale would make the host wait
        torch._foreach_add_(targets, torch._foreach_mul(list(tensors), scale))


# ---- Noise ----------------------------------------------------------------------------------------------------------


def draw_sample(
    target: Tensors, means: Tensors, block: Block, sigma: torch.Tensor, key: tuple[int, ...], on_cpu: bool = False
) -> None:
    """Set `w = w_bar + sigma * eps` in a block, with `eps ~ N(0, I)` that depends on `key` and the names alone.

    Not on the threads, the processes or what was drawn before, but on the kind of device that draws it.

    Args:
        target: holds w, by name; may be `means` itself.
        means: holds w_bar.
        block: the part of them to write.
        sigma: the standard deviation of the noise.
        key: decides eps, together with the kind of device.
        on_cpu: draw it on the CPU wherever the tensors are.

    Example:
        >>> w_bar, once, again = ({"w": torch.zeros(3)} for _ in range(3))
        >>> for target in (once, again):
        ...     for block in blocks_of(w_bar):
        ...         draw_sample(target, w_bar, block, torch.tensor(0.1), key=(42, 0))
        >>> torch.equal(once["w"], again["w"])
        True
    """
    noise = (
        _standard_normal(mean, means[name], rows, f"{key}/{name}", on_cpu)
        for mean, (name, rows) in zip(block.of(means), block.pieces, strict=True)
    )
    if sigma.is_cpu:
        alpha = sigma.item()
        for sample, mean, eps in zip(block.of(target), block.of(means), noise, strict=True):
            torch.add(mean, eps, alpha=alpha, out=sample)
    else:  # reading sigma would make the host wait
        noise = list(noise)
        torch._foreach_mul_(noise, sigma)
        torch._foreach_add_(noise, block.of(means))
        torch._foreach_copy_(block.of(target), noise)


def _standard_normal(
    weight: torch.Tensor, tensor: torch.Tensor, rows: slice | EllipsisType, key: str, on_cpu: bool
) -> torch.Tensor:
    """eps of `weight`, some rows of `tensor`: drawn in parts that the whole tensor decides, and cut to those rows."""
    eps = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if eps.numel() == tensor.numel() <= BLOCK_SIZE:  # the usual case: one part
        return _draw(eps, f"{key}/0", on_cpu)
    first, num_rows = held_rows(tensor)
    first, last = (first, first + num_rows) if rows is ... else (first + rows.start, first + rows.stop)
    step = rows_of_a_piece(tensor.shape)
    for start in range(first // step * step, last, step):
        stop = min(start + step, tensor.shape[0])
        low, high = max(first, start), min(last, stop)
        here = eps[low - first : high - first]
        if (low, high) == (start, stop):
            _draw(here, f"{key}/{start}", on_cpu)
        else:  # other processes hold the rest
            part = _draw(eps.new_empty((stop - start, *tensor.shape[1:])), f"{key}/{start}", on_cpu)
            here.copy_(part[low - start : high - start])
    return eps


def _draw(eps: torch.Tensor, key: str, on_cpu: bool) -> torch.Tensor:
    if on_cpu and not eps.is_cpu:  # each kind of device has numbers of its own
        return eps.copy_(_draw(torch.empty_like(eps, device="cpu"), key, on_cpu))
    seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    return eps.normal_(generator=torch.Generator(eps.device).manual_seed(seed))


# ---- Rows that this process holds -----------------------------------------------------------------------------------


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
        return first_row_of(tensor.shape[0], tensor.device_mesh), len(tensor.to_local())
    return 0, tensor.shape[0] if tensor.dim() else 1


def mesh_of(tensors: Tensors) -> DeviceMesh | None:
    """The processes that `tensors` are sharded over, if they are."""
    return next((tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)), None)


def first_row_of(num_rows: int, mesh: DeviceMesh) -> int:
    """As `torch.chunk` cuts: all but the last processes have the same number of rows."""
    return min(num_rows, mesh.get_local_rank() * rows_of_a_process(num_rows, mesh))


def rows_of_a_process(num_rows: int, mesh: DeviceMesh) -> int:
    """Of so many rows in all; the last processes may have fewer, or none."""
    return math.ceil(num_rows / mesh.size())
