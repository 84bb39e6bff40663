"""What the playbook remembers of a run: plain numbers, which checkpoints carry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SampleRange = tuple[int, int]
"""Sample indices from the first number up to, and without, the second number."""


@dataclass(frozen=True)
class Occurrence:
    """A signal that a rule has acted on."""

    rule: str
    step: int
    """The step that was being taken, which counts from 1."""


@dataclass(frozen=True)
class HealthMemory:
    """The history by which rules decide, and what they have done.

    A checkpoint carries the whole value. A resumed run therefore decides as an undisturbed run.
    After going back to a checkpoint, the history is that of the checkpoint; what was done stays.
    """

    losses: tuple[float, ...] = ()
    """Of the last committed steps, the newest last, in nats per token."""
    grad_norms: tuple[float, ...] = ()
    """Of the last committed steps, the newest last, before clipping."""
    block: tuple[float, ...] = ()
    """The losses of the block of steps that is not full yet, see ``slow_divergence``."""
    blocks: tuple[tuple[float, float], ...] = ()
    """Of full blocks, the newest last: the mean loss and the squared standard error of the mean."""
    collapsed_checks: int = 0
    """Checks of the routers in a row that found a collapse."""
    occurrences: tuple[Occurrence, ...] = ()
    """Signals that rules have acted on, the newest last."""
    skipped_samples: tuple[SampleRange, ...] = ()
    """Samples that no step takes, in order and without overlap."""
    lr_factor: float = 1.0
    """What the learning rate is multiplied by, up to ``lr_until_step``."""
    lr_until_step: int = 0
    go_backs: int = 0
    """How many times the run went back to a checkpoint by itself."""

    def lr_factor_at(self, step: int) -> float:
        """What the learning rate of ``step`` is multiplied by; steps count from 1."""
        return self.lr_factor if step <= self.lr_until_step else 1.0


def merged(ranges: Iterable[SampleRange]) -> tuple[SampleRange, ...]:
    """Ranges in order, with those that touch or overlap joined; empty ranges are left out."""
    found: list[SampleRange] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)
