"""``convoy pretrain --profile FIRST:LAST``: a trace of some steps on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pretrain.errors import InputError
from pretrain.observe import Events
from pretrain.runtime import Runtime

Window = tuple[int, int]
"""The first and the last step."""

_BETWEEN_STEPS = ("data", "save", "finish")


def read_window(text: str, steps: int) -> Window:
    """What ``--profile`` says.

    Raises InputError where it is not FIRST:LAST with 1 <= FIRST <= LAST <= ``steps``.
    """
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= steps:
        raise InputError(
            f"--profile ({text}) must be FIRST:LAST with 1 <= FIRST <= LAST <= train.steps "
            f"({steps}), as in 10:12"
        )
    return first, last


class StepProfiler:
    """Traces the steps of a window with torch.profiler, and writes the trace after the last.

    In the trace each step is a region ``step N``, with regions of its phases inside: ``data``,
    ``forward_backward``, ``barrier`` and ``optimizer``.

    Args:
        window: the first and the last step; None for no trace.
        path: the file of this rank.
        tell: takes a line for people.
    """

    def __init__(self, window: Window | None, path: Path, tell: Callable[[str], None]) -> None:
        self._window, self._path, self._tell = window, path, tell
        self._profile: profile | None = None
        self._step = ExitStack()
        self._phase = ExitStack()

    @staticmethod
    def of_rank(
        window: Window | None, runtime: Runtime, events: Events, run_path: Path
    ) -> StepProfiler:
        """The profiler of this rank; the file is ``RUN_DIR/profile/steps-F-L-rank-N.json``."""
        first, last = window or (0, 0)
        path = run_path / "profile" / f"steps-{first}-{last}-rank-{runtime.rank}.json"

        def tell(text: str) -> None:
            if runtime.is_first:
                events.note(text, step=runtime.heartbeat.place.step)

        return StepProfiler(window, path, tell)

    def phase(self, name: str, step: int) -> None:
        """A phase begins, after ``step`` committed steps."""
        if self._window is None:
            return
        first, last = self._window
        if self._profile is None and name == "data" and step >= first - 1:
            if step >= last:
                self._window = None
                self._tell(
                    f"steps {first} to {last} are not profiled: step {step} is taken already"
                )
                return
            self._begin()
        elif self._profile is not None and step >= last and name in _BETWEEN_STEPS:
            self.close()
        if self._profile is None:
            return
        self._phase.close()
        if name == "data":
            self._step.close()
            self._step.enter_context(record_function(f"step {step + 1}"))
        self._phase.enter_context(record_function(name))

    def end_step(self) -> None:
        """The step is over: what comes until the next phase is of none."""
        self._phase.close()
        self._step.close()

    def close(self) -> None:
        """Write the trace of what was taken of the window."""
        self.end_step()
        trace, self._profile = self._profile, None
        if trace is None:
            return
        self._window = None
        trace.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._tell(f"the profile cannot be written: {error}")
            return
        self._tell(f"profile written: {self._path}, for chrome://tracing or ui.perfetto.dev")

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
