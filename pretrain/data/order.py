"""The global order of samples: a pure function of the seed and the position."""

from __future__ import annotations

import hashlib


class GlobalOrder:
    """Which sequence has which sample index, for ever: a fresh permutation every epoch.

    The permutation is a four-round Feistel network over the next power of four, walked until it
    falls in range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 3):
    any position is found at once, in no memory, on every rank alike.
    """

    def __init__(self, num_sequences: int, seed: int) -> None:
        assert num_sequences >= 1
        self.num_sequences, self.seed = num_sequences, seed
        self._half = max(1, -(-(num_sequences - 1).bit_length() // 2))

    def __getitem__(self, sample_index: int) -> int:
        """The sequence at a position in the global order, which has no end."""
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
