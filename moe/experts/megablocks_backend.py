"""The backend ``megablocks``: MegaBlocks' permutation and its grouped GEMM, on CUDA.

What its dropless layer does between router and output (arXiv 2211.15841, section 5; of the package
``ParallelDroplessMLP.grouped_forward_once``) is done here by the same functions of the package:
``ops.sort``, ``histogram``, ``inclusive_cumsum``, ``gather`` and ``scatter``, and the ``gmm`` of
``grouped_gemm_util``, each with its own backward. The routing is Convoy's, and so are the
activation functions.

MegaBlocks does not import without its compiled extensions, which need CUDA, and pins an older torch
than the torch that MegaBlocks runs with. Only this file imports MegaBlocks, at the first use, and
``make megablocks`` installs the package.

Legend: S rows, R assignments of rows to experts, D d_model, F d_ff, G = 2 F, E experts of this
rank, N places for assignments, R of them taken.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from moe.experts.activation import ACTIVATIONS
from moe.experts.weights import ExpertWeights
from moe.rows import RowMap, Rows, row_map, sum_rows, take_rows
from router import count_tokens_per_expert

PACKAGES = (
    "megablocks", "megablocks_ops", "stk", "triton", "grouped_gemm", "grouped_gemm_backend",
)  # fmt: skip
"""What is imported. Two are compiled: a build without CUDA leaves them out and says nothing."""


def why_no_megablocks(dtype: torch.dtype, device_type: str) -> str:
    """Why the backend cannot run, with an alternative; empty where the backend can run."""
    if device_type != "cuda" or dtype != torch.bfloat16:
        return f"must have bfloat16 on cuda, not {dtype} on {device_type}; use auto"
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: run `make megablocks`, or use grouped_mm"
    return ""


class Assignments(NamedTuple):
    """The assignments as MegaBlocks takes them: row after row, of each row equally many."""

    x_SD: Tensor
    """[S, D]; [R, D], a row for each assignment, where rows have unequal numbers of them."""
    top_k: int
    """The assignments of each row of ``x_SD``."""
    expert_R: Tensor
    """[R] int32."""
    weights_R: Tensor
    """[R] in the order of ``expert_R``."""
    counts: list[int]
    """The rows of each expert, on the host."""
    sum_to: RowMap | None
    """The row of ``Rows`` that each row of ``x_SD`` is a copy of; None where it is that row."""


def assignments_of(rows: Rows) -> Assignments:
    """Undo the order by expert, which MegaBlocks finds by itself. Waits for the device once.

    Tokens of one rank have top_k assignments each. A row from another rank has as many as experts
    of this rank want it: it is copied for each of them, as MegaBlocks does before it sends rows.

    Raises ValueError for more numbers than MegaBlocks' kernels can address.
    """
    (S, D), N = rows.x_SD.shape, len(rows.source_R)
    counts_E = rows.rows_per_expert_E
    places_N = torch.arange(N, device=counts_E.device)
    source_N = rows.source_R.masked_fill(places_N >= counts_E.sum(), S)
    # Places that nothing takes count for a row S, which serves where there is no other.
    most = count_tokens_per_expert(source_N, S + 1)[: max(S, 1)].amax(0, keepdim=True)
    *counts, most_of_a_row = torch.cat([counts_E, most]).tolist()
    R = sum(counts)
    if R * D >= 2**31:
        raise ValueError(
            f"backend (megablocks) must have less than 2**31 numbers in its rows, not {R} rows of "
            f"{D}: its kernels count in 32 bits; use smaller micro-batches or grouped_mm"
        )
    index = row_map(rows.source_R[:R], S)
    ids_E = torch.arange(len(counts), device=counts_E.device)
    expert_R = ids_E.repeat_interleave(counts_E, output_size=R)[index.order_R].int()
    weights_R = rows.weights_R.index_select(0, index.order_R)
    if R and S * most_of_a_row == R:
        return Assignments(rows.x_SD, most_of_a_row, expert_R, weights_R, counts, None)
    by_row = RowMap(index.source_R[index.order_R], places_N[:R], index.ends_S1)
    x_RD = take_rows(rows.x_SD, by_row)
    return Assignments(x_RD, 1, expert_R, weights_R, counts, by_row)


def experts_megablocks(
    rows: Rows,
    weights: ExpertWeights,
    activation: str,
    gate_up_EGD: Tensor | None = None,
) -> Tensor:
    """See :data:`moe.experts.paths.ExpertsFn`. Waits for the device once: the GEMM takes its sizes
    on the host. As in MegaBlocks the weights are applied to the experts' outputs.

    ``gate_up_EGD`` [E, 2 F, D] is the tensor of which the gate and up weights are views, where
    they are: the GEMM takes contiguous tensors, transposed or not, and neither half is one.
    """
    from megablocks import grouped_gemm_util, ops

    a = assignments_of(rows)
    E, R, D = len(a.counts), len(a.expert_R), rows.x_SD.shape[1]
    if not R:  # the kernels are not started for nothing; parameters get gradients of zeros
        none_R = row_map(a.expert_R.long(), E)
        y_RD = _network(a.x_SD, weights, activation, _product_of_nothing, none_R, gate_up_EGD)
        return sum_rows(y_RD * a.weights_R.unsqueeze(1), row_map(rows.source_R[:0], len(rows.x_SD)))
    with torch.no_grad():
        bits = max((E - 1).bit_length(), 1)
        bin_ids_R, indices_R = ops.sort(a.expert_R, bits)
        bins_E = ops.inclusive_cumsum(ops.histogram(a.expert_R, E), 0).view(E)
    sizes_E = torch.tensor(a.counts, device="cpu")

    def product(x: Tensor, w: Tensor) -> Tensor:
        transposed = not w.is_contiguous()
        stored = (w.mT if transposed else w).contiguous()
        out: Tensor = grouped_gemm_util.ops.gmm(x.contiguous(), stored, sizes_E, transposed)
        return out

    x_RD = ops.gather(a.x_SD.contiguous(), indices_R, bin_ids_R, bins_E, a.top_k)
    expert_R = None if weights.b_up is None else row_map(bin_ids_R.long(), E)
    y_RD = _network(x_RD, weights, activation, product, expert_R, gate_up_EGD)
    y_XD: Tensor = ops.scatter(y_RD, indices_R, bin_ids_R, a.weights_R, bins_E, a.top_k)
    return y_XD.view(-1, D) if a.sum_to is None else sum_rows(y_XD, a.sum_to)


def _network(
    x_RD: Tensor,
    w: ExpertWeights,
    activation: str,
    product: Callable[[Tensor, Tensor], Tensor],
    expert_R: RowMap | None,
    gate_up_EGD: Tensor | None,
) -> Tensor:
    """Rows by expert -> [R, D], without the assignments' weights."""

    def plus(out: Tensor, bias: Tensor | None) -> Tensor:
        return out if bias is None or expert_R is None else out + take_rows(bias, expert_R)

    gate_RF: Tensor | None
    if gate_up_EGD is not None and w.b_up is None:
        gate_RF, up_RF = product(x_RD, gate_up_EGD.to(x_RD.dtype).mT).chunk(2, dim=1)
    else:
        up_RF = plus(product(x_RD, w.w_up), w.b_up)
        gate_RF = None if w.w_gate is None else plus(product(x_RD, w.w_gate), w.b_gate)
    h_RF = ACTIVATIONS[activation].hidden(gate_RF, up_RF)
    return plus(product(h_RF, w.w_down), w.b_down)


def _product_of_nothing(x_0D: Tensor, w_EDF: Tensor) -> Tensor:
    """[0, F], with gradients of zeros."""
    return torch.matmul(x_0D, w_EDF).sum(0)
