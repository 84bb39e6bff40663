"""The comparison of a run under faults with a run that nothing happened to, by their logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ckpt
from pretrain.observe import FaultInjected, LoggedEvent, StepCommitted, ledger_of

CLOSE = 1e-5
"""Another layout rounds sums otherwise; losses of one run differ by less than this, relatively."""
FAR = 1e-2
"""A token whose two best experts have nearly equal scores may take the other one in another layout,
and changes a loss by less than this, relatively."""
MOST_FAR = 0.1
"""The largest share of steps whose losses differ by more than :data:`CLOSE`: a state that was not
restored as it was changes every later loss."""


@dataclass(frozen=True)
class Recovery:
    """What became of one fault."""

    kind: str
    step: int
    """The step in which the fault happened, from 1."""
    rank: int
    """The rank, or the number of the machine for ``machine_lost``."""
    seconds: float | None
    """Until that step was committed; None where no later step was committed."""


@dataclass(frozen=True)
class Audit:
    """What the logs of two runs say."""

    faults: list[Recovery]
    samples_problem: str
    """The first step whose samples are not those of the undisturbed run; empty where all are."""
    losses: list[tuple[int, float]]
    """Steps whose loss differs by more than :data:`CLOSE`, with the relative difference; of an
    exact run those with any other bit in the loss or the gradient norm."""
    starts: int
    goodput: float | None
    ledger_error: float
    """The difference between the ledger's phases and the wall time, over the wall time."""
    steps: int = 0
    """Of the undisturbed run."""
    is_exact: bool = False
    """The runs are of ``train.exact``."""
    arrays: tuple[str, ...] = ()
    """Of exact runs: parameters and moments after the last step that differ."""

    @property
    def recovered(self) -> int:
        """Faults after which the run went on."""
        return sum(fault.seconds is not None for fault in self.faults)

    @property
    def samples_exact(self) -> bool:
        """Whether every step took the samples of the undisturbed run, each exactly once."""
        return not self.samples_problem

    @property
    def is_one_run(self) -> bool:
        """Whether the run went on after every fault, with its samples, and with losses that differ
        by less than :data:`FAR` in few steps, and by less than :data:`CLOSE` in all others; an
        exact run must have the same bits, also of its last state."""
        far, most = (0.0, 0.0) if self.is_exact else (FAR, max(1, MOST_FAR * self.steps))
        near = all(abs(difference) < far for _, difference in self.losses)
        return (
            near
            and len(self.losses) <= most
            and not self.arrays
            and self.samples_exact
            and self.recovered == len(self.faults)
        )

    @property
    def losses_exact(self) -> bool:
        """Whether every step's loss is that of the undisturbed run, up to :data:`CLOSE`."""
        return not self.losses


def arrays_that_differ(root: ckpt.Location, other: ckpt.Location, step: int) -> list[str]:
    """The parameters, buffers and moments of two checkpoints of a step that differ in any bit.

    Random states are left out: they are of ranks. Raises CheckpointError where a checkpoint is
    missing or damaged.
    """
    one, two = ckpt.read_manifest(root, step), ckpt.read_manifest(other, step)
    found = ckpt.compare(root, one, other, two)
    return [a.name for a in found if a.what != "alike" and not a.name.startswith("rng/")]


def audit(
    lines: Sequence[LoggedEvent],
    undisturbed: Sequence[LoggedEvent],
    machines_lost: Sequence[tuple[int, int, float]] = (),
    ended: float | None = None,
    is_exact: bool = False,
) -> Audit:
    """Compare two runs of one spec.

    Args:
        lines: the log of the run under faults, over all of its starts.
        undisturbed: the log of the other run.
        machines_lost: faults that the log does not have: (step, machine, Unix time).
        ended: the Unix time of the last write to the log, by the clock of the file system.
        is_exact: the spec has ``train.exact``: losses and gradient norms must have equal bits.
    """
    ledger = ledger_of(lines)
    wall = (ended or ledger.end or 0.0) - (ledger.begin or 0.0)
    return Audit(
        faults=_recoveries(lines, machines_lost),
        samples_problem=_samples_problem(_steps(lines), _steps(undisturbed)),
        losses=_losses(_steps(lines), _steps(undisturbed), is_exact),
        starts=1 + sum(ledger.restarts.values()),
        goodput=ledger.goodput,
        ledger_error=abs(wall - ledger.wall_seconds) / max(wall, 1e-9),
        steps=len(_steps(undisturbed)),
        is_exact=is_exact,
    )


def _steps(lines: Sequence[LoggedEvent]) -> list[StepCommitted]:
    return [line.event for line in lines if isinstance(line.event, StepCommitted)]


def _samples_problem(taken: Sequence[StepCommitted], expected: Sequence[StepCommitted]) -> str:
    cursors = {step.step: step.consumed_samples for step in expected}
    at = 0
    for one in taken:
        if one.step > at + 1:
            return f"step {one.step} comes after step {at}: a step is missing"
        at = one.step
        if one.consumed_samples != cursors.get(at):
            return (
                f"step {at} ends at sample {one.consumed_samples}, and at {cursors.get(at)} in "
                f"the undisturbed run"
            )
    last = max(cursors, default=0)
    return "" if at == last else f"the last step is {at}, and {last} in the undisturbed run"


def _losses(
    taken: Sequence[StepCommitted], expected: Sequence[StepCommitted], is_exact: bool
) -> list[tuple[int, float]]:
    steps = {step.step: step for step in expected}
    pairs = [(one, steps[one.step]) for one in taken if one.step in steps]
    return [
        (one.step, one.loss / other.loss - 1)
        for one, other in pairs
        if (is_exact and (one.loss, one.grad_norm) != (other.loss, other.grad_norm))
        or abs(one.loss / other.loss - 1) > CLOSE
    ]


def _recoveries(
    lines: Sequence[LoggedEvent], machines_lost: Sequence[tuple[int, int, float]]
) -> list[Recovery]:
    commits = [
        (line.time or 0.0, line.event.step)
        for line in lines
        if isinstance(line.event, StepCommitted)
    ]
    faults = [
        (line.time or 0.0, line.event.kind, line.event.step + 1, line.event.rank)
        for line in lines
        if isinstance(line.event, FaultInjected)
    ]
    faults += [(time, "machine_lost", step, machine) for step, machine, time in machines_lost]
    return [
        Recovery(
            kind=kind,
            step=step,
            rank=rank,
            seconds=next((t - began for t, taken in commits if t > began and taken >= step), None),
        )
        for began, kind, step, rank in sorted(faults)
    ]
