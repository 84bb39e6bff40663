"""``make test``: the suite in two lanes at a time, and one summary of both.

Tests that mostly wait, for a time-out or for machines that are lost, hold a worker and no core.
They have the marker ``waits`` and a lane with more workers; the other lane has a worker for each of
two cores. Arguments go to both lanes. The exit code is 0 where both lanes passed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
MARK = "pytest.mark.waits"
NOTHING_SELECTED = 5
"""The exit code of pytest where ``arguments`` leave a lane without tests."""


def files_that_wait() -> list[str]:
    """The files with the marker: the workers of their lane import no others."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if MARK in file.read_text()]


def lane(marks: str, workers: int, arguments: list[str], out: IO[str]) -> subprocess.Popen[str]:
    """Start the tests with ``marks``, and write what pytest says to ``out``."""
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "worksteal"]
    return subprocess.Popen(
        [*command, "-m", marks, *arguments], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run both lanes; returns the exit code of ``make test``."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        waits = lane("waits and not slow", 6, [*files_that_wait(), *arguments], out)
        try:
            works = lane("not waits and not slow", 2, arguments, sys.stdout)
            codes = {"not waits": works.wait(), "waits": waits.wait()}
        finally:
            waits.terminate()
            waits.wait()
        out.seek(0)
        text = out.read()
    print(f"\nthe tests that wait:\n{text}", flush=True)
    lines = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(*lines, sep="\n")
    passed = all(code in (0, NOTHING_SELECTED) for code in codes.values())
    said = ", ".join(f"-m '{marks}' ended with {code}" for marks, code in codes.items())
    print(f"{'passed' if passed else 'FAILED'} in {time.monotonic() - began:.0f} s: {said}")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
