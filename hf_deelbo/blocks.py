"""Walk over millions of named numbers in pieces: on all cores, in cache, in a fixed order."""

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from .sharding import Tensors, held_rows, local

# 2**18 floats are 1 MiB: large enough to hide Python's overhead, small enough to stay in a cache.
BLOCK_SIZE = 2**18
# A pass over fewer blocks that does little with each number is over in some milliseconds. For as long torch's own
# threads keep their cores after an operation, waiting for the next one, and a helper would come too late.
SHORT_PASS = 16

Result = TypeVar("Result")


class Piece(NamedTuple):
    """Some rows of one named tensor, or all (`None`); if it is sharded, of those that this process holds."""

    name: str
    rows: slice | None


class Block(NamedTuple):
    """Pieces of named tensors that one thread works on, on a GPU by one call of a `torch._foreach_*` function for all.

    They are all of one group, the one with the number `group`.

    Example:
        >>> block = Block((Piece("weight", slice(2, 4)), Piece("bias", None)))
        >>> block.of({"weight": torch.arange(6.0), "bias": torch.zeros(1)})
        [tensor([2., 3.]), tensor([0.])]
    """

    pieces: tuple[Piece, ...]
    group: int = 0

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
    if other is None:
        squares = (torch.mul(a, a, out=scratch_like(a)) for a in one)
    else:
        squares = (torch.mul(d, d, out=d) for d in subtract(one, other))
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
    """Their differences; on a CPU one after the other, each in memory of `scratch_like`.

    Example:
        >>> list(subtract([torch.ones(2)], [torch.tensor([0.0, 3.0])]))
        [tensor([ 1., -2.])]
    """
    if one[0].is_cpu:
        return (torch.sub(a, b, out=scratch_like(a)) for a, b in zip(one, other, strict=True))
    return torch._foreach_sub(one, other)  # one call for all


def scratch_like(tensor: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
    """A tensor of the same shape with any content, valid until this thread asks again: it gets the same memory.

    On a CPU, what is allocated and freed for each piece at each step costs more than what is computed there: when the
    C library sees it freed it may give all the memory that a backward pass left free back to the system, and the next
    forward pass asks for it again. Also, what one operation leaves there the next one finds in the cache.

    Example:
        >>> one, other = (scratch_like(torch.ones(3)) for _ in range(2))
        >>> one.data_ptr() == other.data_ptr()
        True
    """
    if tensor.is_cpu and (memory_format == torch.contiguous_format or tensor.is_contiguous()):
        return _scratch.of(tensor.shape, tensor.dtype)
    return torch.empty_like(tensor, memory_format=memory_format)


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
    if size is None:
        on_cpu = all(tensor.is_cpu for tensor in tensors.values())
        size = BLOCK_SIZE if on_cpu else sys.maxsize
    groups = [tensors] if groups is None else groups
    return [
        Block(pieces, index)
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


def on_all_cores(function: Callable[[Block], Result], blocks: list[Block], alone_below: int = 0) -> list[Result]:
    """`[function(block) for block in blocks]` without gradients, by as many threads as torch uses.

    Each block is one thread's work alone, and the results keep the order of the blocks, so that sums do not depend on
    the number of threads. None is still at work when this returns or raises.

    Args:
        function: what is done with a block.
        blocks: all of them.
        alone_below: with fewer blocks the calling thread does it all; `SHORT_PASS` where little is done with each.

    Example:
        >>> weights = {"weight": torch.ones(6)}
        >>> on_all_cores(lambda block: block.of(weights)[0].sum().item(), blocks_of(weights, size=4))
        [4.0, 2.0]
    """
    results: list[Result] = [None] * len(blocks)
    # this thread takes those of many pieces first and the helpers those of few: small operations in two threads at
    # once would wait for Python's lock most of the time
    todo = deque(sorted(enumerate(blocks), key=lambda item: -len(item[1].pieces)))

    @torch.no_grad()  # the mode is per thread
    @on_one_core()
    def work(take: Callable[[], tuple[int, Block]]) -> None:
        while True:
            try:
                index, block = take()
            except IndexError:
                return
            results[index] = function(block)

    num_helpers = min(torch.get_num_threads(), len(blocks)) - 1 if len(blocks) >= alone_below else 0
    with on_one_core():  # until the helpers have stopped: of torch's own setter, the last call decides
        helpers = [_pool(os.getpid()).submit(work, todo.pop) for _ in range(num_helpers)]
        try:
            work(todo.popleft)
        finally:
            todo.clear()
            wait(helpers)
    for helper in helpers:
        helper.result()
    return results


@contextmanager
def on_one_core() -> Iterator[None]:
    """Within it each of torch's operations is the work of the calling thread alone; other threads are as before.

    Example:
        >>> with on_one_core():
        ...     torch.get_num_threads()
        1
    """
    num_threads = torch.get_num_threads()  # asked first: with a thread's first question torch sets its number
    set_num_threads = _setter_of_num_threads()
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(num_threads)


@cache
def _setter_of_num_threads() -> Callable[[int], None]:
    """`torch.set_num_threads` for the calling thread alone, where torch computes by OpenMP, else that function itself.

    Torch's own also sets the number of threads that start later, and each call of it slows the next passes through a
    network: those of one step, with four calls or more before them, by some milliseconds.
    """
    library = ctypes.PyDLL(torch._C.__file__)  # names are also looked up in the libraries that this one needs
    names = ["omp_set_num_threads", *(["MKL_Set_Num_Threads_Local"] if torch.backends.mkl.is_available() else [])]
    if not all(hasattr(library, name) for name in names):
        return torch.set_num_threads
    setters = [library[name] for name in names]

    def set_num_threads(num_threads: int) -> None:
        for setter in setters:
            setter(num_threads)

    return set_num_threads


@cache
def _pool(process_id: int) -> ThreadPoolExecutor:
    """The threads of this process: threads do not survive a fork, so a child makes its own."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hf_deelbo")


class _Scratch(threading.local):
    """Memory of one thread, as much as it needed at most, and views of it in the shapes that it was asked for."""

    def __init__(self):
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.views: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def of(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The beginning of it, in this shape."""
        view = self.views.get((shape, dtype))
        if view is None:
            view = self.views[shape, dtype] = self._view(shape, dtype)
        return view

    @torch.inference_mode(False)  # who asks again may be in another mode
    def _view(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        size = shape.numel() * dtype.itemsize
        if len(self.memory) < size:
            self.memory = torch.empty(max(size, 4 * BLOCK_SIZE), dtype=torch.uint8)
            self.views.clear()
        return self.memory[:size].view(dtype).view(shape)


_scratch = _Scratch()
