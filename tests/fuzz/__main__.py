"""``python -m tests.fuzz``: run the machines until the time is up.

A failure is made shorter, and written to ``tests/fuzz/seeds``; the last line says how to replay the
file. The exit code is 1 where a machine has found something.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import zlib
from pathlib import Path

from tests.fuzz.broken import BROKEN, examples_until_seen
from tests.fuzz.machine import SEEDS, Seed, Tally, World, explore, replay
from tests.fuzz.worlds import WORLDS

EXAMPLES = 10
"""Of one call of hypothesis, between two looks at the clock."""

SAY_SECONDS = 60
"""Between two lines about what was run so far."""


def fuzz(world_class: type[World], seconds: float, first: int) -> tuple[Tally, Path | None]:
    """Run one machine; returns what was run, and the seed of a failure."""
    tally, until, number = Tally(), time.monotonic() + seconds, first
    said = time.monotonic()
    while time.monotonic() < until:
        if time.monotonic() > said + SAY_SECONDS:
            said = time.monotonic()
            print(f"{world_class.name}: {tally.examples} examples so far", flush=True)
        try:
            explore(world_class, examples=EXAMPLES, seed=number, tally=tally)
        except Exception as error:
            traceback.print_exc()
            if tally.failed is None:
                raise
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            return tally, keep(Seed(world_class.name, why, tally.failed))
        number += 1
    return tally, None


def keep(seed: Seed) -> Path:
    """Write the seed of a failure."""
    digest = zlib.crc32(repr(seed.steps).encode())
    path = SEEDS / f"{seed.world}-{digest:08x}.json"
    seed.write(path)
    return path


def cpu_seconds() -> float:
    """The time that this process and the processes that it has ended have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def describe(name: str, tally: Tally, seconds: float) -> str:
    """What was run, in a line."""
    counts = ", ".join(f"{name} {count}" for name, count in sorted(tally.actions.items()))
    return (
        f"{name}: {tally.examples} examples, {tally.steps} steps, {len(tally.actions)} rules, "
        f"{seconds:.0f} s of a core ({counts})"
    )


def count_broken(words: str) -> int:
    """How many examples a machine needs for each defect that has the words; the exit code."""
    unseen = 0
    for what, defect in BROKEN.items():
        if words not in what:
            continue
        count = examples_until_seen(defect, most=400)
        unseen += not count
        print(
            f"{defect.world}: {what}: {f'seen in example {count}' if count else 'NOT SEEN'}",
            flush=True,
        )
    return 1 if unseen else 0


def main(words: list[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of all machines together")
    parser.add_argument("--machine", choices=sorted(WORLDS), help="one machine; all by default")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="of the draws")
    parser.add_argument(
        "--broken", nargs="?", const="", metavar="WORDS",
        help="break the product, and count the examples that each machine needs to see it",
    )  # fmt: skip
    parser.add_argument("--replay", type=Path, help="perform the sequence of a file, and end")
    given = parser.parse_args(words)
    if given.replay is not None:
        seed = Seed.read(given.replay)
        replay(WORLDS[seed.world], seed.steps)
        print(f"{given.replay}: {len(seed.steps)} actions, and every rule holds")
        return 0
    if given.broken is not None:
        return count_broken(given.broken)
    names = [given.machine] if given.machine else sorted(WORLDS)
    print(f"seed {given.seed}", flush=True)
    failures = 0
    for name in names:
        began = cpu_seconds()
        tally, path = fuzz(WORLDS[name], given.seconds / len(names), given.seed)
        print(describe(name, tally, cpu_seconds() - began), flush=True)
        if path is not None:
            failures += 1
            print(f"{name} has failed; to replay: python -m tests.fuzz --replay {path}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
