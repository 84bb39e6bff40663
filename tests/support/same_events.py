"""Two logs of a seeded run, compared but for times: ``python -m tests.support.same_events A B``.

Each argument is a log.jsonl. What depends on the clock, on the machine or on the folder is left
out; every other field of every event must be equal. Prints the first differences, and ends with 1
where there are any.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

MACHINE = re.compile(
    r"seconds|bytes|time|mfu|goodput|memory|path|url|launch_id|run_id|save_id|record|spec|process|"
    r"relative_speeds|rank_|bubble$|device|version"
)
"""Names of fields that depend on the clock, the machine, the folder or the spec's spelling."""
OF_THE_CLOCK = {"devices", "save_interval", "ledger", "data_fetched", "notice"}
"""Events that come when the clock says so, or whose text has times."""


def comparable(path: Path) -> list[dict[str, Any]]:
    """The events of a log without what depends on the machine, in their order."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: value for name, value in event.items() if not MACHINE.search(name)}
        for event in events
        if event["event"] not in OF_THE_CLOCK
    ]


def differences(first: Path, second: Path) -> list[str]:
    """What differs, an event a line."""
    a, b = comparable(first), comparable(second)
    lines = [] if len(a) == len(b) else [f"{len(a)} events and {len(b)}"]
    for x, y in zip(a, b, strict=False):
        names = sorted(x.keys() | y.keys())
        lines += [
            f"{x.get('event')} of step {x.get('step')}: {n}: {x.get(n, 'none')} and {y.get(n, 'none')}"
            for n in names
            if x.get(n, "none") != y.get(n, "none")
        ]
    return lines


if __name__ == "__main__":
    found = differences(Path(sys.argv[1]), Path(sys.argv[2]))
    print("\n".join(found[:20]) or "equal")
    raise SystemExit(bool(found))
