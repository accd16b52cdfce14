"""Walk over millions of named numbers in pieces: on all cores, in cache, in a fixed order."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from threading import Barrier
from typing import NamedTuple, TypeVar

import torch

from .shards import Tensors, held_rows, local

# 2**18 floats are 1 MiB: large enough to hide Python's overhead, small enough to stay in a cache.
BLOCK_SIZE = 2**18

Result = TypeVar("Result")


class Piece(NamedTuple):
    """Some rows of one named tensor, or all (`None`); if it is sharded, of those that this process holds."""

    name: str
    rows: slice | None


class Block(NamedTuple):
    """Pieces of named tensors that one thread works on, on a GPU by one call of a `torch._foreach_*` function for all.

    Attributes:
        pieces: all of one group.
        group: the number of that.
        on_cpu: whether they are there.

    Example:
        >>> block = Block((Piece("weight", slice(2, 4)), Piece("bias", None)))
        >>> block.of({"weight": torch.arange(6.0), "bias": torch.zeros(1)})
        [tensor([2., 3.]), tensor([0.])]
    """

    pieces: tuple[Piece, ...]
    group: int = 0
    on_cpu: bool = True

    def of(self, tensors: Tensors) -> list[torch.Tensor]:
        """Views of the pieces in `tensors`, whatever their memory layout."""
        return [rows_of(local(tensors[name]), rows) for name, rows in self.pieces]


def rows_of(tensor: torch.Tensor, rows: slice | None) -> torch.Tensor:
    """Some rows of a tensor, or all."""
    return tensor if rows is None else tensor[rows]


def inner_product(one: list[torch.Tensor], other: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the products of all numbers.

    Example:
        >>> inner_product([torch.ones(1, 2), torch.ones(1)], [torch.ones(1, 2), torch.full((1,), 3.0)])
        tensor(5.)
    """
    return sum_of([torch.dot(a.flatten(), b.flatten()) for a, b in zip(one, other, strict=True)])


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
    return sum_of([square.sum() for square in squares], dtype)


def sum_of(terms: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum of tensors of one shape, in `dtype` or their own.

    Of one it is that one: each call of torch is a moment at which threads wait for Python's lock.

    Example:
        >>> sum_of([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
        tensor([4., 6.])
    """
    dtype = dtype or terms[0].dtype
    return terms[0].to(dtype) if len(terms) == 1 else torch.stack(terms).to(dtype).sum(0)


def subtract(one: list[torch.Tensor], other: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Their differences; on a CPU one after the other, so that one is in the cache when it is used.

    Example:
        >>> list(subtract([torch.ones(2)], [torch.tensor([0.0, 3.0])]))
        [tensor([ 1., -2.])]
    """
    if one[0].is_cpu:
        return (a - b for a, b in zip(one, other, strict=True))
    return torch._foreach_sub(one, other)  # one call for all


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
        [('weight', slice(2, 3, None)), ('bias', None)]
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
            pieces.append(Piece(name, None if stop - start == num_rows else slice(start, stop)))
            filled += (stop - start) * row_size
            if filled + row_size > size:
                yield tuple(pieces)
                pieces, filled = [], 0
    if pieces:
        yield tuple(pieces)


def rows_of_a_piece(shape: torch.Size, size: int = BLOCK_SIZE) -> int:
    """How many rows of a tensor make about `size` numbers, at least one."""
    return max(1, size // max(1, shape[1:].numel()))


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


def write_scaled_sum(
    targets: list[torch.Tensor], tensors: list[torch.Tensor], others: Iterable[torch.Tensor], scale: torch.Tensor
) -> None:
    """Set `target = tensor + scale * other`, for all of them; `others` may be used up.

    Example:
        >>> target = torch.empty(2)
        >>> write_scaled_sum([target], [torch.ones(2)], [torch.ones(2)], torch.tensor(0.5))
        >>> target
        tensor([1.5000, 1.5000])
    """
    if scale.is_cpu:
        alpha = scale.item()
        for target, tensor, other in zip(targets, tensors, others, strict=True):
            torch.add(tensor, other, alpha=alpha, out=target)
    else:  # reading the scale would make the host wait
        others = list(others)
        torch._foreach_mul_(others, scale)
        torch._foreach_add_(others, tensors)
        torch._foreach_copy_(targets, others)


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

    @torch.no_grad()  # the mode is per thread
    def work(some: list[Block]) -> list[Result]:
        return [function(block) for block in some]

    if not all(block.on_cpu for block in blocks):
        return work(blocks)
    num_threads = torch.get_num_threads()
    pool = _pool(os.getpid(), num_threads)
    shares = [pool.submit(work, blocks[first::num_threads]) for first in range(num_threads)]
    try:
        wait(shares)
    finally:
        wait(shares)  # whoever is interrupted waits too, as they write into the model
    results: list[Result] = [None] * len(blocks)
    for first, share in enumerate(shares):
        results[first::num_threads] = share.result()
    return results


@cache
def _pool(process_id: int, num_threads: int) -> ThreadPoolExecutor:
    """Threads each of whose operations is its own work alone; a child process, to which none comes, makes its own."""
    pool = ThreadPoolExecutor(num_threads, "hf_deelbo", initializer=_work_alone)
    all_there = Barrier(num_threads)
    wait([pool.submit(all_there.wait) for _ in range(num_threads)])
    torch.set_num_threads(num_threads)  # the last call decides for threads that start later
    return pool


def _work_alone() -> None:
    torch.get_num_threads()  # asked first: with a thread's first question torch sets its number
    torch.set_num_threads(1)
