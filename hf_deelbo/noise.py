"""Gaussian noise that depends on its key alone: not on the threads, the processes or what was drawn before."""

from hashlib import blake2b

import torch

from .blocks import Block, Tensors, add_scaled_, rows_of_a_piece
from .sharding import first_row


def add_noise_to_block_(
    tensors: Tensors, block: Block, sigma: torch.Tensor, key: tuple[int, ...], on_cpu: bool = False
) -> None:
    """In place `w = w + sigma * eps`, with `eps ~ N(0, I)` drawn from `key` and the names of the tensors in `block`.

    Example:
        >>> from hf_deelbo.blocks import blocks_of
        >>> once, again = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
        >>> for tensors in (once, again):
        ...     for block in blocks_of(tensors):
        ...         add_noise_to_block_(tensors, block, torch.tensor(0.1), key=(42, 0))
        >>> torch.equal(once["w"], again["w"])
        True
    """
    noise = [_standard_normal(tensors[name], f"{key}/{name}", rows, on_cpu) for name, rows in block.pieces]
    add_scaled_(block.of(tensors), noise, sigma)


def _standard_normal(tensor: torch.Tensor, key: str, rows: slice, on_cpu: bool) -> torch.Tensor:
    """eps of some rows of `tensor`: it is drawn in pieces that the whole tensor decides, and cut to those rows."""
    if tensor.dim() == 0:
        return _draw(tensor, (), f"{key}/0", on_cpu)
    first, last = (first_row(tensor) + row for row in (rows.start, rows.stop))
    step, parts = rows_of_a_piece(tensor.shape), []
    for start in range(first // step * step, last, step):
        stop = min(start + step, tensor.shape[0])
        drawn = _draw(tensor, (stop - start, *tensor.shape[1:]), f"{key}/{start}", on_cpu)
        parts.append(drawn[max(first, start) - start : min(last, stop) - start])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _draw(like: torch.Tensor, shape: tuple[int, ...], key: str, on_cpu: bool) -> torch.Tensor:
    seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    device = "cpu" if on_cpu else like.device  # each kind of device has numbers of its own
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=like.dtype, device=device).normal_(generator=generator).to(like.device)
