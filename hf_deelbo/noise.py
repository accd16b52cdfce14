"""Gaussian noise that depends on its key alone: not on the thread count, the process or what was drawn before."""

from hashlib import blake2b

import torch

from .blocks import Block, Tensors, blocks_of, on_all_cores


def add_noise_(tensors: Tensors, sigma: torch.Tensor, key: tuple[int, ...]) -> None:
    """In place `w = w + sigma * eps`, with `eps ~ N(0, I)` drawn from `key` and the names of the tensors.

    Example:
        >>> once, again = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
        >>> add_noise_(once, torch.tensor(0.1), key=(42, 0))
        >>> add_noise_(again, torch.tensor(0.1), key=(42, 0))
        >>> torch.equal(once["w"], again["w"])
        True
    """

    def add_to(block: Block) -> None:
        weights = block.of(tensors)
        generator = torch.Generator(weights.device).manual_seed(_seed(key, block))
        noise = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device).normal_(generator=generator)
        weights.addcmul_(noise, sigma)

    on_all_cores(add_to, blocks_of(tensors))


def _seed(key: tuple[int, ...], block: Block) -> int:
    text = f"{key}/{block.name}/{block.rows.start}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
