"""Digests of 64 bits, computed on the device that has the tensor.

A digest is a sum of a tensor's 32-bit words, each multiplied by an odd number of its place, modulo
2^64 (multilinear hashing; Carter and Wegman, "Universal Classes of Hash Functions", 1979). Sums of
integers have equal bits in any order, so a digest does not depend on the number of threads. One
wrong word always changes the digest, because an odd factor has an inverse. Several wrong words
leave the digest unchanged with a probability of at most about 2^-33.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

_CHUNK = {"cpu": 1 << 16}
_CHUNK_OF_DEVICES = 1 << 22
"""Words that are multiplied at once: few for the caches of a CPU, many for an accelerator."""
_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, which is odd


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """The digest of the bits of some tensors in their order, a scalar of int64 on their device.

    Tensors of equal bits, shapes apart, have equal digests on devices of one type.
    """
    total: Tensor | None = None
    for place, tensor in enumerate(tensors):
        one = _digest_of(tensor) * _odd(place)
        total = one if total is None else total + one
    return torch.zeros((), dtype=torch.int64) if total is None else total


@torch.no_grad()
def _digest_of(tensor: Tensor) -> Tensor:
    words = _words(tensor.detach())
    size = _CHUNK.get(tensor.device.type, _CHUNK_OF_DEVICES)
    factors = _factors(size, tensor.device)
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    for place, chunk in enumerate(words.split(size)):
        total += (chunk.to(torch.int64) * factors[: len(chunk)]).sum() * _odd(place)
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as int32 [words], with zeros after the last byte."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if missing := -len(data) % 4:
        data = torch.cat([data, data.new_zeros(missing)])
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


@lru_cache(maxsize=8)
def _factors(size: int, device: torch.device) -> Tensor:
    """Odd int64 numbers, equal in every process."""
    generator = torch.Generator().manual_seed(0)
    low, high = -(1 << 63), (1 << 63) - 1
    numbers = torch.randint(low, high, (size,), dtype=torch.int64, generator=generator)
    factors = (numbers | 1).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams read the table too
    return factors


def _odd(place: int) -> int:
    """An odd number of a place, as a signed number of 64 bits."""
    number = ((place * _STEP) ^ (place >> 7)) % (1 << 64) | 1
    return number - (1 << 64) if number >> 63 else number
