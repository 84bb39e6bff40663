"""What a person sees of a run on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parallel.layout import Topology, count_ranks, name_ranks
from pretrain.observe.checkpoint_events import (
    CheckpointCommitted,
    CheckpointFailed,
    Restored,
)
from pretrain.observe.data_events import DataFetched
from pretrain.observe.event import Event, Notice
from pretrain.observe.events import Regrouped, Resized, RunStarted, RunStopped, SpecChanged
from pretrain.observe.metric import Metric, measurements
from pretrain.observe.rank_events import (
    HEALTH_RULES,
    CorruptionFound,
    DeviceProblem,
    FaultInjected,
    HealthAction,
    HealthSignal,
    RankLossOdd,
    RankMoves,
    RankStuck,
    StragglerEnded,
    StragglerFound,
    StragglerGain,
)
from pretrain.observe.step_events import (
    Evaluated,
    IntervalEnded,
    Moved,
    StepCommitted,
    StepSkipped,
)

FAILURES_IN_A_ROW = 3
"""From so many failures of a tier on, the console says that the tier is out of order."""

STOP_CAUSES = {
    "notice_file": " on a preemption notice",
    "time_limit": " before the time limit",
    "slow_machine": " to go on without a slow machine",
    "part": " as a part of the step wished",
}
"""What people are told of a stop, by its cause."""


def say(text: str) -> None:
    """Tell a person, at once."""
    print(text, flush=True)


def complain(text: str) -> None:
    """Tell a person what is wrong: one line."""
    print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)


class Console:
    """A sink that prints a run to a person: on rank 0 everything, elsewhere problems only.

    Args:
        steps: the spec's number of steps.
        rank: this process's rank.
    """

    def __init__(self, steps: int, rank: int) -> None:
        self.steps, self.rank = steps, rank
        self._first = True
        """Whether this start has committed no step yet."""
        self._reported = 0
        """The step up to which there is a line."""

    def close(self) -> None:
        """Leave the terminal as it was."""

    def __call__(self, event: Event) -> None:
        """Print one event, where there is something to print."""
        first, self._first = self._first, self._first and not isinstance(event, StepCommitted)
        before = self._reported
        if isinstance(event, RunStarted | IntervalEnded):
            self._reported = event.step
        problem = _problem(event, self.rank)
        if problem is not None:
            complain(problem)
        elif self.rank == 0 and isinstance(event, StepCommitted) and first:
            say(first_line(event, self.steps))
        elif self.rank == 0 and isinstance(event, IntervalEnded):
            progress = progress_line(event, self.steps)
            if self.steps > event.step > before:
                seconds = event.seconds / (event.step - before)
                progress += f"  {duration((self.steps - event.step) * seconds)} left"
            say(f"{progress}  {time.strftime('%H:%M:%S')}")
        elif self.rank == 0 and (line := _line(event)) is not None:
            say(line)


def _problem(event: Event, rank: int) -> str | None:
    match event:
        case CheckpointFailed(step=step, tier=tier, error=error, in_a_row=count, told=False):
            which = f"checkpoint of step {step}" if step >= 0 else "a checkpoint"
            text = f"rank {rank}: {which} is not in tier {tier}: {error}"
            if count >= FAILURES_IN_A_ROW:
                text += f"; tier {tier} has failed {count} times in a row; training goes on"
            return text
        case Notice(text=text, problem=True):
            return f"rank {rank}: {text}"
        case CorruptionFound(text=text, stops=False) if rank == 0:
            return f"{text}; training goes on"
        case RankStuck(text=text, ends_run=ends_run):
            return f"{text}; the run ends" if ends_run else text
        case DeviceProblem(rank=bad, device=device, text=text):
            return f"rank {bad}: {text} on {device}"
        case RankLossOdd(rank=odd, loss=loss, usual_loss=usual, steps=steps):
            return f"rank {odd} has loss {loss:.4f}, other ranks {usual:.4f} (over {steps} steps)"
    return None


def regrouped_text(event: Regrouped) -> str:
    """Who left and why, who came, and what trains on, in one line."""
    parts = [f"replica {gone['replica']} left ({gone['why']})" for gone in event.left]
    parts += [f"replica {seat} came" for seat in event.joined]
    changes = "; ".join(parts) or "replicas met"
    count = f"{event.replicas} replica{'s' if event.replicas > 1 else ''}"
    return (
        f"{changes}: {count} on {event.world_size} ranks go on after step {event.step} "
        f"({event.seconds:.2f} s, epoch {event.epoch})"
    )


def _line(event: Event) -> str | None:
    match event:
        case RunStarted():
            return _greeting(event)
        case Restored(step=step, tier=tier) if tier != "shared":
            return f"restored step {step} from tier {tier}"
        case Regrouped():
            return regrouped_text(event)
        case Resized(step=step, before=before, after=after, epoch=epoch):
            old, new = Topology(**before).describe(), Topology(**after).describe()
            return f"resized after step {step}: {old} -> {new} (topology epoch {epoch})"
        case SpecChanged(step=step, field=field, before=before, now=now):
            return f"spec changed since step {step}: {field} was {before}, is {now}"
        case Notice(text=text):
            return text
        case DataFetched(cache_misses=misses, fetched_bytes=count) if misses:
            return (
                f"data cache: {event.hit_ratio:.1%} of the shards were on disk; "
                f"{human_bytes(count)} fetched"
            )
        case HealthSignal(step=step, text=text) | HealthAction(step=step, text=text):
            return f"step {step + 1}: {text}"
        case FaultInjected(step=step, text=text):
            return f"step {step + 1}: injected fault: {text}"
        case StepSkipped(reason=reason) if reason in HEALTH_RULES:
            return None  # the signal has said why
        case RankMoves(ranks=ranks):
            return f"{name_ranks(ranks)} {'move' if len(ranks) > 1 else 'moves'} again"
        case StepSkipped(step=step, why=why):
            return f"step {step} skipped: {why}"
        case StragglerFound(rank=rank, speed=speed, since_step=since, action=action):
            return (
                f"rank {rank} is slow since step {since}: {speed:.0%} of the other ranks' speed; "
                f"{action}"
            )
        case StragglerEnded(step=step, rank=rank):
            return f"rank {rank} is as fast as the others again after step {step}"
        case StragglerGain(seconds_before=before, seconds_after=after, kept=kept):
            line = f"the answer to a slow rank: {before:.3f} s a step before, {after:.3f} s after"
            return line if kept else f"{line}; micro-batches are divided equally again"
        case Evaluated(step=step, bits_per_byte=bits, whole=False, bits_per_byte_by_set=sets):
            more = ", ".join(f"{name} {each:.4f}" for name, each in sets.items())
            line = f"validation at step {step}: {bits:.4f} bits per byte"
            return f"{line} ({more})" if more else line
        case Moved(step=step, report=report):
            return f"step {step}: {report[0]}"
        case CheckpointCommitted(step=step, tier="shared", seconds=seconds):
            return f"checkpoint of step {step} committed in {seconds:.2f} s"
        case RunStopped(step=step, cause=cause):
            why = STOP_CAUSES.get(cause, "")
            return f"stopped after step {step}{why}; the same command resumes"
    return None


def _greeting(start: RunStarted) -> str:
    ranks = count_ranks(start.world_size)
    if start.world_size > 1:
        ranks += f" ({start.layout})"
    if start.spares:
        ranks += f" and {start.spares} spare{'s' if start.spares > 1 else ''}"
    lines = [
        f"{start.job}: {start.parameters:,} parameters on {ranks}, "
        f"{start.device}; {start.steps} steps of {start.step_tokens:,} tokens; "
        f"spec {start.spec_hash[:12]}"
    ]
    if start.layout_reason:
        lines.append(f"layout by elastic.enabled: {start.layout_reason}")
    if start.metrics_url is not None:
        lines.append(f"metrics at {start.metrics_url}")
    if start.step >= start.steps:
        lines.append(f"done already: step {start.step} of {start.steps}")
    elif start.step:
        lines.append(f"resuming after step {start.step}")
    return "\n".join(lines)


def first_line(step: StepCommitted, steps: int) -> str:
    """What the console says of the first step of a start, which may be long before an interval's
    end."""
    return (
        f"step {step.step:>{len(str(steps))}}/{steps}  loss {step.loss:.4f}  lr {step.lr:.2e}  "
        f"grad norm {step.grad_norm:.2f}  first step of this start, {duration(step.seconds)}"
    )


def progress_line(report: IntervalEnded, steps: int) -> str:
    """What the console says of a log interval: the fields that declare ``short``, in order."""
    head = f"step {report.step:>{len(str(steps))}}/{steps}"
    return "  ".join([head, *(text for _, text in shown(report, lambda metric: metric.short))])


def shown(event: Event, form: Callable[[Metric], str]) -> Iterator[tuple[Metric, str]]:
    """The values of an event for people.

    Args:
        event: whose metrics have the values.
        form: the format that a metric declares for the occasion; empty where there is none.
    """
    for metric, series in measurements(event):
        for key, value in series.items() if form(metric) else ():
            if value is not None and (value or not metric.hides_zero):
                what = human_bytes(value) if metric.unit == "bytes" else value
                yield metric, form(metric).format(what, key="".join(key), event=event)


@contextmanager
def progress_bar(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, for as long as the context lasts; nothing where stderr is none.

    Yields a function that any thread calls with the number of bytes that have just been done.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console  # here: only some commands show a bar
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TaskProgressColumn(),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total_bytes)
        yield lambda count: progress.advance(task, count)


def human_bytes(count: float) -> str:
    """``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """``12.3 s``, ``4 m 05 s`` or ``7 h 03 m``."""
    if seconds < 99.95:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} m {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} m"
