"""Faults of numbers: gradients and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from parallel import local_shard


def garbage(batches: Sequence[Tensor], vocab_size: int, seed: int) -> list[Tensor]:
    """Micro-batches of the same shapes with random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, batch.shape, generator=generator) for batch in batches]


def set_nan(model: nn.Module) -> None:
    """Set one value of this rank's gradient to NaN."""
    _one(model).fill_(torch.nan)


def flip_bit(model: nn.Module, bit: int) -> None:
    """Flip one bit of one value of this rank's gradient, of its float32; 0 is the lowest."""
    value = _one(model)
    mask = 1 << bit if bit < 31 else -(1 << 31)  # bit 31 is the sign of an int32
    bits = value.float().view(torch.int32)
    value.copy_(torch.bitwise_xor(bits, mask).view(torch.float32))


def scale(model: nn.Module, factor: float) -> None:
    """Multiply this rank's gradient."""
    for gradient in _gradients(model):
        gradient.mul_(factor)


def _one(model: nn.Module) -> Tensor:
    """The largest value in magnitude of the first gradient of this rank, as a view without dims.

    A bit of a zero, as in the row of a token that does not occur, would change next to nothing.
    """
    gradient = next(_gradients(model))
    at = torch.unravel_index(gradient.abs().argmax(), gradient.shape)
    return gradient[tuple(int(i) for i in at)]


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            local = local_shard(parameter.grad)
            if local.numel():
                yield local.detach()
