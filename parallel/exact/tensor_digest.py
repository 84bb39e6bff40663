"""Digests of 64 bits, computed on the device that has the tensor.

A digest is a sum of a tensor's 32-bit words, each multiplied by an odd number of its place, modulo
2^64 (multilinear hashing; Carter and Wegman, "Universal Classes of Hash Functions", 1979). Sums of
integers have equal bits in any order, so a digest does not depend on the number of threads. One
wrong word always changes the digest, because an odd factor has an inverse. Several wrong words
leave the digest unchanged with a probability of at most about 2^-33.

:func:`placed_digest` is for arrays of which ranks have slices: its factors are of a number's place
in the array, and digests of slices add up to that of the array, whatever the slices are.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from parallel.layout import Box

_CHUNK = {"cpu": 1 << 16}
_CHUNK_OF_DEVICES = 1 << 22
"""Words that are multiplied at once: few for the caches of a CPU, many for an accelerator."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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


@torch.no_grad()
def placed_digest(tensor: Tensor, box: Box) -> Tensor:
    """The digest of a slice of an array, a scalar of int64 on its device.

    Each number's bits are multiplied by an odd number for each of its indices in the array. The
    digests of slices that make up the array sum to the array's, modulo 2^64.

    Args:
        tensor: the slice.
        box: where it is in the array; of the tensor's shape.
    """
    words = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    if not words.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    for dim in range(len(box) - 1, -1, -1):
        factors = _place_factors(dim, *box[dim], tensor.device)
        rows = words.reshape(-1, len(factors))
        per_chunk = max(_CHUNK.get(tensor.device.type, _CHUNK_OF_DEVICES) // len(factors), 1)
        wide = factors.new_empty(min(per_chunk, len(rows)), len(factors))
        sums = [
            wide[: len(chunk)].copy_(chunk).mul_(factors).sum(1) for chunk in rows.split(per_chunk)
        ]
        words = torch.cat(sums).view(tensor.shape[:dim])
    return words.to(torch.int64).reshape(())


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


@lru_cache(maxsize=256)
def _place_factors(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Odd int64 numbers of the indices ``start`` to ``stop`` of a dim, equal in every process."""
    # SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014),
    # with a multiplication that wraps.
    x = (torch.arange(start, stop) + 1 + (dim << 40)) * _signed(_STEP)
    x = (x ^ (x >> 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * _signed(0x94D049BB133111EB)
    return ((x ^ (x >> 31)) | 1).to(device)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _odd(place: int) -> int:
    """An odd number of a place, as a signed number of 64 bits."""
    return _signed(((place * _STEP) ^ (place >> 7)) % (1 << 64) | 1)
