"""The step barrier: one small vector from every rank, one decision on every rank.

The logical model state moves forward here and nowhere else. After the backward pass each rank puts
its numbers into a vector of fixed size. Every rank receives all vectors and computes one decision
from them. Only :attr:`Action.COMMIT` lets the optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple

import numpy as np
import torch

from parallel import all_gather_rows
from parallel.crossing import check_epoch
from pretrain.parallelize import RoutingStats
from pretrain.parts.step import Action, Decision, Report, Reports

Rows = tuple[Reports, dict[str, np.ndarray]]
"""Every rank's report, and the columns of parts by name, in rank order."""


def bad_layer(layers: Sequence[int], routing: RoutingStats | None) -> int:
    """The first of the MoE layers with logits that are not finite, or -1."""
    counts = [] if routing is None else routing.nonfinite_L.tolist()
    return next((layer for layer, count in zip(layers, counts, strict=False) if count), -1)


def exchange(
    report: Report, device: torch.device, columns: Mapping[str, float] | None = None
) -> Rows:
    """Every rank's report and columns, in rank order. Each rank of the default group must call.

    Args:
        report: of this rank.
        device: of the group's collectives.
        columns: what parts bring, by name; every rank has equal names in equal order.
    """
    columns = columns or {}
    own = (*astuple(report), *columns.values())
    row = torch.tensor(own, dtype=torch.float64, device=device)
    rows = all_gather_rows(row).cpu().numpy()
    if device.type == "cuda":
        check_epoch()  # a group that was aborted may have left anything in the rows
    size = len(own) - len(columns)
    return Reports(rows[:, :size]), {name: rows[:, size + i] for i, name in enumerate(columns)}


def decide(reports: Reports, planned_tokens: int, loss_scale: float | None = None) -> Decision:
    """One decision from all reports; a pure function of them.

    Args:
        reports: in rank order, which fixes the order of the sums.
        planned_tokens: what gradients have been divided by already.
        loss_scale: what they had been multiplied by; None but in float16.
    """
    column = reports.column
    tokens = sum_in_order(column("target_tokens"))
    loss = sum_in_order(column("loss_sum")) / max(tokens, 1.0)
    square = sum_in_order(column("grad_square_sum"))
    norm = math.sqrt(square) * planned_tokens / max(tokens, 1.0) if square >= 0 else math.nan
    bad = _bad_router(column("bad_layer"))
    sound = math.isfinite(loss) and tokens > 0 and bad is None
    finite = sound and math.isfinite(norm)
    causes = column("stop_requested")
    return Decision(
        action=Action.COMMIT if finite else Action.SKIP,
        loss=loss,
        grad_norm=norm,
        target_tokens=int(tokens),
        stop=bool(causes.any()),
        stop_cause=int(causes.max()),
        save=bool(column("save_requested").any()),
        regroup=bool(column("regroup_wanted").any()),
        step_seconds=float(column("step_seconds").max()),
        data_wait_seconds=float(column("data_wait_seconds").max()),
        bad_router=bad,
        loss_scale=loss_scale,
        data_checksum=int(sum_in_order(column("data_checksum"))),
        overflow=sound and not finite and loss_scale is not None and loss_scale > 1,
    )


def sum_in_order(numbers: np.ndarray) -> float:
    """The sum of one number after another. :func:`numpy.sum` has other bits on other processors,
    and Python's ``sum`` in other versions; the ranks of a run must have equal bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.add.accumulate(numbers)[-1])


def _bad_router(layers: np.ndarray) -> tuple[int, int] | None:
    """The first layer that is bad anywhere, and the first rank on which that layer is bad."""
    ranks = np.flatnonzero(layers >= 0)
    if not len(ranks):
        return None
    rank = int(ranks[np.argmin(layers[ranks])])
    return int(layers[rank]), rank
