"""The step barrier: one small vector from every rank, one decision on every rank.

The logical model state moves forward here and nowhere else. After the backward pass each rank puts
its numbers into a vector of fixed size. Every rank receives all vectors and computes one decision
from them. Only :attr:`Action.COMMIT` lets the optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple

import torch

from parallel import all_gather_rows
from parallel.crossing import check_epoch
from pretrain.parallelize import RoutingStats
from pretrain.parts.step import Action, Decision, Report

Rows = tuple[list[Report], dict[str, list[float]]]
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
    rows = all_gather_rows(row).cpu().tolist()
    if device.type == "cuda":
        check_epoch()  # a group that was aborted may have left anything in the rows
    size = len(own) - len(columns)
    reports = [Report(*values[:size]) for values in rows]
    by_name = {name: [row[size + i] for row in rows] for i, name in enumerate(columns)}
    return reports, by_name


def decide(
    reports: Sequence[Report], planned_tokens: int, loss_scale: float | None = None
) -> Decision:
    """One decision from all reports; a pure function of them.

    Args:
        reports: in rank order, which fixes the order of the sums.
        planned_tokens: what gradients have been divided by already.
        loss_scale: what they had been multiplied by; None but in float16.
    """
    tokens = sum(r.target_tokens for r in reports)
    loss = sum(r.loss_sum for r in reports) / max(tokens, 1.0)
    square = sum(r.grad_square_sum for r in reports)
    norm = math.sqrt(square) * planned_tokens / max(tokens, 1.0) if square >= 0 else math.nan
    bad = [(int(r.bad_layer), rank) for rank, r in enumerate(reports) if r.bad_layer >= 0]
    sound = math.isfinite(loss) and tokens > 0 and not bad
    finite = sound and math.isfinite(norm)
    return Decision(
        action=Action.COMMIT if finite else Action.SKIP,
        loss=loss,
        grad_norm=norm,
        target_tokens=int(tokens),
        stop=any(r.stop_requested for r in reports),
        stop_cause=int(max(r.stop_requested for r in reports)),
        save=any(r.save_requested for r in reports),
        regroup=any(r.regroup_wanted for r in reports),
        step_seconds=max(r.step_seconds for r in reports),
        data_wait_seconds=max(r.data_wait_seconds for r in reports),
        bad_router=min(bad) if bad else None,
        loss_scale=loss_scale,
        data_checksum=int(sum(r.data_checksum for r in reports)),
        overflow=sound and not finite and loss_scale is not None and loss_scale > 1,
    )
