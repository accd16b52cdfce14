"""Walk over millions of named numbers in pieces: on all cores, in cache, in a fixed order."""

import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import NamedTuple, TypeVar

import torch

# 2**18 floats are 1 MiB: large enough to hide Python's overhead, small enough to stay in a core's cache.
BLOCK_SIZE = 2**18

Tensors = Mapping[str, torch.Tensor]
Result = TypeVar("Result")


class Block(NamedTuple):
    """Some rows of one named tensor.

    Example:
        >>> block = Block("weight", slice(2, 4))
        >>> block.of({"weight": torch.arange(6.0)})
        tensor([2., 3.])
    """

    name: str
    rows: slice

    def of(self, tensors: Tensors) -> torch.Tensor:
        """A view of this block in `tensors`, whatever their memory layout."""
        tensor = tensors[self.name]
        return tensor[self.rows] if tensor.dim() else tensor


def blocks_of(tensors: Tensors, size: int = BLOCK_SIZE) -> list[Block]:
    """Cut `tensors` along their first dimension into blocks of about `size` numbers.

    Example:
        >>> blocks_of({"weight": torch.zeros(3, 2)}, size=4)
        [Block(name='weight', rows=slice(0, 2, None)), Block(name='weight', rows=slice(2, 4, None))]
    """
    blocks = []
    for name, tensor in tensors.items():
        num_rows = tensor.shape[0] if tensor.dim() else 1
        rows_per_block = max(1, size * num_rows // max(1, tensor.numel()))
        blocks += [Block(name, slice(row, row + rows_per_block)) for row in range(0, num_rows, rows_per_block)]
    return blocks


def on_all_cores(function: Callable[[Block], Result], blocks: list[Block]) -> list[Result]:
    """`[function(block) for block in blocks]` without gradients, by as many threads as torch uses.

    The results keep the order of the blocks, so a sum over them does not depend on the number of threads. No thread
    is still at work when this returns or raises.

    Example:
        >>> weights = {"weight": torch.ones(6)}
        >>> on_all_cores(lambda block: block.of(weights).sum().item(), blocks_of(weights, size=4))
        [4.0, 2.0]
    """
    results: list[Result] = [None] * len(blocks)
    todo = deque(enumerate(blocks))

    @torch.no_grad()  # the mode is per thread
    def work() -> None:
        while True:
            try:
                index, block = todo.popleft()
            except IndexError:
                return
            results[index] = function(block)

    num_helpers = min(torch.get_num_threads(), len(blocks)) - 1
    helpers = [_pool(os.getpid()).submit(work) for _ in range(num_helpers)]
    try:
        work()
    finally:
        todo.clear()
        wait(helpers)
    for helper in helpers:
        helper.result()
    return results


@cache
def _pool(process_id: int) -> ThreadPoolExecutor:
    """The threads of this process: threads do not survive a fork, so a child makes its own."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hf_deelbo")
