"""How far the planner is from what was measured, from the tables that it is compared with."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from convoy.plan.hardware import Cluster
from convoy.plan.validate import Compared, Kind, compare, published_groups

MEMORY_ERROR = 0.1
"""The share by which planned memory may be off. Tests hold the plan of a peak of
``bench/results/memory.json`` to this bound."""


@dataclass(frozen=True)
class Accuracy:
    """The planner against the published runs of one kind of model.

    Errors are signed and relative, of TFLOP/s: above 0 where the plan is faster than the run was.
    """

    kind: Kind
    rows: int
    """Runs that were compared."""
    rows_on_cluster: int
    """Of these, on the same chip."""
    bias: float
    """The median of the errors."""
    median_error: float
    """The median of the errors without their signs."""
    lowest: Compared
    """The run with the lowest error."""
    highest: Compared
    """The run with the highest error."""

    def as_dict(self) -> dict[str, Any]:
        """By name, as plain JSON."""
        ends = {
            name: {"group": row.group, "run": row.run, "error": row.error}
            for name, row in (("lowest", self.lowest), ("highest", self.highest))
        }
        return {
            "kind": self.kind, "rows": self.rows, "rows_on_cluster": self.rows_on_cluster,
            "bias": self.bias, "median_error": self.median_error, **ends,
            "memory_error": MEMORY_ERROR,
        }  # fmt: skip


def accuracy_of(has_experts: bool, cluster: Cluster) -> Accuracy:
    """The planner's errors for models with or without experts."""
    kind: Kind = "moe" if has_experts else "dense"
    rows = sorted((row for row in compare() if row.kind == kind), key=lambda row: row.error)
    groups = {group.name for group in published_groups() if group.cluster == cluster.name.lower()}
    errors = [row.error for row in rows]
    return Accuracy(
        kind=kind,
        rows=len(rows),
        rows_on_cluster=sum(row.group in groups for row in rows),
        bias=statistics.median(errors),
        median_error=statistics.median(map(abs, errors)),
        lowest=rows[0],
        highest=rows[-1],
    )
