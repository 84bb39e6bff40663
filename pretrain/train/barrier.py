"""The step barrier: one small vector from every rank, one decision on every rank.

The logical model state moves forward here and nowhere else. After the backward pass each rank puts
its numbers into a vector of fixed size. Every rank receives all vectors and computes one decision
from them. Only :attr:`Action.COMMIT` lets the optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import Enum

import torch

from parallel import all_gather_rows, grad_square_sum
from pretrain.job import Job
from pretrain.parallelize import RoutingStats
from pretrain.parts.playbook import Signal, Verdict


@dataclass(frozen=True)
class Report:
    """The vector of one rank. All fields are floats: the vector is float64."""

    loss_sum: float
    """Summed negative log-likelihood of the rank's target tokens, in nats."""
    target_tokens: float
    grad_square_sum: float
    """The rank's share of the squared global gradient norm, without the loss scale; a parameter
    that n ranks hold counts 1/n on each."""
    stop_requested: float
    """Why this rank asks to stop: a number of :class:`pretrain.runtime.StopCause`; 0 for no
    request."""
    save_requested: float
    """Whether a save is due by the clock, or a signal asked for a save."""
    step_seconds: float
    """Seconds from the request for a batch to the barrier, waiting in collectives included."""
    data_wait_seconds: float
    exposed_seconds: float
    """The part of ``step_seconds`` in which the rank waited in collectives and computed nothing."""
    expert_rows: float
    """Routed tokens that the rank's experts computed, in all layers."""
    expert_seconds: float
    """Seconds of the rank's experts in the forward pass, waiting for other ranks excluded."""
    bad_layer: float
    """The first layer whose router logits were not finite; -1 where all were finite."""
    data_checksum: float = 0.0
    """Of the sequences that this rank brought to the step, see
    :func:`pretrain.data.data_checksum`; 0 on all but one of the ranks that read the same."""


def square_sum_of(job: Job) -> float:
    """This rank's share of the squared gradient norm: of an exact sum rank 0 has all."""
    if job.parallel_model.exact is None:
        return float(grad_square_sum(job.model, job.dims))
    square = float(job.parallel_model.exact.square_sum(job.model, job.dims))
    return square if job.runtime.rank == 0 else 0.0


class Action(Enum):
    """What every rank does next with the step."""

    COMMIT = "commit"
    SKIP = "skip"


@dataclass(frozen=True)
class Decision:
    """What all ranks do with the step; every rank computes an equal decision."""

    action: Action
    loss: float
    """Mean over the step's target tokens, in nats."""
    grad_norm: float
    """Norm of the gradient of the mean loss, before clipping."""
    target_tokens: int
    stop: bool
    """Some rank was asked to stop: commit a checkpoint after this step and end."""
    stop_cause: int
    """The largest of the ranks' ``stop_requested``."""
    save: bool
    """Some rank asks for a checkpoint of this step."""
    step_seconds: float
    """Seconds of the slowest rank, from its request for a batch to the barrier."""
    data_wait_seconds: float
    """Seconds that the slowest rank waited for its batch."""
    bad_router: tuple[int, int] | None
    """The first layer, and a rank, whose router logits were not finite."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None but in float16."""
    overflow: bool = False
    """Gradients alone were not finite, and the scale can be halved: a skip that is to be expected.
    Where it is 1 already there is nothing to be halved, and no overflow."""
    data_checksum: int = 0
    """Of the sequences of the step, over all ranks."""
    verdict: Verdict | None = None
    """Of the playbook, on a step without overflow."""

    @property
    def _cause(self) -> Signal | None:
        """The signal for which a finite step is skipped."""
        signals = () if self.verdict is None else self.verdict.signals
        return next((signal for signal in signals[:1] if signal.rule != "not_finite"), None)

    @property
    def reason(self) -> str:
        """What a skipped step was skipped for: the kind."""
        if self._cause is not None:
            return self._cause.rule
        if self.bad_router is not None:
            return "router_not_finite"
        return "overflow" if self.overflow else "not_finite"

    @property
    def why(self) -> str:
        """What a skipped step was skipped for."""
        if self._cause is not None:
            return self._cause.text
        if self.bad_router is not None:
            layer, rank = self.bad_router
            return f"router logits of layer {layer} are not finite on rank {rank}"
        if self.overflow:
            assert self.loss_scale is not None
            return f"gradients overflow with loss scale {self.loss_scale:.0f}; half of it is next"
        return f"loss {self.loss}, grad norm {self.grad_norm}"


def bad_layer(layers: Sequence[int], routing: RoutingStats | None) -> int:
    """The first of the MoE layers with logits that are not finite, or -1."""
    counts = [] if routing is None else routing.nonfinite_L.tolist()
    return next((layer for layer, count in zip(layers, counts, strict=False) if count), -1)


def exchange(report: Report, device: torch.device) -> list[Report]:
    """Every rank's report, in rank order. Each rank of the default group must call."""
    row = torch.tensor(astuple(report), dtype=torch.float64, device=device)
    rows = all_gather_rows(row).cpu().tolist()
    return [Report(*values) for values in rows]


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
        step_seconds=max(r.step_seconds for r in reports),
        data_wait_seconds=max(r.data_wait_seconds for r in reports),
        bad_router=min(bad) if bad else None,
        loss_scale=loss_scale,
        data_checksum=int(sum(r.data_checksum for r in reports)),
        overflow=sound and not finite and loss_scale is not None and loss_scale > 1,
    )
