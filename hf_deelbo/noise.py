"""Gaussian noise that depends on its key alone: not on the thread count, the process or what was drawn before."""

from hashlib import blake2b

import torch

from .blocks import Block, Piece, Tensors, add_scaled_


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
    weights = block.of(tensors)
    noise = [_standard_normal(w, key, piece, on_cpu) for w, piece in zip(weights, block.pieces, strict=True)]
    add_scaled_(weights, noise, sigma)


def _standard_normal(like: torch.Tensor, key: tuple[int, ...], piece: Piece, on_cpu: bool) -> torch.Tensor:
    text = f"{key}/{piece.name}/{piece.rows.start}"
    seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    device = "cpu" if on_cpu else like.device  # each kind of device has numbers of its own
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(generator=generator).to(like.device)
