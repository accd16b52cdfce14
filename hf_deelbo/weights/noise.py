"""Gaussian noise that depends on its key alone: not on the threads, the processes or what was drawn before."""

from hashlib import blake2b

import torch

from .blocks import (
    BLOCK_SIZE,
    Block,
    Tensors,
    rows_of_a_piece,
    write_scaled_sum,
)
from .shards import held_rows


def write_noisy_block(
    target: Tensors, tensors: Tensors, block: Block, sigma: torch.Tensor, key: tuple[int, ...], on_cpu: bool = False
) -> None:
    """Set `w' = w + sigma * eps`, with `eps ~ N(0, I)` drawn from `key` and the names of the tensors in `block`.

    Args:
        target: holds w', by name; may be `tensors` itself.
        tensors: holds w.
        block: the part of them to write.
        sigma: the standard deviation of the noise.
        key: decides eps, together with the device that draws it.
        on_cpu: draw it on the CPU wherever the tensors are.

    Example:
        >>> from hf_deelbo.weights.blocks import blocks_of
        >>> w, once, again = ({"w": torch.zeros(3)} for _ in range(3))
        >>> for target in (once, again):
        ...     for block in blocks_of(w):
        ...         write_noisy_block(target, w, block, torch.tensor(0.1), key=(42, 0))
        >>> torch.equal(once["w"], again["w"])
        True
    """
    weights = block.of(tensors)
    noise = (
        _standard_normal(w, tensors[name], rows, f"{key}/{name}", on_cpu)
        for w, (name, rows) in zip(weights, block.pieces, strict=True)
    )
    write_scaled_sum(block.of(target), weights, noise, sigma)


def _standard_normal(
    weight: torch.Tensor, tensor: torch.Tensor, rows: slice | None, key: str, on_cpu: bool
) -> torch.Tensor:
    """eps of `weight`, some rows of `tensor`: drawn in parts that the whole tensor decides, and cut to those rows."""
    eps = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if eps.numel() == tensor.numel() <= BLOCK_SIZE:  # the usual case: one part
        return _draw(eps, f"{key}/0", on_cpu)
    first, num_rows = held_rows(tensor)
    first, last = (first, first + num_rows) if rows is None else (first + rows.start, first + rows.stop)
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
