"""A view of a run at the foot of a terminal; what happens scrolls by above it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pretrain.observe.checkpoint_events import CheckpointCommitted
from pretrain.observe.console import Console, duration, shown
from pretrain.observe.event import Event
from pretrain.observe.events import RunDone, RunFailed, RunStarted, RunStopped
from pretrain.observe.step_events import SHOWN, Evaluated, IntervalEnded, StepCommitted

_BLOCKS = "▁▂▃▄▅▆▇█"
_RECENT_STEPS = 20
_SPARK_POINTS = 40
_MOST_CELLS = 64
_REFRESHES_PER_SECOND = 2


def on_terminal(*, plain: bool) -> bool:
    """Whether a person sees standard output on a terminal that can draw, and wants a drawing."""
    return not plain and sys.stdout.isatty() and not Terminal().is_dumb_terminal


class LiveConsole(Console):
    """A sink that draws a run on rank 0's terminal; lines of the log intervals are in the drawing.

    The drawing begins with the first step and ends with the start. :meth:`close` ends it too.

    Args:
        steps: the spec's number of steps.
        terminal: where to draw; None for standard output.
        now: seconds, from any moment on.
        wall: Unix time.
    """

    def __init__(
        self,
        steps: int,
        *,
        terminal: Terminal | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(steps, 0)
        self.view = View(steps, now, wall)
        self._live = Live(
            get_renderable=self.view.drawing,
            console=terminal,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )

    def __call__(self, event: Event) -> None:
        """Take one event into the drawing, and print what the drawing does not have."""
        self.view.take(event)
        if isinstance(event, StepCommitted) and not self._live.is_started:
            self._live.start()
        if isinstance(event, RunStopped | RunDone | RunFailed):
            self.close()
        if not isinstance(event, IntervalEnded) or event.step == self.steps:
            super().__call__(event)

    def close(self) -> None:
        """Take the drawing off the terminal."""
        if self._live.is_started:
            self._live.stop()


class View:
    """What the drawing shows now."""

    def __init__(
        self, steps: int, now: Callable[[], float], wall: Callable[[], float] = time.time
    ) -> None:
        self.steps, self._now, self._wall = steps, now, wall
        self.began = self.last_step = now()
        self.step = 0
        self.losses: deque[float] = deque(maxlen=4000)
        self.recent: deque[StepCommitted] = deque(maxlen=_RECENT_STEPS)
        self.started: RunStarted | None = None
        self.interval: IntervalEnded | None = None
        self.score: Evaluated | None = None
        self.saved: CheckpointCommitted | None = None
        self.saved_at = 0.0

    def take(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case RunStarted():
                self.started = event
            case StepCommitted():
                self.step, self.last_step = event.step, self._now()
                self.losses.append(event.loss)
                self.recent.append(event)
            case IntervalEnded():
                self.interval = event
            case Evaluated():
                self.score = event
            case CheckpointCommitted():
                self.saved, self.saved_at = event, self._now()

    def drawing(self) -> RenderableType:
        """The drawing as it is now; called from a thread of its own."""
        steps = list(self.recent)
        if not steps:
            return Text("")
        newest, seconds = steps[-1], sum(step.seconds for step in steps)
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        rate = sum(step.target_tokens for step in steps) / max(seconds, 1e-9)
        mfu = sum(step.mfu * step.seconds for step in steps) / max(seconds, 1e-9)
        interval = self.interval
        rows: dict[str, list[str]] = {}
        for metric, text in shown(interval, lambda metric: metric.live[1]) if interval else ():
            rows.setdefault(metric.live[0], []).append(text)
        loss = Text(f"{newest.loss:.4f}  ").append(sparkline(self.losses), "cyan")
        table.add_row("loss", loss.append("".join(f"  {text}" for text in rows.pop("loss", ()))))
        if self.score is not None:
            table.add_row("held-out", f"{self.score.bits_per_byte:.4f} bits per byte")
        table.add_row(
            "step",
            f"lr {newest.lr:.2e}   gradient norm {newest.grad_norm:.2f}   "
            f"{newest.tokens_seen:,} tokens seen",
        )
        table.add_row(
            "speed",
            f"{rate:,.0f} tokens/s   MFU {mfu:.0%}   {seconds / len(steps):.3f} s a step",
        )
        table.add_row("seconds", _shares(steps, seconds))
        for row, texts in rows.items():
            table.add_row(row, "   ".join(texts))
        if interval is not None:
            if interval.layer_imbalances:
                strip = _strip([each - 1 for each in interval.layer_imbalances], 1.0)
                worst = max(interval.layer_imbalances)
                table.add_row("experts", strip.append(f"  busiest {worst:.2f} x mean, by layer"))
            if interval.rank_seconds and len(interval.rank_seconds) > 1:
                mean = sum(interval.rank_seconds) / len(interval.rank_seconds) or 1.0
                strip = _strip([each / mean - 1 for each in interval.rank_seconds], 0.5)
                slowest = max(interval.rank_seconds) / mean
                table.add_row("ranks", strip.append(f"  slowest {slowest:.2f} x mean time"))
        if self.saved is not None:
            ago = duration(self._now() - self.saved_at)
            text = f"step {self.saved.step} in tier {self.saved.tier}, {ago} ago"
            table.add_row("checkpoint", text)
        return Panel(
            Group(self._progress(seconds / len(steps)), table),
            title=self._title(),
            subtitle=time.strftime("%H:%M:%S", time.localtime(self._wall())),
            subtitle_align="right",
        )

    def _title(self) -> str:
        start = self.started
        return "" if start is None else f"{start.job}  {start.layout}  {start.spec_hash[:12]}"

    def _progress(self, step_seconds: float) -> RenderableType:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True)
        waits = self._now() - self.last_step
        quiet = f"   no step for {duration(waits)}" if waits > 10 + 3 * step_seconds else ""
        left = duration((self.steps - self.step) * step_seconds)
        table.add_row(
            f"step {self.step:,}/{self.steps:,}",
            ProgressBar(total=max(1, self.steps), completed=self.step),
            f"{duration(self._now() - self.began)}, {left} left{quiet}",
        )
        return table


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """Values as a line of blocks, the mean of equal parts each; a part without numbers is ``x``."""
    some = list(values)
    parts = min(_SPARK_POINTS, len(some))
    means: list[float | None] = []
    for part in range(parts):
        chosen = some[part * len(some) // parts : (part + 1) * len(some) // parts]
        finite = [v for v in chosen if abs(v) < float("inf")]  # also False for a NaN
        means.append(sum(finite) / len(finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    if not known:
        return "x" * parts
    low, spread = min(known), max(known) - min(known) or 1.0
    top = len(_BLOCKS) - 1
    return "".join("x" if m is None else _BLOCKS[round((m - low) / spread * top)] for m in means)


def _strip(values: Sequence[float], most: float) -> Text:
    """One block for each value from 0 to ``most``; of many values the largest of each part."""
    parts = min(_MOST_CELLS, len(values))
    strip = Text()
    for part in range(parts):
        value = max(values[part * len(values) // parts : (part + 1) * len(values) // parts])
        share = min(1.0, max(0.0, value / most))
        color = "green" if share < 0.34 else "yellow" if share < 0.67 else "red"
        strip.append(_BLOCKS[round(share * (len(_BLOCKS) - 1))], color)
    return strip


def _shares(steps: Sequence[StepCommitted], seconds: float) -> str:
    """Where the seconds of the last steps went, as shares."""
    parts = {"data": sum(step.data_wait_seconds for step in steps)}
    for step in steps:
        for purpose, exposed in step.exposed_seconds.items():
            word = SHOWN.get(purpose, purpose)
            parts[word] = parts.get(word, 0.0) + exposed
    parts = {"compute": max(0.0, seconds - sum(parts.values())), **parts}
    return "   ".join(f"{name} {each / max(seconds, 1e-9):.0%}" for name, each in parts.items())
