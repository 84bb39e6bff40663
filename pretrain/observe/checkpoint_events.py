"""Events of checkpoints: what is restored, saved and committed.

See :mod:`pretrain.observe.events` for the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pretrain.observe.event import Event
from pretrain.observe.metric import Metric, measured, metric

_DURATION = Metric("convoy_checkpoint_duration_seconds", "histogram", "seconds",
    "What training waited (stall), until this rank's part was durable (write), and until all was "
    "(commit).", ("tier", "stage"))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """Parameters, moments and counters were loaded from a checkpoint."""

    name: ClassVar[str] = "restored"
    tier: str
    """``memory``, ``peer``, ``local`` or ``shared``."""
    seconds: float = metric(
        "convoy_restore_duration_seconds", "gauge", "seconds", "Time of this start's restore.",
        labels=("tier",), value=lambda event: {event.tier: event.seconds})  # fmt: skip
    """From the look for checkpoints until all was loaded."""


@dataclass(frozen=True, kw_only=True)
class SaveBegun(Event):
    """A checkpoint was copied for the writer processes, and training goes on."""

    name: ClassVar[str] = "save"
    # The copy is one for all tiers: the fastest of them stands for the copy.
    stall_seconds: float = measured(replace(_DURATION, value=lambda event: {
        (event.tiers[0] if event.tiers else "none", "stall"): event.stall_seconds,
    }))  # fmt: skip
    """What training waited for the copy."""
    tiers: list[str]


@dataclass(frozen=True, kw_only=True)
class SaveIntervalChosen(Event):
    """``checkpoint.interval_steps = "auto"`` has a new interval."""

    name: ClassVar[str] = "save_interval"
    seconds: float | None
    """Until the next save."""
    stall_seconds: float
    failures: int
    """Starts of this run that had no orderly end."""
    seconds_between_failures: float


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(Event):
    """A tier has the whole checkpoint of ``step``."""

    name: ClassVar[str] = "checkpoint"
    tier: str = metric("convoy_last_checkpoint_timestamp_seconds", "gauge", "seconds",
        "Unix time of the last commit.", labels=("tier",), how="time", former=True,
        note="also of former starts; absent before the first")  # fmt: skip
    seconds: float = measured(replace(_DURATION, value=lambda event: {
        (event.tier, "write"): event.write_seconds,
        (event.tier, "commit"): event.seconds,
    }))  # fmt: skip
    """From the copy until the commit."""
    write_seconds: float
    """From the copy until rank 0's objects were durable."""
    bytes_written: int = 0
    bytes_linked: int = 0
    """Of objects that had not changed since the checkpoint before."""
    retries: int = 0
    path: str = ""
    """The manifest."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A tier does not have the checkpoint of ``step`` (-1 where the step is not known)."""

    name: ClassVar[str] = "checkpoint_failed"
    tier: str = metric(
        "convoy_checkpoint_failures_total", "counter", "saves", "Saves that rank 0 saw fail.",
        labels=("tier",), label_values=("memory", "local", "shared"))  # fmt: skip
    error: str
    in_a_row: int = 1
    """Failures of the tier since its last commit."""
    told: bool = False
    """Whether another rank says why, or the error that ends the run: the console then does not."""
