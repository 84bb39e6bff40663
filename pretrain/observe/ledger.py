"""The goodput ledger: in which part of a run every second of its wall time was spent.

The ledger is a pure function of ``RUN_DIR/log.jsonl``, over all starts of the run. The time between
one line of the log and the next line is divided among the phases of :data:`PHASES`, by what the
next line says. So the phases add up to the time from the start of the run's first process to the
log's last line, whatever the log holds: interrupted lines, lines of two starts that ran at one
time, and clocks that were set back. Sums are integers, in microseconds, and are exact.

Times are those of rank 0, which writes the log.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pretrain.observe.checkpoint_events import (
    CheckpointCommitted,
    CheckpointFailed,
    Restored,
    SaveBegun,
    SaveIntervalChosen,
)
from pretrain.observe.console import duration
from pretrain.observe.event import Event
from pretrain.observe.events import (
    Launched,
    LedgerSummed,
    Regrouped,
    RunDone,
    RunFailed,
    RunStarted,
    RunStopped,
)
from pretrain.observe.jsonl import LoggedEvent
from pretrain.observe.rank_events import DevicesSampled, RankLost, RankMoves, RankStuck
from pretrain.observe.step_events import Evaluated, StepCommitted, StepSkipped, StepTaken

PHASES: dict[str, str] = {
    "productive": "steps that moved the run forward, without the two phases that follow",
    "data_wait": "in these steps, the slowest rank's wait for its batch",
    "communication_exposed": "in these steps, collectives of rank 0 that no computation hid",
    "checkpoint_stall": "training waited for a save",
    "evaluation": "held-out sequences were scored, and the summary's text was generated",
    "skipped": "steps that changed nothing, because a number was not finite",
    "rework": "steps that were taken again after the run went back to a checkpoint",
    "restart": "from the start of rank 0's process to the first step, and while replicas regroup",
    "hang": "from the last line of the log to the notice that a rank was lost",
    "down": "from a failure to the start of the next process; a step that was cut off is in it",
    "idle": "from the end of a run that was stopped or done to the start of the next process",
    "other": "between steps: reports and statistics",
}
"""Every phase and its meaning; the set is closed, and each second is in exactly one phase."""

RESTART_CAUSES = (
    "stopped", "done", "killed", "lost_rank", "crashed", "health", "bad_input", "interrupted",
)  # fmt: skip
"""How the start before a restart ended; ``killed``: without a line in the log."""

_CAUSE_OF_PHASE = {
    "data_wait": "data",
    "communication_exposed": "communication",
    "checkpoint_stall": "checkpoint",
    "evaluation": "evaluation",
    "skipped": "skipped_steps",
    "other": "other",
}
LOST_CAUSES = ("first_start", *RESTART_CAUSES, "rollback", *_CAUSE_OF_PHASE.values())
"""What seconds are lost to. ``first_start``: the first start of the run; then the failures and ends
whose ``hang``, ``down``, ``restart`` and ``rework`` are counted together; ``rollback``: ``restart``
and ``rework`` after a running run went back by itself; then phases of a run without failures."""

_KEPT = ("productive", "idle")
"""Phases that are no loss: somebody chose to leave the run idle."""
_ASIDE = (DevicesSampled, RankMoves, RankStuck)
"""Events of watching threads: they come in the middle of whatever the run does, and so the time
before such a line is in the phase of the time after the line."""
_MICRO = 1_000_000


@dataclass(frozen=True)
class Ledger:
    """The wall time of a run up to the last line of its log."""

    microseconds: Mapping[str, int]
    """By phase, all of :data:`PHASES`."""
    lost_microseconds: Mapping[str, int]
    """By cause, all of :data:`LOST_CAUSES`: the sum is that of all phases but ``productive`` and
    ``idle``."""
    restarts: Mapping[str, int]
    """Starts after the first one, by how the start before ended."""
    rank_microseconds: int = 0
    """Wall time without ``idle``, times the ranks that the run had then, spares counted."""
    begin: float | None = None
    """Unix time at which the first process started; None for an empty log."""
    end: float | None = None
    """Unix time of the last line."""
    last_start: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the parts of the newest start, the first step among the parts."""

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return {phase: each / _MICRO for phase, each in self.microseconds.items()}

    @property
    def lost_seconds(self) -> dict[str, float]:
        """By cause."""
        return {cause: each / _MICRO for cause, each in self.lost_microseconds.items()}

    @property
    def rank_seconds(self) -> float:
        """Wall time without ``idle``, times the ranks that the run had then, spares counted."""
        return self.rank_microseconds / _MICRO

    @property
    def wall_seconds(self) -> float:
        """From ``begin`` to ``end``."""
        return sum(self.microseconds.values()) / _MICRO

    @property
    def goodput(self) -> float | None:
        """The share of ``productive`` in the wall time without ``idle``; None for an empty log."""
        return self._share("productive")

    @property
    def step_share(self) -> float | None:
        """The share of the steps that moved the run forward, with their waits for data and their
        communication, in the wall time without ``idle``; None for an empty log.

        Reports of large runs call this share the effective training time (Llama Team, "The Llama 3
        Herd of Models", arXiv 2407.21783, section 3.3.4).
        """
        return self._share("productive", "data_wait", "communication_exposed")

    def _share(self, *phases: str) -> float | None:
        ran = sum(self.microseconds.values()) - self.microseconds["idle"]
        return sum(self.microseconds[phase] for phase in phases) / ran if ran else None


def ledger_of(lines: Iterable[LoggedEvent]) -> Ledger:
    """The ledger of the lines of a log, in the order of the file."""
    account = LedgerAccount()
    for line in lines:
        account.add(line.event, line.time)
    return account.ledger()


class LedgerAccount:
    """Adds the lines of a log to a ledger, one at a time.

    In a log of version 0, whose lines have no time, a line lasts as long as the event says.
    """

    def __init__(self) -> None:
        self._phases = dict.fromkeys(PHASES, 0)
        self._lost = dict.fromkeys(LOST_CAUSES, 0)
        self._restarts = dict.fromkeys(RESTART_CAUSES, 0)
        self._begin = self._end = -1
        self._aside = -1
        """Time of the newest line since ``_end`` whose event is one of ``_ASIDE``."""
        self._ranks, self._rank_microseconds = 1, 0
        self._state = "none"
        """``none`` before any line; ``starting``; ``running``; ``ended``, in order; ``failed``."""
        self._end_cause = "killed"
        """How the start would have ended, were the line the last one of the start."""
        self._cause = "first_start"
        """What ``hang``, ``down``, ``restart`` and ``rework`` are lost to now."""
        self._stepping = False
        """Whether a step has been taken since the last start or setback."""
        self._newest_step = 0
        self._last_start: dict[str, float] = {}

    def ledger(self) -> Ledger:
        """The ledger of the lines that were added; a last line of a watching thread ends a time of
        ``other``."""
        if self._aside > self._end:
            closed = copy.deepcopy(self)
            closed._end, closed._aside = self._aside, -1
            closed._book("other", self._aside - self._end, self._ranks)
            return closed.ledger()
        empty = self._begin < 0
        return Ledger(
            microseconds=dict(self._phases),
            lost_microseconds=dict(self._lost),
            restarts=dict(self._restarts),
            rank_microseconds=self._rank_microseconds,
            begin=None if empty else self._begin / _MICRO,
            end=None if empty else self._end / _MICRO,
            last_start=dict(self._last_start),
        )

    def add(self, event: Event, time: float) -> None:
        """Add one line.

        Args:
            event: what the line says.
            time: Unix time of the line.
        """
        if isinstance(event, _ASIDE) and self._begin >= 0:
            self._aside = max(self._aside, _micro(time))
            return
        before = self._state
        former = self._ranks
        if isinstance(event, Launched | RunStarted | Regrouped):
            self._ranks = event.world_size
            self._ranks += event.spares if isinstance(event, RunStarted) else 0
        rest = self._rest(event)
        claims = self._claims(event, time)
        wanted = sum(claims.values())
        now = _micro(time)
        if self._begin < 0:
            self._begin = self._end = max(0, now - wanted)
        left = max(0, now - self._end)
        self._end += left
        for phase, want in claims.items():
            part = min(want, left)
            self._book(phase, part, self._ranks)
            left -= part
        # The time before a new start is of the ranks that the run had before.
        self._book(rest, left, former if rest == "down" else self._ranks)
        self._note(event, before)

    def _book(self, phase: str, microseconds: int, ranks: int) -> None:
        self._phases[phase] += microseconds
        if phase != "idle":
            self._rank_microseconds += microseconds * ranks
        if phase not in _KEPT:
            self._lost[_CAUSE_OF_PHASE.get(phase, self._cause)] += microseconds

    def _rest(self, event: Event) -> str:
        """The phase of the time before a line that the event itself does not account for.

        Begins a new start, or a failure, where the event does: their time has another cause.
        """
        if isinstance(event, Launched):
            gap = "idle" if self._state == "ended" else "down"
            if self._state != "none":
                self._cause = self._end_cause
                self._restarts[self._cause] += 1
            self._state, self._stepping, self._end_cause = "starting", False, "killed"
            return gap
        match event:
            case StepTaken():
                return "other" if self._stepping else "restart"
            case SaveBegun() | SaveIntervalChosen() | CheckpointCommitted() | CheckpointFailed():
                return "checkpoint_stall"
            case RunStopped():
                return "checkpoint_stall"  # a run that stops waits until its last save is committed
            case Evaluated() | RunDone():
                return "evaluation"
            case LedgerSummed():
                return "other"
            case Restored() | RunStarted():
                return "restart"
            case Regrouped():
                self._cause = "lost_rank"
                return "restart"
            case RankLost():
                self._cause = "lost_rank"
                return "hang"
            case RunFailed(state=state):
                starting = self._state == "starting"
                if self._state != "failed":
                    self._cause = state if state in RESTART_CAUSES else "crashed"
                return "restart" if starting else "down"
        known = {"starting": "restart", "ended": "idle", "failed": "down"}
        return known.get(self._state, "other")

    def _claims(self, event: Event, time: float) -> dict[str, int]:
        """Microseconds before a line that the event accounts for, by phase."""
        match event:
            case Launched(process_start=began):
                return {"restart": max(0, _micro(time) - _micro(began))}
            case Restored(seconds=seconds):
                return {"restart": _micro(seconds)}
            case StepSkipped(seconds=seconds):
                return {"skipped": _micro(seconds)}
            case StepCommitted(step=step, seconds=seconds) if step <= self._newest_step:
                return {"rework": _micro(seconds)}
            case StepCommitted():
                return _step_parts(event)
            case SaveBegun(stall_seconds=seconds):
                return {"checkpoint_stall": _micro(seconds)}
        return {}

    def _note(self, event: Event, before: str) -> None:
        """Keep what later lines depend on."""
        match event:
            case StepTaken():
                self._last_start.setdefault("first_step", event.seconds)
                self._state, self._stepping, self._end_cause = "running", True, "killed"
                if isinstance(event, StepCommitted) and event.step > self._newest_step:
                    self._newest_step = event.step
                    self._cause = "rollback"  # unless a failure or a start comes first
            case RunStarted(start_seconds=parts):
                self._state, self._last_start = "running", dict(parts)
            case Restored() if before == "running":
                self._stepping = False
            case RunStopped() | RunDone():
                self._state, self._stepping, self._end_cause = "ended", False, event.name
            case RankLost():
                self._state, self._stepping, self._end_cause = "failed", False, "lost_rank"
            case RunFailed():
                self._state, self._stepping, self._end_cause = "failed", False, self._cause


def _step_parts(step: StepCommitted) -> dict[str, int]:
    """The phases of a step that moved the run forward.

    Where another rank waited longer for its batch than rank 0 did, rank 0 waited for that rank in a
    collective: this part of the exposed communication is a wait for data.
    """
    whole = _micro(step.seconds)
    wait = min(whole, _micro(step.data_wait_seconds))
    own = step.rank_0_data_wait_seconds
    for_others = 0 if own is None else max(0, wait - _micro(own))
    exposed = sum(map(_micro, step.exposed_seconds.values()))
    exposed = min(whole - wait, max(0, exposed - for_others))
    return {
        "data_wait": wait,
        "communication_exposed": exposed,
        "productive": whole - wait - exposed,
    }


def _micro(seconds: float | None) -> int:
    """Whole microseconds, at least 0; 0 for a number that is not finite or is missing."""
    if seconds is None or not 0 < seconds < 1e12:
        return 0
    return round(seconds * _MICRO)


def summed(ledger: Ledger, step: int) -> LedgerSummed:
    """The event that publishes a ledger; phases and causes without time are left out."""
    return LedgerSummed(
        step=step,
        wall_seconds=ledger.wall_seconds,
        goodput=ledger.goodput,
        step_share=ledger.step_share,
        seconds={phase: each for phase, each in ledger.seconds.items() if each},
        lost_seconds={cause: each for cause, each in ledger.lost_seconds.items() if each},
        restarts={cause: count for cause, count in ledger.restarts.items() if count},
        rank_seconds=ledger.rank_seconds,
        last_start=dict(ledger.last_start),
    )


def ledger_table(sums: LedgerSummed) -> str:
    """A ledger for people: a line for each phase, then causes, restarts and the last start.

    Shares are of the wall time without ``idle``. A ledger without time gives an empty text.
    """
    if sums.goodput is None or sums.step_share is None:
        return ""
    idle = sums.seconds.get("idle", 0.0)
    ran = sums.wall_seconds - idle
    beside = f" and {duration(idle)} idle" if idle else ""
    lines = [
        f"goodput {sums.goodput:.1%} of {duration(ran)}{beside}; with communication and waits for "
        f"data {sums.step_share:.1%}"
    ]
    for phase in PHASES:
        spent = sums.seconds.get(phase, 0.0)
        if spent and phase != "idle":
            lines.append(f"  {phase:<22}{duration(spent):>11}  {spent / ran:>6.1%}")
    lost = sorted(sums.lost_seconds.items(), key=lambda item: -item[1])
    for head, parts in (
        ("lost to", [f"{cause} {duration(spent)}" for cause, spent in lost]),
        ("restarts", [f"{count} after {cause}" for cause, count in sums.restarts.items()]),
        ("last start", [f"{part} {duration(each)}" for part, each in sums.last_start.items()]),
    ):
        if parts:
            lines.append(f"  {head:<12}{', '.join(parts)}")
    return "\n".join(lines)
