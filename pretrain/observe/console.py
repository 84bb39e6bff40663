"""The run's JSON lines and what a person sees."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """Tell a person, at once."""
    print(text, flush=True)


def complain(text: str) -> None:
    """Tell a person what is wrong: one line."""
    print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)


def progress_line(step: int, steps: int, values: Mapping[str, Any]) -> str:
    """What a log interval prints."""
    line = (
        f"step {step:>{len(str(steps))}}/{steps}  loss {values['loss']:.4f}  "
        f"lr {values['lr']:.2e}  grad norm {values['grad_norm']:.2f}  "
        f"{values['tokens_per_second']:,.0f} tokens/s  MFU {values['mfu']:.0%}"
    )
    if values["exposed_seconds"]:
        share = {k: v / values["seconds"] for k, v in values["exposed_seconds"].items()}
        parts = ", ".join(f"{name} {each:.0%}" for name, each in share.items())
        line += f"  waits {sum(share.values()):.0%} ({parts})"
    if "bubble" in values:
        line += f"  bubble {values['bubble']:.0%} (formula {values['bubble_formula']:.0%})"
    if "load_imbalance" in values:
        line += f"  expert load max/mean {values['load_imbalance']:.2f}"
    for name in ("dropped", "rerouted"):
        if values.get(name):
            line += f"  {name} {values[name]:,.0f}"
    return line


class Bar:
    """Bytes done and time left, on one line of a terminal; nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.shown = sys.stderr.isatty()
        self.last = -1.0
        self._lock = threading.Lock()  # several threads tell of what they have done

    def __call__(self, count: int) -> None:
        """``count`` more bytes are done."""
        with self._lock:
            self.done += count
            now = time.monotonic()
            if self.shown and (now - self.last > 0.1 or self.done >= self.total):
                self.last = now
                share = min(self.done / max(self.total, 1), 1.0)
                left = (now - self.began) * (1 - share) / max(share, 1e-9)
                text = f"{share:6.1%}  {human_bytes(self.done)}  {left:.0f} s left"
                end = "" if share < 1 else "\n"
                print(f"\r{text:<50}", end=end, file=sys.stderr, flush=True)


def human_bytes(count: float) -> str:
    """``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"
