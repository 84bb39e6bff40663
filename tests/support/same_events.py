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
    r"seconds|per_second|bytes|time|mfu|goodput|memory|path|url|launch_id|run_id|save_id|record|spec|process|"
    r"relative_speeds|rank_|bubble$|device|version"
)
"""Names of fields that depend on the clock, the machine, the folder or the spec's spelling."""
OF_THE_CLOCK = {"devices", "save_interval", "ledger", "data_fetched", "notice"}
"""Events that come when the clock says so, or whose text has times."""


def comparable(path: Path) -> list[dict[str, Any]]:
    """The events of a log without what depends on the machine, one kind after another.

    Within a kind they are in their order; a save that another process commits is logged when the
    commit is done, before or after other events.
    """
    events = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [_without(event) for event in events if event["event"] not in OF_THE_CLOCK]
    return sorted(kept, key=lambda event: event["event"])


def _without(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without(each) for name, each in value.items() if not MACHINE.search(name)}


def differences(first: Path, second: Path) -> list[str]:
    """What differs, an event a line."""
    a, b = comparable(first), comparable(second)
    lines = [] if len(a) == len(b) else [f"{len(a)} events and {len(b)}"]
    for x, y in zip(a, b, strict=False):
        for name in sorted(x.keys() | y.keys()):
            values = x.get(name, "none"), y.get(name, "none")
            if values[0] != values[1]:
                where = f"{x.get('event')} of step {x.get('step')}: {name}"
                lines.append(f"{where}: {values[0]} and {values[1]}")
    return lines


if __name__ == "__main__":
    found = differences(Path(sys.argv[1]), Path(sys.argv[2]))
    print("\n".join(found[:20]) or "equal")
    raise SystemExit(bool(found))
