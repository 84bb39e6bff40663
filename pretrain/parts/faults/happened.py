"""Where a run notes the faults that have happened."""

from __future__ import annotations

from pathlib import Path

INJECTED = "injected"
"""The folder of a run with a file for each fault that has happened."""


def forget_faults(run_path: Path) -> None:
    """Let all faults happen again in the next run in this folder. Raises OSError."""
    folder = run_path / INJECTED
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
