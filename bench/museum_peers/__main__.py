"""The command line of the museum of peers.

The exit code is 0 where every case was seen wrong, and right in the fixed version where a case
names one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from bench.museum_peers import __doc__ as text
from bench.museum_peers.frame import Case, all_cases
from bench.museum_peers.run import GOOD, run


def _matches(case: Case, words: str) -> bool:
    """Whether each of ``words`` is in the thread, the claim or the versions of a case."""
    text_of_case = " ".join((case.thread, case.claim, *case.wrong, case.ask.__module__)).lower()
    return all(word in text_of_case for word in words.lower().split())


def main() -> int:
    parser = argparse.ArgumentParser(description=(text or "").split("\n")[0])
    parser.add_argument("-k", default="", metavar="WORDS", help="cases that have each of the words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows; those that stand are kept")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    options = parser.parse_args()
    cases = [case for case in all_cases() if _matches(case, options.k)]
    if not cases:
        parser.error(f"-k ({options.k}) must be words of a case; --list shows the cases")
    if options.list:
        for case in cases:
            print(f"{case.thread}  {case.claim}  [{' '.join(case.wrong)}]")
        return 0
    rows = run(cases, options.json)
    for verdict, number in Counter(row.verdict for row in rows).most_common():
        print(f"{number:4} {verdict}")
    return 0 if rows and all(row.verdict in GOOD for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
