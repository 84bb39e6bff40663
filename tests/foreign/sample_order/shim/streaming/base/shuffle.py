"""Convoy's shuffled order under the names of streaming's."""

from __future__ import annotations

import numpy as np

from pretrain.data.order import GlobalOrder
from tests.foreign.touching import touch


def _shuffled(
    shard_sizes: np.ndarray, num_canonical_nodes: int, seed: int, epoch: int, block_size: int = 0
) -> np.ndarray:
    """The samples of an epoch, in the order of Convoy."""
    del num_canonical_nodes, block_size
    touch()
    size = int(shard_sizes.sum())
    return GlobalOrder(size, seed).many(np.arange(epoch * size, (epoch + 1) * size))


get_shuffle_py1br = get_shuffle_py1e = get_shuffle_py1s = get_shuffle_py2s = _shuffled
