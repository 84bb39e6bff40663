"""The rows that a rank's experts compute, and copying and summing them along an index.

Legend: T tokens, K top_k, D d_model, E experts of this rank, S rows on this rank, R assignments of
these rows to these experts, U units (micro-batches).

Autograd's own backward of ``x[index]`` is an accumulating scatter, which is slow and, on CUDA, not
deterministic. In this file both directions gather: the gradient of a copy is a sum along the sorted
index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe import kernels
from parallel.comm import new_empty
from router import count_tokens_per_expert
from router.kernels import SortedAssignments


class RowMap(NamedTuple):
    """An index into S rows, with its sorted order for sums along the index."""

    source_R: Tensor
    """[R] int64, each in [0, S)."""
    order_R: Tensor
    """[R] int64: the places of ``source_R`` ordered by row, and then by position. For a dtype of
    kernels it may have more than R numbers: those from R on are skipped."""
    ends_S1: Tensor
    """[S + 1] int64: row s has the places order_R[ends[s] : ends[s + 1]]."""


class SortedRows(NamedTuple):
    """What the kernel of the sort knows of rows."""

    to_rows: RowMap
    """From the assignments to their rows."""
    ends_E: Tensor
    """[E] int32: where the assignments of each expert end."""


class Rows(NamedTuple):
    """Rows and their assignments to experts. A row may have many assignments, or none."""

    x_SD: Tensor
    """[S, D]."""
    source_R: Tensor
    """[R] int64: the row of ``x_SD`` of each assignment, sorted by expert."""
    weights_R: Tensor
    """[R] the factor of each assignment's output."""
    rows_per_expert_E: Tensor
    """[E] int64. Where the sum is less than R, the last places of R are padding and are ignored.
    Under exact sums [E, U]: the rows of each unit, which for each expert come unit after unit."""
    sorted: SortedRows | None = None
    """None where no kernel sorted the assignments."""


def _counts_to_sort(bins_N: Tensor, num_bins: int) -> bool:
    return kernels.available(bins_N.device.type) and num_bins <= kernels.MAX_BINS


def sort_by_expert(expert_indices: Tensor, num_experts: int) -> Tensor:
    """[...] int64 in [0, num_experts) -> [N] int64: the flat assignments ordered by expert, and
    then by position."""
    flat_N = expert_indices.flatten()
    if _counts_to_sort(flat_N, num_experts):
        return kernels.sort_by_bin(flat_N, num_experts)[0]
    return flat_N.argsort(stable=True)


def sort_and_count(expert_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """As :func:`sort_by_expert`; and [num_experts + 1] int64: 0, then each expert's assignments."""
    if _counts_to_sort(expert_indices, num_experts):
        return kernels.sort_by_bin(expert_indices.flatten(), num_experts)
    counts_E = count_tokens_per_expert(expert_indices, num_experts)
    counts_E1 = torch.cat([counts_E.new_zeros(1), counts_E])
    return sort_by_expert(expert_indices, num_experts), counts_E1


def sorts_both_ways(x_SD: Tensor, expert_indices_SK: Tensor, num_blocks: int) -> bool:
    """Whether ``kernels.sort_assignments`` sorts the assignments of rows to blocks of experts."""
    fits = (
        num_blocks <= kernels.MAX_BLOCKS and 0 < expert_indices_SK.shape[1] <= kernels.MAX_COLUMNS
    )
    return fits and has_kernel(x_SD)


def sorted_index(both: SortedAssignments, num_assignments: int) -> RowMap:
    """The index of the first assignments of an order to their rows."""
    return RowMap(both.source_N[:num_assignments], both.by_row_N, both.row_ends_S1)


def rows_of(
    x_SD: Tensor,
    expert_indices_SK: Tensor,
    expert_weights_SK: Tensor,
    experts: range,
    length: int | None = None,
    rows_per_unit: Sequence[int] | None = None,
    positions_S: Tensor | None = None,
) -> Rows:
    """Sort the assignments of [S, D] rows to ``experts``; other assignments are left out.

    Args:
        x_SD: the rows.
        expert_indices_SK: [S, K] int64.
        expert_weights_SK: [S, K].
        experts: the experts of this rank.
        length: R, or an upper bound of R, where the host knows one. With None R is exact on a CPU,
            and S·K elsewhere, which avoids waiting for an accelerator. Compiled, R is S·K too: a
            size must not depend on values.
        rows_per_unit: under exact sums the rows of each micro-batch, which come one after another;
            otherwise None.
        positions_S: [S] int64 the position of each row's token in its micro-batch, where several
            ranks have sent parts of one; None where rows are in the order of tokens already.
    """
    E, K = len(experts), expert_indices_SK.shape[1]
    both = None
    if rows_per_unit is None and sorts_both_ways(x_SD, expert_indices_SK, E):
        both = kernels.sort_assignments(expert_indices_SK, experts.start, 1, E)
        order, counts_E = both.order_N, both.counts_B1[1 : E + 1]
    else:
        local_SK = expert_indices_SK - experts.start
        local_SK = local_SK.masked_fill((local_SK < 0) | (local_SK >= E), E)
        if rows_per_unit is None:
            order, counts_E = sort_and_count(local_SK, E + 1)
            counts_E = counts_E[1 : E + 1]
        else:
            order, counts_E = _by_unit(local_SK, E, rows_per_unit, positions_S)
    if length is None and order.device.type == "cpu" and not torch.compiler.is_compiling():
        length = int(counts_E.sum())
    order_R = order if length is None else order[:length]
    weights_R = _pick(expert_weights_SK.flatten(), order_R)
    if both is None:
        return Rows(x_SD, order_R // K, weights_R, counts_E)
    index = sorted_index(both, len(order_R))
    return Rows(x_SD, index.source_R, weights_R, counts_E, SortedRows(index, both.bin_ends_B[:E]))


def _by_unit(
    local_SK: Tensor, E: int, rows_per_unit: Sequence[int], positions_S: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The flat assignments ordered by expert, unit and the position of their token; and [E, U]: how
    many an expert has of each unit. Assignments to expert E come last, and are not counted."""
    U = len(rows_per_unit)
    units_S = torch.arange(U).repeat_interleave(torch.tensor(rows_per_unit))
    bins_SK = local_SK * U + units_S.to(local_SK.device, non_blocking=True).unsqueeze(1)
    counts_EU = count_tokens_per_expert(bins_SK, (E + 1) * U).view(E + 1, U)[:E]
    if positions_S is None:
        return sort_by_expert(local_SK, E + 1), counts_EU
    last = int(positions_S.max()) + 1 if len(positions_S) else 1
    return (bins_SK * last + positions_S.unsqueeze(1)).flatten().argsort(stable=True), counts_EU


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(x_N: Tensor, index_R: Tensor) -> Tensor:
        return x_N.index_select(0, index_R)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x_N, index_R = inputs
        ctx.save_for_backward(index_R)
        ctx.shape = x_N.shape

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (index_R,) = ctx.saved_tensors
        # No place is picked twice: there is nothing to sum.
        return grads[0].new_zeros(ctx.shape).index_copy_(0, index_R, grads[0]), None


def _pick(x_N: Tensor, index_R: Tensor) -> Tensor:
    """``x[index]`` for an index without duplicates."""
    out: Tensor = _Pick.apply(x_N, index_R)
    return out


def row_map(source_R: Tensor, num_rows: int) -> RowMap:
    """Sort an index into ``num_rows`` rows."""
    order_R, counts_S1 = sort_and_count(source_R, num_rows)
    return RowMap(source_R, order_R, counts_S1.cumsum(0))


def has_kernel(rows: Tensor) -> bool:
    """Whether the kernels of rows take a tensor. Their bits are those of plain operations."""
    is_matrix = rows.ndim == 2 and rows.dtype in kernels.DTYPES
    return kernels.available(rows.device.type) and is_matrix


def _zeros_past(rows_RD: Tensor, num_real: Tensor | None) -> Tensor:
    """Zeros from row ``num_real`` on, whatever is there."""
    if num_real is None:
        return rows_RD
    places_R = torch.arange(len(rows_RD), device=num_real.device)
    return torch.where((places_R < num_real).view(-1, *[1] * (rows_RD.ndim - 1)), rows_RD, 0)


def _take(x_SD: Tensor, source_R: Tensor, num_real: Tensor | None) -> Tensor:
    if has_kernel(x_SD):
        return kernels.take_rows(x_SD, source_R, num_real)
    out_RD = new_empty(x_SD, len(source_R), *x_SD.shape[1:])
    return _zeros_past(torch.index_select(x_SD, 0, source_R, out=out_RD), num_real)


def _sum(y_RD: Tensor, index: RowMap, num_real: Tensor | None) -> Tensor:
    if has_kernel(y_RD):
        return kernels.sum_rows(y_RD, index.order_R, index.ends_S1, num_real)
    y_RD = _zeros_past(y_RD.contiguous(), num_real)
    rows = len(index.ends_S1) - 1
    if not len(index.order_R) or not rows:
        return y_RD.new_zeros(rows, y_RD.shape[1])
    order_R = index.order_R
    if len(order_R) > len(y_RD):  # the index of a kernel, for a dtype that no kernel takes
        y_RD = torch.cat([y_RD, y_RD.new_zeros(1, y_RD.shape[1])])
        order_R = order_R.clamp(max=len(y_RD) - 1)
    # Gathers and sums in one pass over memory, in a fixed order.
    sums_SD: Tensor = torch.embedding_bag(
        y_RD, order_R, index.ends_S1, mode=0, include_last_offset=True
    )[0]
    return sums_SD


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        x_SD: Tensor, source_R: Tensor, order_R: Tensor, ends_S1: Tensor, num_real: Tensor | None
    ) -> Tensor:
        return _take(x_SD, source_R, num_real)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # Through the other Function, so that this gradient has a gradient too.
        *index, num_real = ctx.saved_tensors
        return sum_rows(grads[0], RowMap(*index), num_real), None, None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(
        y_RD: Tensor, source_R: Tensor, order_R: Tensor, ends_S1: Tensor, num_real: Tensor | None
    ) -> Tensor:
        return _sum(y_RD, RowMap(source_R, order_R, ends_S1), num_real)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *index, num_real = ctx.saved_tensors
        return take_rows(grads[0], RowMap(*index), num_real), None, None, None, None


def take_rows(x_SD: Tensor, index: RowMap, num_real: Tensor | None = None) -> Tensor:
    """``x[source]``: [S, D] -> [R, D]. With ``num_real``, a scalar of integers, zeros from that row
    on, whose gradients do not count and may be NaN."""
    out: Tensor = _Take.apply(x_SD, *index, num_real)
    return out


def sum_rows(y_RD: Tensor, index: RowMap, num_real: Tensor | None = None) -> Tensor:
    """The transpose of :func:`take_rows`, [R, D] -> [S, D]: row s sums all y of source s, but those
    from row ``num_real`` on, which may be NaN."""
    out: Tensor = _SumRows.apply(y_RD, *index, num_real)
    return out
