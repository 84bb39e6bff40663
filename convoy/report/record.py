"""What the files of a run say of it, for a report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt import CheckpointError, committed_steps, open_store
from ckpt.format import Manifest, read_manifest
from pretrain import observe
from pretrain.errors import InputError

Moment = tuple[float, str, str]
"""Hours since the run's begin, the kind of the event, and a line for people."""


@dataclass
class RunRecord:
    """A run, from its folder."""

    name: str
    folder: Path
    steps: dict[int, observe.StepCommitted] = field(default_factory=dict)
    """The newest line of each step: a step that was taken again counts once."""
    hours: list[tuple[float, int]] = field(default_factory=list)
    """Hours since the begin, and the step, of every committed step in the order of the log."""
    evaluations: dict[int, observe.Evaluated] = field(default_factory=dict)
    intervals: dict[int, observe.IntervalEnded] = field(default_factory=dict)
    shares: dict[int, list[float]] = field(default_factory=dict)
    """Planned work of each rank over the mean of its expert group, by the step of the plan."""
    goodput: list[tuple[float, float]] = field(default_factory=list)
    """Hours since the begin, and the goodput up to then."""
    moments: list[Moment] = field(default_factory=list)
    start: observe.RunStarted | None = None
    """Of the newest start."""
    ledger: observe.Ledger = field(default_factory=lambda: observe.ledger_of(()))
    summary: observe.Summary | None = None
    manifests: list[Manifest] = field(default_factory=list)
    """Of the committed checkpoints that are left, oldest first."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the report must know of the files, a line each."""
    label: str = ""
    """The name in the report: the folder too, where runs share a name."""

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec of the newest start, or checkpoint; empty where neither has it."""
        if self.start is not None and self.start.spec:
            return self.start.spec
        return self.manifests[-1].spec if self.manifests else {}

    @property
    def source_tokens(self) -> dict[str, int]:
        """Positions of the sequences drawn from each source; empty for one source."""
        tokens: dict[str, int] = {}
        for interval in self.intervals.values():
            for name, count in interval.source_tokens.items():
                tokens[name] = tokens.get(name, 0) + count
        return tokens

    @property
    def dollars(self) -> float | None:
        """What the run has cost, where its spec has a price."""
        price = self.spec.get("metrics", {}).get("dollars_per_rank_hour")
        return None if price is None else self.ledger.rank_seconds / 3600 * float(price)


def read_run(folder: Path) -> RunRecord:
    """Read the files of a run.

    Raises InputError: the folder has no log, or a log without a line that can be read.
    """
    path = folder / "log.jsonl"
    try:
        log = observe.read_log(path)
    except OSError as error:
        raise InputError(
            f"{folder} has no log that can be read ({path}: {error.strerror}); RUN is the folder "
            f"of a run, such as runs/stdlib-tiny"
        ) from None
    if not log.lines:
        raise InputError(f"{path} has no line that can be read: the run has not begun")
    run = RunRecord(name=folder.resolve().name, folder=folder)
    run.ledger = observe.ledger_of(log.lines)
    if log.problems:
        more = f" and {len(log.problems) - 1} more" if len(log.problems) > 1 else ""
        run.notes.append(f"{log.problems[0]}{more}; passed over")
    _take(run, log.lines)
    run.summary = observe.Summary.read(folder / "summary.json")
    _read_checkpoints(run)
    if run.start is not None and run.start.job:
        run.name = run.start.job
    run.label = run.name
    if bad := [s for s, step in run.steps.items() if not math.isfinite(step.loss)]:
        run.notes.append(f"the loss is not a number in {len(bad)} steps, first in step {bad[0]}")
    if not run.steps:
        run.notes.append("the log has no step")
    return run


def _take(run: RunRecord, lines: list[observe.LoggedEvent]) -> None:
    begin = run.ledger.begin or 0.0
    newest, mixed = 0, 0
    for line in lines:
        event = line.event
        hours = max(0.0, (line.time or begin) - begin) / 3600
        match event:
            case observe.StepCommitted(step=step):
                mixed += step <= newest
                newest = step
                run.steps[step] = event
                run.hours.append((hours, step))
            case observe.Evaluated(step=step):
                run.evaluations[step] = event
            case observe.IntervalEnded(step=step):
                run.intervals[step] = event
            case observe.CapacityPlanned(step=step, plans=plans):
                run.shares[step] = [
                    units * len(group) / max(1, sum(group)) for group in plans for units in group
                ]
            case observe.LedgerSummed(goodput=float(goodput)):
                run.goodput.append((hours, goodput))
            case observe.Launched() | observe.Restored():
                newest = 0
            case observe.RunStarted():
                newest, run.start = 0, event
        run.moments += ((hours, kind, text) for kind, text in _moment(event))
    if mixed:
        run.notes.append(
            f"steps come again without a restart in {mixed} lines: two starts wrote the log at one "
            f"time; the newest line of a step counts"
        )


def _moment(event: observe.Event) -> Iterator[tuple[str, str]]:
    """The kind and the text of an event that the time line shows."""
    match event:
        case observe.RunStarted(step=step, world_size=ranks):
            yield "start", f"start after step {step} on {ranks} ranks"
        case observe.Resized(step=step, before=before, after=after):
            changed = {k: (before.get(k), after[k]) for k in after if before.get(k) != after[k]}
            text = ", ".join(f"{axis} {old} to {new}" for axis, (old, new) in changed.items())
            yield "resize", f"resize after step {step}: {text}"
        case observe.FaultInjected(step=step, text=text):
            yield "fault", f"step {step + 1}: injected fault: {text}"
        case observe.RankLost(step=step):
            yield "failure", f"after step {step}: a rank was lost"
        case observe.RunFailed(step=step, reason=reason, state=state):
            yield "failure", f"after step {step}: {state}: {reason}"
        case observe.RankStuck(text=text) | observe.CorruptionFound(text=text):
            yield "failure", text
        case observe.HealthAction(step=step, text=text):
            yield "health", f"step {step + 1}: {text}"
        case observe.StepSkipped(step=step, why=why, reason=reason) if (
            reason not in observe.HEALTH_RULES
        ):
            yield "health", f"step {step} skipped: {why}"
        case observe.StragglerFound(rank=rank, speed=speed, since_step=since):
            yield "straggler", f"rank {rank} is slow since step {since}: {speed:.0%}"
        case observe.CheckpointCommitted(step=step, tier="shared"):
            yield "checkpoint", f"checkpoint of step {step}"
        case observe.RunStopped(step=step):
            yield "end", f"stopped after step {step}"
        case observe.RunDone(step=step):
            yield "end", f"done after step {step}"


def _read_checkpoints(run: RunRecord) -> None:
    """The manifests of the run's checkpoints; a note where these cannot be read."""
    path: Path | str = run.folder / "checkpoints"
    try:
        recorded = observe.read_status(run.folder).checkpoint_path
        if recorded is not None and ("://" in recorded or not Path(path).is_dir()):
            path = recorded
    except ValueError:
        pass  # a run of before status.json
    try:
        store = open_store(path)
        run.manifests = [read_manifest(store, step) for step in committed_steps(path)]
    except (OSError, ValueError, CheckpointError) as error:
        run.notes.append(f"checkpoints at {path} cannot be read, so their list is missing: "
                         f"{' '.join(str(error).split())}")  # fmt: skip
        return
    if not run.manifests:
        run.notes.append(f"there is no checkpoint at {path}, so their list is missing")
