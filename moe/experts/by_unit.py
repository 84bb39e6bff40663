"""Experts whose products and weight gradients depend on units alone, for exact sums.

A rank computes rows of several units (micro-batches) together where other ranks send it theirs. How
a product rounds depends on its number of rows. So here each product has the rows of one expert and
one unit, and each unit's weight gradients are added to exact sums, which autograd never sees.

Legend: T tokens, S rows, R assignments of rows to experts, D d_model, E experts, K top_k, U units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.experts.activation import ACTIVATIONS
from moe.experts.packed import BLOCK_ROWS, NUM_INPUTS, Block, run_backward, run_forward
from moe.experts.paths import one_expert, one_expert_backward
from moe.experts.weights import ExpertWeights
from moe.experts.workers import num_workers
from moe.rows import RowMap, Rows, row_map
from parallel.exact import UnitSums
from router import RouterOutput, padded_rows


class _ByUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, packed: bool, sums: UnitSums, *inputs: Any) -> Tensor:
        rows, weights = Rows(*inputs[:4]), ExpertWeights(*inputs[4:])
        products: list[Tensor] = []
        counts_EU = rows.rows_per_expert_E.tolist()
        if packed:
            shares = _unit_shares_of(counts_EU, weights)
            out, products = run_forward(ACTIVATIONS[name], rows, weights, shares)
        else:
            out = _loop_forward(rows, counts_EU, weights, name)
        ctx.name, ctx.packed, ctx.sums, ctx.counts_EU = name, packed, sums, counts_EU
        ctx.save_for_backward(*inputs, *products)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved, dy_SD = ctx.saved_tensors, grads[0].contiguous()
        rows, weights = Rows(*saved[:4]), ExpertWeights(*saved[4:NUM_INPUTS])
        if ctx.packed:
            shares = _unit_shares_of(ctx.counts_EU, weights)
            grads_of_units = _UnitGrads(weights, ctx.sums, len(shares))
            dx_SD, dweights_R = run_backward(
                ACTIVATIONS[ctx.name],
                rows,
                weights,
                shares,
                saved[NUM_INPUTS:],
                dy_SD,
                grads_of_units,
            )
        else:
            dx_SD, dweights_R = _loop_backward(
                rows, ctx.counts_EU, weights, ctx.name, dy_SD, ctx.sums
            )
        zeros = weights.map(ctx.sums.stand_in)
        return None, None, None, dx_SD, None, dweights_R, None, *zeros


def experts_by_unit(
    rows: Rows, weights: ExpertWeights, activation: str, backend: str, sums: UnitSums
) -> Tensor:
    """See :data:`moe.experts.paths.ExpertsFn`, for rows that are counted by unit.

    The parameters' gradients are added to ``sums``. ``backend`` is ``packed`` or ``loop``; no
    second derivatives.
    """
    assert rows.rows_per_expert_E.ndim == 2, "rows must be counted by unit"
    out: Tensor = _ByUnit.apply(activation, backend == "packed", sums, *rows[:4], *weights)
    return out


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


def _unit_shares_of(counts_EU: list[list[int]], weights: ExpertWeights) -> list[list[Block]]:
    workers = num_workers(sum(map(sum, counts_EU)), *weights.w_up.shape[1:])
    return _shares_by_unit(counts_EU, workers)


def _blocks(counts_EU: list[list[int]]) -> Iterator[tuple[int, slice]]:
    """Each expert and its rows of one unit."""
    end = 0
    for expert, counts in enumerate(counts_EU):
        for count in counts:
            start, end = end, end + count
            if count:
                yield expert, slice(start, end)


def _loop_forward(
    rows: Rows, counts_EU: list[list[int]], weights: ExpertWeights, activation: str
) -> Tensor:
    out_SD = torch.zeros_like(rows.x_SD)
    for expert, unit in _blocks(counts_EU):
        source, weight = rows.source_R[unit], rows.weights_R[unit].unsqueeze(1)
        x, w = padded_rows(rows.x_SD[source]), weights.aligned(expert)
        y = one_expert(ACTIVATIONS[activation], x, padded_rows(weight), w)
        out_SD.index_add_(0, source, y[: len(source)])
    return out_SD


def _loop_backward(
    rows: Rows,
    counts_EU: list[list[int]],
    weights: ExpertWeights,
    activation: str,
    dy_SD: Tensor,
    sums: UnitSums,
) -> tuple[Tensor, Tensor]:
    dx_SD, dweights_R = torch.zeros_like(rows.x_SD), torch.zeros_like(rows.weights_R)
    for expert, unit in _blocks(counts_EU):
        source, weight = rows.source_R[unit], rows.weights_R[unit].unsqueeze(1)
        dx, dweights_R[unit], grads = one_expert_backward(
            ACTIVATIONS[activation],
            rows.x_SD[source],
            weight,
            weights.aligned(expert),
            dy_SD[source],
        )
        dx_SD.index_add_(0, source, dx)
        sums.add(expert, grads)
    return dx_SD, dweights_R


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        for grad in grads:
            if grad is not None:
                total = grad if total is None else total + grad
        return total, None


def fork(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """``x`` for several users, whose gradients are added in the order of the result.

    Autograd adds gradients in the order of its graph, and expert parallelism changes the graph.
    """
    out: tuple[Tensor, ...] = _Fork.apply(x, count)
    return out


def single_assignments(routed: RouterOutput) -> tuple[RouterOutput, RowMap]:
    """The routing of rows of one expert each, and the map from these rows to their tokens.

    A sum of more than two outputs depends on its order. With a row for each assignment, a token's
    outputs come back to its rank one by one, and are added there in the order of its choices.
    """
    indices_TK = routed.expert_indices_TK
    T, K = indices_TK.shape
    if routed.dropped_TK is None:
        real_R = torch.arange(T * K, device=indices_TK.device)
    else:
        real_R = (indices_TK.flatten() < len(routed.rows_per_expert_E)).nonzero().squeeze(1)
    weights_R = routed.expert_weights_TK.flatten().index_select(0, real_R)
    places = routed.places
    if places is not None:
        places = places._replace(positions_T=places.positions_T[real_R // max(K, 1)])
    single = routed._replace(
        places=places,
        expert_indices_TK=indices_TK.flatten()[real_R].unsqueeze(1),
        expert_weights_TK=weights_R.unsqueeze(1),
        dropped_TK=None,
    )
    return single, row_map(real_R // max(K, 1), T)
