"""The planner against published runs: signed errors, the bounds that must hold, and how far the
planner may be off."""

from __future__ import annotations

import statistics
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from convoy.plan.hardware import Cluster, load_cluster
from convoy.plan.memory import Memory, memory
from convoy.plan.shape import ModelShape
from convoy.plan.step_time import StepTime, step_time
from convoy.plan.work import Program, Work
from corpus.config import Section
from parallel.layout import Topology

Kind = Literal["dense", "moe"]
BOUNDS: dict[Kind, dict[str, float]] = {
    "dense": {"median": 0.10, "worst": 0.20},
    "moe": {"median": 0.20},
}
"""The largest error of each kind of rows: the median of absolute values, and the worst one."""
MEMORY_ERROR = 0.1
"""The share by which planned memory may be off. Tests hold the plan of a peak of
``bench/results/memory.json`` to this bound."""


class PublishedRun(Section):
    """One row: what was published of one run."""

    name: str
    teraflops: float = Field(gt=0)
    """Of one GPU, by the group's convention."""
    tuned: bool = False
    """Whether constants of the cluster file were chosen with this row."""
    exceeds_memory: str = ""
    """Why the planned memory is more than the chip's, although the run took place."""
    seq_len: int = 0
    vocab_size: int = 0
    model: dict[str, Any]
    layout: dict[str, int]
    batch: dict[str, int]
    work: dict[str, Any] = Field(default_factory=dict)
    """What differs from the group's ``work``."""


class PublishedGroup(Section):
    """Rows of one publication."""

    name: str
    source: str
    kind: Kind
    cluster: str
    peak_teraflops: float = Field(gt=0)
    convention: Literal["hardware", "causal", "full"]
    assumed: str = ""
    seq_len: int = 0
    vocab_size: int = 0
    products: int = 3
    program: dict[str, Any] = Field(default_factory=dict)
    work: dict[str, Any] = Field(default_factory=dict)
    run: list[PublishedRun]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for run in self.run:
            if not (run.seq_len or self.seq_len) or not (run.vocab_size or self.vocab_size):
                raise ValueError(f"{self.name}, {run.name}: seq_len and vocab_size are required")
        return self

    def work_of(self, run: PublishedRun) -> Work:
        """A row as the planner takes it."""
        sizes = {"num_kv_heads": run.model["num_heads"], "d_ff": 4 * run.model["d_model"]}
        sizes |= {"products": self.products, "vocab_size": run.vocab_size or self.vocab_size}
        sizes |= run.model
        sizes.setdefault("head_dim", sizes["d_model"] // sizes["num_heads"])
        sizes.setdefault("v_head_dim", sizes["head_dim"])
        return Work(
            shape=ModelShape(**sizes),
            topology=Topology(**run.layout),
            seq_len=run.seq_len or self.seq_len,
            program=Program(**({"loss_dtype": "float32"} | self.program)),
            **(self.work | run.work | run.batch),
        )


@dataclass(frozen=True)
class Compared:
    """One row of the table."""

    group: PublishedGroup
    run: PublishedRun
    planned: float
    """TFLOP/s of one GPU, by the group's convention."""
    step: StepTime
    memory: Memory
    available: float
    """Bytes that a rank can use."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.group.name}, {self.run.name}"

    @property
    def fits(self) -> bool:
        """Whether the plan fits the chip."""
        return self.memory.total <= self.available

    @property
    def error(self) -> float:
        """Signed and relative: above 0 where the plan is faster than the run was."""
        return self.planned / self.run.teraflops - 1


def published_groups() -> list[PublishedGroup]:
    """The published runs that come with Convoy."""
    text = (resources.files("convoy.plan") / "published_runs.toml").read_text()
    return [PublishedGroup.model_validate(group) for group in tomllib.loads(text)["group"]]


def step_flops(work: Work, convention: str) -> float:
    """Operations of a step, as a publication counts them.

    ``hardware``: 96 B s l h^2 (1 + s / 6h + V / 16lh), with recomputation (arXiv 2104.04473,
    equation 3). ``causal``: model FLOPs of the causal mask's pairs. ``full``: those of all pairs.
    No publication counts multi-token prediction.
    """
    shape = replace(work.shape, num_mtp_layers=0)
    s, B = work.seq_len, work.global_batch_size
    if convention == "hardware":
        L, h, V = shape.num_layers, shape.d_model, shape.vocab_size
        return 96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    return B * s * shape.token_flops(s, causal=convention == "causal")


def compare() -> list[Compared]:
    """Every published row with its plan."""
    rows = []
    for group in published_groups():
        cluster = load_cluster(group.cluster)
        for run in group.run:
            work = group.work_of(run)
            step = step_time(work, cluster)
            flops = step_flops(work, group.convention)
            planned = flops / (step.total * work.topology.world) / 1e12
            rows.append(
                Compared(
                    group, run, planned, step, memory(work, cluster.chip), cluster.chip.memory_bytes
                )
            )
    return rows


def missed_bounds(rows: list[Compared]) -> list[str]:
    """One line for every bound that the rows miss."""
    missed = []
    for kind, bounds in BOUNDS.items():
        errors = [abs(row.error) for row in rows if row.group.kind == kind]
        measured = {"median": statistics.median(errors), "worst": max(errors)}
        for what, bound in bounds.items():
            if measured[what] > bound:
                missed.append(
                    f"{kind} rows: the {what} error is {measured[what]:.1%}, and must be at most "
                    f"{bound:.0%}"
                )
    return missed


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
            name: {"group": row.group.name, "run": row.run.name, "error": row.error}
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
    rows = sorted((row for row in compare() if row.group.kind == kind), key=lambda row: row.error)
    errors = [row.error for row in rows]
    return Accuracy(
        kind=kind,
        rows=len(rows),
        rows_on_cluster=sum(row.group.cluster == cluster.name.lower() for row in rows),
        bias=statistics.median(errors),
        median_error=statistics.median(map(abs, errors)),
        lowest=rows[0],
        highest=rows[-1],
    )
