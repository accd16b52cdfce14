"""Gaussian noise that depends on its key alone: not on the threads, the processes or what was drawn before."""

from hashlib import blake2b

import torch

from .blocks import Block, Tensors, rows_of, rows_of_a_piece, write_scaled_sum
from .sharding import first_row


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
        >>> from hf_deelbo.blocks import blocks_of
        >>> w, once, again = ({"w": torch.zeros(3)} for _ in range(3))
        >>> for target in (once, again):
        ...     for block in blocks_of(w):
        ...         write_noisy_block(target, w, block, torch.tensor(0.1), key=(42, 0))
        >>> torch.equal(once["w"], again["w"])
        True
    """
    noise = [_standard_normal(tensors[name], f"{key}/{name}", rows, on_cpu) for name, rows in block.pieces]
    write_scaled_sum(block.of(target), block.of(tensors), noise, sigma)


def _standard_normal(tensor: torch.Tensor, key: str, rows: slice, on_cpu: bool) -> torch.Tensor:
    """eps of some rows of `tensor`: it is drawn in pieces that the whole tensor decides, and cut to those rows."""
    if tensor.dim() == 0:
        return _draw(tensor, (), f"{key}/0", on_cpu)
    first, last = (first_row(tensor) + row for row in (rows.start, rows.stop))
    step, parts = rows_of_a_piece(tensor.shape), []
    for start in range(first // step * step, last, step):
        stop = min(start + step, tensor.shape[0])
        drawn = _draw(tensor, (stop - start, *tensor.shape[1:]), f"{key}/{start}", on_cpu)
        parts.append(rows_of(drawn, slice(max(first, start) - start, min(last, stop) - start)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _draw(like: torch.Tensor, shape: tuple[int, ...], key: str, on_cpu: bool) -> torch.Tensor:
    seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    device = "cpu" if on_cpu else like.device  # each kind of device has numbers of its own
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=like.dtype, device=device).normal_(generator=generator).to(like.device)
