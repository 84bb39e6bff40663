"""The backend ``megablocks``: MegaBlocks' grouped GEMM, on CUDA.

MegaBlocks (arXiv 2211.15841) does not import without CUDA, and pins an older torch than the torch
that MegaBlocks runs with. Only this file imports MegaBlocks, at the first use, and
``make megablocks`` installs the package.

Legend: R assignments of rows to experts, D d_model, F d_ff, G = 2 F, E experts of this rank.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from moe.config import ActivationName
from moe.experts.activation import ACTIVATIONS
from moe.experts.weights import ExpertWeights
from moe.rows import Rows, row_map, sum_rows, take_rows


def why_no_megablocks(dtype: torch.dtype, device_type: str) -> str:
    """Why the backend cannot run, with an alternative; empty where the backend can run."""
    if device_type != "cuda" or dtype != torch.bfloat16:
        return f"must have bfloat16 on cuda, not {dtype} on {device_type}; use auto"
    missing = [name for name in ("megablocks", "grouped_gemm") if find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}: run `make megablocks`, or use grouped_mm"
    return ""


def experts_megablocks(
    rows: Rows,
    weights: ExpertWeights,
    activation: ActivationName,
    gate_up_EGD: Tensor | None = None,
) -> Tensor:
    """See :data:`moe.experts.paths.ExpertsFn`. Waits for the device once: the GEMM takes its sizes
    on
    the host.

    ``gate_up_EGD`` [E, 2 F, D] is the tensor of which the gate and up weights are views, where
    they are: the GEMM takes contiguous tensors, transposed or not, and neither half is one.
    """
    from grouped_gemm import ops

    counts = rows.rows_per_expert_E.cpu()
    R = int(counts.sum())
    index = row_map(rows.source_R[:R], len(rows.x_SD))
    x_RD, weights_R1 = take_rows(rows.x_SD, index), rows.weights_R[:R].unsqueeze(1)
    expert_R = None
    if weights.b_up is not None:
        ids = torch.arange(len(counts), device=x_RD.device)
        expert_R = row_map(
            ids.repeat_interleave(counts.to(x_RD.device), output_size=R), len(counts)
        )

    def product(a: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        transposed = not w.is_contiguous()
        stored = (w.mT if transposed else w).contiguous()
        out: Tensor = ops.gmm(a.contiguous(), stored, counts, trans_b=transposed)
        return out if bias is None or expert_R is None else out + take_rows(bias, expert_R)

    w = weights
    gate_RF: Tensor | None
    if gate_up_EGD is not None and w.b_up is None:
        gate_RF, up_RF = product(x_RD, gate_up_EGD.to(x_RD.dtype).mT, None).chunk(2, dim=1)
    else:
        up_RF = product(x_RD, w.w_up, w.b_up)
        gate_RF = None if w.w_gate is None else product(x_RD, w.w_gate, w.b_gate)
    h_RF = ACTIVATIONS[activation].hidden(gate_RF, up_RF) * weights_R1
    y_RD = product(h_RF, w.w_down, None)
    if w.b_down is not None and expert_R is not None:
        y_RD = y_RD + weights_R1 * take_rows(w.b_down, expert_R)
    return sum_rows(y_RD, index)
