"""The global order of samples, a pure function of the seed and the sample index."""

from __future__ import annotations

import hashlib


class GlobalOrder:
    """The sequence of each sample index; every epoch has another permutation.

    The permutation is a four-round Feistel network over the smallest power of four that is at least
    ``num_sequences``. A value out of range is encrypted again until the result is in range (cycle
    walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 3). Looking
    up an index needs no table, and gives the same sequence on every rank.
    """

    def __init__(self, num_sequences: int, seed: int) -> None:
        assert num_sequences >= 1
        self.num_sequences, self.seed = num_sequences, seed
        self._half = max(1, -(-(num_sequences - 1).bit_length() // 2))

    def __getitem__(self, sample_index: int) -> int:
        """The sequence of a sample index; the order has no end."""
        epoch, value = divmod(sample_index, self.num_sequences)
        while True:
            value = self._encrypt(value, epoch)
            if value < self.num_sequences:
                return value

    def _encrypt(self, value: int, epoch: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for turn in range(4):
            key = f"{self.seed}/{epoch}/{turn}/{right}".encode()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        return left << self._half | right
