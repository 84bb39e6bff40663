"""The time that a rank's experts compute, without waiting for other ranks."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Sums intervals on one device; only :meth:`seconds` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.rows: torch.Tensor | int = 0
        """The assignments that were computed in the intervals."""
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._began = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def count(self, rows_per_expert: torch.Tensor) -> None:
        """Add the assignments of an interval."""
        rows = rows_per_expert.sum()
        # 0 plus a tensor would be a kernel.
        self.rows = self.rows + rows if isinstance(self.rows, torch.Tensor) else rows

    def __enter__(self) -> None:
        if self._cuda:
            self._events.append((_event(), _event()))
            self._events[-1][0].record()
        else:
            self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began

    def seconds(self) -> float:
        """The sum of all intervals; on CUDA this call waits for the end of the last interval."""
        milliseconds = 0.0
        for begin, end in self._events:
            end.synchronize()
            milliseconds += begin.elapsed_time(end)
        return self._seconds + milliseconds / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
