"""Others' suites over Convoy: ``python -m tests.foreign [SUITE ...]``.

Each suite is fetched by its pinned version into build/foreign, runs through the adapter in its
folder here, and is counted. A case that fails and is in no exclusions file, and an exclusion that
no case needs, end the command with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.harness import processor, table_text
from tests.foreign.counting import Tally
from tests.foreign.fetching import NotHereError
from tests.foreign.running import run_suite
from tests.foreign.suites import SUITES, Suite

_VERSIONS = ("torch", "transformers", "zarr", "numpy", "pytest")


def main(arguments: list[str] | None = None) -> int:
    """Run suites, print their counts, and return the exit code."""
    options = _parser().parse_args(arguments)
    if unknown := sorted(set(options.suites) - set(SUITES)):
        sys.exit(f"SUITE ({unknown[0]}) must be one of {', '.join(SUITES)}")
    suites = [SUITES[name] for name in options.suites] or list(SUITES.values())
    rows, good = [], True
    for suite in suites:
        parts = _parts(suite, options)
        begin = time.monotonic()
        try:
            result = run_suite(
                suite, parts, checkouts=options.source, jobs=options.jobs,
                arguments=["-k", options.only] if options.only else [], keep=options.keep,
            )  # fmt: skip
        except NotHereError as reason:
            print(f"{suite.name}: skipped. {reason}", flush=True)
            good &= not options.suites
            continue
        seconds = time.monotonic() - begin
        _tell(suite, result, seconds)
        good &= result.good
        rows.append(_row(suite, result, parts))
    print(f"together: {sum(row['passed'] for row in rows)} passed over Convoy")
    if options.json:
        options.json.write_text(_table(rows))
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.foreign", description=__doc__)
    names = ", ".join(SUITES)
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"of {names}; by default all")
    add("--part", action="append", help="of one suite, such as a model family")
    add("--source", type=Path, metavar="DIR", action="append", default=[],
        help="a checkout, for tests that no package has; may be given several times")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="the table, as JSON")
    add("--keep", type=Path, metavar="DIR", help="keep what parts did, and run no part kept there")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    add("--only", metavar="EXPRESSION", help="cases, as pytest's -k takes them")
    return parser


def _parts(suite: Suite, options: argparse.Namespace) -> list[str]:
    if options.part:
        known = (*suite.parts, *suite.more)
        unknown = set(options.part) - set(known)
        if unknown:
            sys.exit(f"--part ({min(unknown)}) must be of {suite.name}: {', '.join(known)}")
        return list(options.part)
    return list(suite.parts)


def _tell(suite: Suite, result: Tally, seconds: float) -> None:
    row = result.row()
    print(
        f"{suite.name}: {row['passed']} passed over Convoy, {row['passed_with_a_call']} of them "
        f"with a call of it; {row['excluded']} excluded, {row['failed']} failed, "
        f"{row['skipped_by_the_suite']} skipped by the suite, "
        f"{row['passed_without_convoy']} passed without Convoy; {seconds:.0f} s",
        flush=True,
    )
    for case, why in result.failed.items():
        print(f"  failed: {case}\n    " + "\n    ".join(why.splitlines()[-4:]))
    for line in result.stale:
        print(f"  stale exclusion: {line}")


def _row(suite: Suite, result: Tally, parts: list[str]) -> dict[str, Any]:
    origin = suite.sdist or (f"{suite.repository}@{suite.commit}" if suite.repository else "")
    return {
        "suite": suite.name, "about": suite.about, "origin": origin or "an installed package",
        "parts": [part for part in parts if part], **result.row(),
    }  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> str:
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    head = {
        "bench": "foreign",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{processor()}, {os.cpu_count()} processors",
        "versions": versions,
        "passed": sum(row["passed"] for row in rows),
    }
    return table_text(head, {"rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())
