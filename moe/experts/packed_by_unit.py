"""The backend ``packed`` by unit, for exact sums; see :mod:`moe.experts.by_unit`.

Legend: S rows, D d_model, E experts of this rank, U units (micro-batches).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.config import ActivationName
from moe.experts.activation import ACTIVATIONS
from moe.experts.packed import BLOCK_ROWS, Block, run_backward, run_forward
from moe.experts.weights import ExpertWeights
from moe.experts.workers import num_workers
from moe.rows import Rows
from parallel.exact import UnitSums


def _shares_by_unit(counts_EU: Sequence[Sequence[int]], workers: int) -> list[list[Block]]:
    """The blocks of each worker.

    A block has rows of one expert and one unit, and the first block begins with the unit's first
    row: what is computed together depends on units alone. A worker has all rows of an expert.
    """
    total = max(sum(map(sum, counts_EU)), 1)
    shares: list[list[Block]] = [[] for _ in range(workers)]
    end = 0
    for expert, counts in enumerate(counts_EU):
        share = shares[min(end * workers // total, workers - 1)]
        for count in counts:
            start, end = end, end + count
            for a in range(start, end, BLOCK_ROWS):
                b = min(a + BLOCK_ROWS, end)
                share.append(Block(expert, slice(a, b), more=a > start, last=b == end))
    return shares


class _UnitGrads:
    """Each unit's gradients of each expert, added to exact sums."""

    one_thread = True

    def __init__(self, weights: ExpertWeights, sums: UnitSums, workers: int) -> None:
        self.sums = sums
        self.scratch = [weights.map(lambda p: torch.empty_like(p[0])) for _ in range(workers)]

    def of(self, worker: int, expert: int) -> ExpertWeights:
        """Where a worker adds up what a unit's rows give."""
        return self.scratch[worker]

    def end_unit(self, worker: int, expert: int) -> None:
        """Add a unit's gradients to the sums. All rows of an expert are one worker's."""
        self.sums.add(expert, self.scratch[worker])


def packed_forward_by_unit(
    rows: Rows, weights: ExpertWeights, activation: ActivationName
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the products for :func:`packed_backward_by_unit`, of rows that are counted by
    unit."""
    return run_forward(ACTIVATIONS[activation], rows, weights, _unit_shares_of(rows, weights))


def packed_backward_by_unit(
    rows: Rows,
    weights: ExpertWeights,
    activation: ActivationName,
    dy_SD: Tensor,
    kept: Sequence[Tensor],
    sums: UnitSums,
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the assignments' weights; the parameters' are added to
    ``sums``."""
    shares = _unit_shares_of(rows, weights)
    grads = _UnitGrads(weights, sums, len(shares))
    return run_backward(ACTIVATIONS[activation], rows, weights, shares, kept, dy_SD, grads)


def _unit_shares_of(rows: Rows, weights: ExpertWeights) -> list[list[Block]]:
    counts_EU = rows.rows_per_expert_E.tolist()
    workers = num_workers(sum(map(sum, counts_EU)), *weights.w_up.shape[1:])
    return _shares_by_unit(counts_EU, workers)
