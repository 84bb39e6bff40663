"""Which samples each rank reads, by Convoy's loader, in the shape of streaming's partition.

A worker of a rank is a process that reads batches for it; in Convoy the rank reads all of them. Of
a rank's batches the first worker gets the first one, the second worker the second one, and so on.
Convoy knows no canonical nodes: its order is one for all numbers of nodes.
"""

from __future__ import annotations

import math

import numpy as np

from pretrain.data.loader import Cursor, micro_batches
from tests.foreign.touching import touch


def get_partitions(
    algo: str,
    num_samples: int,
    num_canonical_nodes: int,
    num_physical_nodes: int,
    ranks_per_node: int,
    workers_per_rank: int,
    batch_size: int,
    drop_first: int = 0,
    initial_physical_nodes: int | None = None,
) -> np.ndarray:
    """[nodes, ranks of a node, workers of a rank, batches, samples]; -1 is behind the epoch's end.

    ``drop_first`` samples have been read already.
    """
    del algo, num_canonical_nodes, initial_physical_nodes
    ranks = num_physical_nodes * ranks_per_node
    global_batch = ranks * batch_size
    steps = math.ceil(max(0, num_samples - drop_first) / global_batch)
    rounds = math.ceil(steps / workers_per_rank)
    # Workers that have no batch in the last round wait.
    samples = np.full((rounds, workers_per_rank, ranks, batch_size), -1, np.int64)
    for step in range(steps):
        cursor = Cursor(drop_first + step * global_batch)
        for rank in range(ranks):
            touch()
            (mine,) = micro_batches(cursor, global_batch, batch_size, rank, ranks)
            samples[step // workers_per_rank, step % workers_per_rank, rank] = mine
    samples[samples >= num_samples] = -1
    shape = (rounds, workers_per_rank, num_physical_nodes, ranks_per_node, batch_size)
    return samples.reshape(shape).transpose(2, 3, 1, 0, 4)
