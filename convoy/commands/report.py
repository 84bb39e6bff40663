"""``convoy report``: runs as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from convoy.commands.parsing import Command, argument
from convoy.commands.results import check_matplotlib, check_writable
from pretrain.errors import InputError
from pretrain.observe import complain, say

_EPILOG = """\
examples:
  convoy report runs/stdlib-tiny
  convoy report runs/stdlib-tiny runs/wider --output both.html

The file has loss, learning rate, gradient norm, throughput, goodput, where the time went, expert
loads, rank speeds, what happened, checkpoints, spec and text. It needs no network and no other
file. The element with the id "data" has the numbers as JSON.

exit codes:
  0  the file was written
  2  a folder is no run's, the file cannot be written, or matplotlib is missing
"""


def _report(args: argparse.Namespace) -> int:
    from convoy.report import write_report

    check_writable("--output", args.output)
    check_matplotlib("a report")
    output = args.output or args.runs[0] / "report.html"
    for note in write_report(args.runs, output):
        complain(note)
    say(f"{output}: {output.stat().st_size / 1024:,.0f} KiB")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.output is None and len(args.runs) > 1:
        raise InputError("--output is missing: several runs need the name of a file")


main = Command(
    "convoy report",
    "Write what became of runs as one HTML file.",
    _EPILOG,
    [
        argument("runs", "RUN", "the folder of a run", nargs="+", type=Path),
        argument(
            "--output", "FILE", "the file; with one RUN by default RUN/report.html", type=Path
        ),
    ],
    _report,
    check=_check,
)
