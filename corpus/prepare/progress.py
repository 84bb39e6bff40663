"""How far a preparation is, for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS = 30.0
"""Between two lines where there is no terminal."""

Advance = Callable[[int, int], None]
"""Told of the bytes that were read and the tokens that they gave."""


@contextmanager
def progress(total_bytes: int, say: Callable[[str], None]) -> Iterator[Advance]:
    """A bar with the time left on a terminal; elsewhere a line every half a minute."""
    console = Console()
    if not console.is_terminal:
        yield _lines(total_bytes, say)
        return
    columns = (
        BarColumn(), DownloadColumn(), TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total_bytes, tokens=0)
        tokens = 0

        def advance(size: int, more: int) -> None:
            nonlocal tokens
            tokens += more
            bar.update(task, advance=size, tokens=tokens)

        yield advance


def _lines(total_bytes: int, say: Callable[[str], None]) -> Advance:
    began = last = time.monotonic()
    done = tokens = 0

    def advance(size: int, more: int) -> None:
        nonlocal done, tokens, last
        done, tokens = done + size, tokens + more
        now = time.monotonic()
        if now - last >= _SECONDS and 0 < done < total_bytes:
            last = now
            left = (now - began) * (total_bytes - done) / done
            say(f"{done / total_bytes:.0%}, {tokens:,} tokens, about {left / 60:.0f} minutes left")

    return advance
