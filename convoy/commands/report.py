"""``convoy report``: runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from convoy.commands.parsing import Parser, ended
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


def main(arguments: Sequence[str]) -> int:
    """Run ``convoy report``; returns its exit code."""
    parser = Parser("convoy report", "Write a report of runs as one HTML file.", _EPILOG)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the file; with one RUN by default RUN/report.html",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(arguments)
    if args.output is None and len(args.runs) > 1:
        raise parser.refusal("--output is missing: several runs need the name of a file")
    output = args.output or args.runs[0] / "report.html"
    return ended(lambda: _write(args.runs, output), debug=args.debug, stopped="nothing changed")


def _write(folders: Sequence[Path], output: Path) -> int:
    from convoy.report import write_report

    for note in write_report(folders, output):
        complain(note)
    say(f"{output}: {output.stat().st_size / 1024:,.0f} KiB")
    return 0
