"""``convoy simulate``: what failures will cost a run, before it starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convoy.commands.parsing import Command, argument, flag, json_file, overrides
from convoy.commands.results import (
    check_picture,
    check_writable,
    provenance,
    say_json,
    write_json,
)
from pretrain.errors import InputError
from pretrain.observe import say

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


def _simulate(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from convoy.plan import assess, draw, load_scenario

    scenarios = [
        load_scenario(args.scenario, [*args.overrides, *size]) for size in _sizes(args.gpus)
    ]
    if args.print_scenario:
        say_json(scenarios[0].model_dump(exclude_none=True))
        return 0
    check_writable("--json", args.json)
    if args.plot is not None:
        check_picture("--plot", args.plot)
    rows = [asdict(assess(scenario)) for scenario in scenarios]
    _show(rows)
    head = {"bench": "simulate", **provenance("numpy")}
    write_json(args.json, head | {"scenario": scenarios[0].model_dump(), "rows": rows})
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


main = Command(
    "convoy simulate",
    "Simulate a run under failures: effective training time, best interval, best spares.",
    _EPILOG,
    [
        argument("scenario", "SCENARIO", "a scenario, in TOML or JSON", nargs="?", type=Path),
        overrides("a field of the scenario"),
        argument("--gpus", "N,N,...", "one or more numbers of GPUs, in place of run.gpus"),
        json_file(),
        argument("--plot", "FILE", "draw them too: *.svg, *.png or *.pdf; needs matplotlib",
                 type=Path),
        flag("--print-scenario", "print the scenario with all fields, and end"),
    ],
    _simulate,
    stopped="nothing was written",
)  # fmt: skip
