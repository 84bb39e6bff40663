"""``convoy simulate``: what failures will cost a run, before it starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.commands.parsing import Parser, check_writable, ended
from convoy.commands.provenance import provenance
from pretrain.errors import InputError
from pretrain.observe import say

if TYPE_CHECKING:
    from convoy.plan import Scenario

_EPILOG = """\
examples:
  convoy simulate
  convoy simulate --gpus 1000,4096,16384,65536,100000 --json simulate.json --plot simulate.svg
  convoy simulate --set policy.restart=partial --set policy.interval_seconds=600
  convoy simulate cluster.toml --set policy.spares=16 --set policy.when_short=elastic
  convoy simulate --print-scenario > cluster.json

Without SCENARIO the cluster has 16,384 GPUs and the failures of Llama 3. --print-scenario shows all
fields with their values, and docs/planning.md says what each one means. With one number of GPUs the
lost time is shown by cause, with several there is one line for each number.

exit codes:
  0  the results were shown
  2  the scenario cannot be used, or a file cannot be written
  75 stopped
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``convoy simulate``; returns its exit code."""
    parser = Parser(
        "convoy simulate",
        "Simulate a run under failures: effective training time, best interval, best spares.",
        _EPILOG,
    )
    parser.add_argument(
        "scenario", nargs="?", type=Path, metavar="SCENARIO", help="a scenario, in TOML or JSON"
    )
    parser.add_overrides("a field of the scenario")
    parser.add_argument(
        "--gpus", metavar="N,N,...", help="one or more numbers of GPUs, in place of run.gpus"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw them too: *.svg, *.png or *.pdf; needs matplotlib",
    )
    parser.add_argument(
        "--print-scenario", action="store_true", help="print the scenario with all fields, and end"
    )
    parser.add_debug()
    args = parser.parse_args(arguments)
    return ended(lambda: _simulate(args), debug=args.debug, stopped="nothing was written")


def _simulate(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from convoy.plan import assess, check_plot, draw, load_scenario

    scenarios = [
        load_scenario(args.scenario, [*args.overrides, *size]) for size in _sizes(args.gpus)
    ]
    if args.print_scenario:
        say(json.dumps(scenarios[0].model_dump(exclude_none=True), indent=1))
        return 0
    check_writable("--json", args.json)
    if args.plot is not None:
        check_plot(args.plot)
    rows = [asdict(assess(scenario)) for scenario in scenarios]
    _show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps(_document(scenarios[0], rows), indent=1) + "\n")
    if args.plot is not None:
        draw(rows, args.plot)
    return 0


def _sizes(text: str | None) -> list[list[str]]:
    """The overrides that set each number of GPUs; one empty list where none is given."""
    if text is None:
        return [[]]
    numbers = [word.strip().replace("_", "") for word in text.split(",")]
    if not all(word.isdecimal() for word in numbers):
        raise InputError(f"--gpus ({text}) must be numbers with commas between: 4096,16384")
    return [[f"run.gpus={int(word)}"] for word in numbers]


def _show(rows: Sequence[dict[str, Any]]) -> None:
    from convoy.plan import causes_table, sizes_table, summary

    if len(rows) > 1:
        say(sizes_table(rows))
        return
    say(summary(rows[0]))
    if rows[0]["failures"]:
        say("")
        say(causes_table(rows[0]))


def _document(scenario: Scenario, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ``--json`` writes: ``scenario`` is that of the first row."""
    return {
        "bench": "simulate",
        **provenance("numpy"),
        "scenario": scenario.model_dump(),
        "rows": rows,
    }
