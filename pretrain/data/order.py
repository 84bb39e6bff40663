"""The global order of samples, a pure function of the seed, the blend and the sample index."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pretrain.data.blend import Blend

_BLOCK = 4096
"""Samples that are looked up together."""
_TABLES = 8
"""Epochs whose round functions are kept; a step draws at most a few epochs of a source."""


class GlobalOrder:
    """The sequence of each sample index; every epoch has another permutation.

    The permutation is a four-round Feistel network over the smallest power of four that is at least
    ``num_sequences``. A value out of range is encrypted again until the result is in range (cycle
    walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 3). Looking
    up an index needs no table, and gives the same sequence on every rank.

    :meth:`many` keeps values of the round functions, which are functions of half of the bits: with
    2^32 sequences at most 4 x 2^16 numbers an epoch.
    """

    def __init__(self, num_sequences: int, seed: int) -> None:
        assert num_sequences >= 1
        self.num_sequences, self.seed = num_sequences, seed
        self._half = max(1, -(-(num_sequences - 1).bit_length() // 2))
        self._rounds: dict[int, np.ndarray] = {}

    def __getitem__(self, sample_index: int) -> int:
        """The sequence of a sample index; the order has no end."""
        epoch, value = divmod(sample_index, self.num_sequences)
        while True:
            value = self._encrypt(value, epoch)
            if value < self.num_sequences:
                return value

    def many(self, sample_indices: np.ndarray) -> np.ndarray:
        """The sequences of int64 sample indices, int64."""
        epochs, values = np.divmod(sample_indices, self.num_sequences)
        for epoch in np.unique(epochs):
            left = np.flatnonzero(epochs == epoch)  # empty for no indices
            while len(left):
                values[left] = self._encrypt_many(values[left], int(epoch))
                left = left[values[left] >= self.num_sequences]
        return values

    def _encrypt(self, value: int, epoch: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for turn in range(4):
            left, right = right, left ^ self._round(epoch, turn, right)
        return left << self._half | right

    def _round(self, epoch: int, turn: int, right: int) -> int:
        key = f"{self.seed}/{epoch}/{turn}/{right}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return int.from_bytes(digest, "big") & ((1 << self._half) - 1)

    def _encrypt_many(self, values: np.ndarray, epoch: int) -> np.ndarray:
        table = self._rounds.get(epoch)
        if table is None:
            if len(self._rounds) >= _TABLES:
                del self._rounds[next(iter(self._rounds))]
            table = self._rounds[epoch] = np.full((4, 1 << self._half), -1, np.int64)
        left, right = values >> self._half, values & ((1 << self._half) - 1)
        for turn in range(4):
            mixed = table[turn][right]
            if mixed.min() < 0:
                for each in np.unique(right[mixed < 0]).tolist():
                    table[turn, each] = self._round(epoch, turn, each)
                mixed = table[turn][right]
            left, right = right, left ^ mixed
        return left << self._half | right


class OrderInBlocks:
    """An order that is looked up in blocks of consecutive samples, and kept for the next steps.

    Args:
        order: what is looked up.
    """

    def __init__(self, order: GlobalOrder | BlendedOrder) -> None:
        self.order = order
        self._blocks: dict[int, np.ndarray] = {}

    def many(self, samples: Sequence[int]) -> np.ndarray:
        """The sequences of some sample indices in rising order, int64."""
        parts = []
        for number in dict.fromkeys(sample // _BLOCK for sample in samples):
            start = number * _BLOCK
            if isinstance(samples, range):
                first, stop = max(samples.start - start, 0), samples.stop - start
                parts.append(self._block(number)[first : min(stop, _BLOCK)])
            else:
                places = [s - start for s in samples if s // _BLOCK == number]
                parts.append(self._block(number)[places])
        return np.concatenate(parts)

    def _block(self, number: int) -> np.ndarray:
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) > 1:
                del self._blocks[next(iter(self._blocks))]
            start = number * _BLOCK
            block = self._blocks[number] = self.order.many(np.arange(start, start + _BLOCK))
        return block


class BlendedOrder:
    """The global order over several sources, whose sequences are numbered one source after another.

    Args:
        blend: which source each sample is of.
        sizes: sequences of each source by its fingerprint, in the order of their numbers.
        seed: of every source's own order.
    """

    def __init__(self, blend: Blend, sizes: Mapping[str, int], seed: int) -> None:
        self.blend, self.seed = blend, seed
        self.orders = {name: GlobalOrder(size, seed) for name, size in sizes.items()}
        ends = np.cumsum([0, *sizes.values()])
        self._firsts = {name: int(end) for name, end in zip(sizes, ends, strict=False)}

    def __getitem__(self, sample_index: int) -> int:
        """The sequence of a sample index."""
        return int(self.many(np.array([sample_index]))[0])

    def many(self, sample_indices: np.ndarray) -> np.ndarray:
        """The sequences of int64 sample indices, int64."""
        found = np.empty_like(sample_indices)
        for name, places, numbers in self.blend.draw(sample_indices):
            found[places] = self._firsts[name] + self.orders[name].many(numbers)
        return found
