"""Gaussian noise that depends on its key alone: not on the thread count, the process or what was drawn before."""

from hashlib import blake2b

import torch

from .blocks import Block, Piece, Tensors, add_scaled_, blocks_of, on_all_cores


def add_noise_(tensors: Tensors, sigma: torch.Tensor, key: tuple[int, ...]) -> None:
    """In place `w = w + sigma * eps`, with `eps ~ N(0, I)` drawn from `key` and the names of the tensors.

    Example:
        >>> once, again = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
        >>> add_noise_(once, torch.tensor(0.1), key=(42, 0))
        >>> add_noise_(again, torch.tensor(0.1), key=(42, 0))
        >>> torch.equal(once["w"], again["w"])
        True
    """

    on_all_cores(lambda block: add_noise_to_block_(tensors, block, sigma, key), blocks_of(tensors))


def add_noise_to_block_(tensors: Tensors, block: Block, sigma: torch.Tensor, key: tuple[int, ...]) -> None:
    """What `add_noise_` does, for one block of the tensors."""
    weights = block.of(tensors)
    noise = [_standard_normal(w, key, piece) for w, piece in zip(weights, block.pieces, strict=True)]
    add_scaled_(weights, noise, sigma)


def _standard_normal(like: torch.Tensor, key: tuple[int, ...], piece: Piece) -> torch.Tensor:
    text = f"{key}/{piece.name}/{piece.rows.start}"
    seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_(generator=generator)
