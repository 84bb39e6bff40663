"""Interleaved timing of several subjects on the same work, as ratios to a physical limit."""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One subject on one case."""

    case: str
    subject: str
    metric: str
    value: float
    unit: str
    ratio_to_limit: float
    samples: list[float]
    """What ``value`` is the median of, as a rule. A written row has their number and ends alone."""

    def summary(self) -> dict[str, Any]:
        """The row as it is written: ``n``, ``min`` and ``max`` stand for the samples."""
        fields = asdict(self)
        samples = fields.pop("samples")
        spread = {"min": min(samples), "max": max(samples)} if samples else {}
        return {**fields, "n": len(samples), **spread}


def arguments(text: str) -> argparse.Namespace:
    """``--quick``, ``--json FILE`` and ``--samples N``."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute; for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--samples", type=int, default=9, help="of each subject, interleaved")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    return parser.parse_args()


def interleave(
    case: str,
    metric: str,
    subjects: dict[str, Callable[[], None]],
    samples: int,
    *,
    warm: bool = False,
) -> list[Row]:
    """Time every subject in turn, over and over; the first round warms up and does not count.

    One subject must be called ``limit``; ratios are of medians, 1 at the limit. ``warm`` says that
    each has done its work before: every round counts. The order changes from round to round, for
    what a subject leaves behind, in caches and in the heap, is felt by the next.
    """
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(int(warm), samples + 1):
        for name in random.Random(turn).sample(list(subjects), len(subjects)):
            began = time.perf_counter()
            subjects[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        Row(case, name, metric, medians[name], "s", medians["limit"] / medians[name], times[name])
        for name in subjects
    ]


def finish(bench: str, rows: Sequence[Row], packages: Sequence[str], path: Path | None) -> None:
    """Print a table, and write it as JSON where asked."""
    width = max((len(row.case) for row in rows), default=0)
    for row in rows:
        if row.unit != "s":
            continue
        print(
            f"{row.case:<{width}}  {row.subject:<24} {row.value * 1e3:10.1f} ms"
            f"  {row.ratio_to_limit:6.3f} of the limit"
        )
    if path is None:
        return
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator"
    head = {
        "bench": bench,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{processor()}, {torch.get_num_threads()} threads, {device}",
        "versions": versions,
    }
    path.write_text(table_text(head, {"rows": [row.summary() for row in rows]}))


def table_text(head: dict[str, Any], lists: dict[str, list[dict[str, Any]]]) -> str:
    """JSON of ``head`` and ``lists`` in one object, each entry of a list on a line of its own."""
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, entries in lists.items():
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
        parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def processor() -> str:
    """The processor's name and its vector instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        # Processors of one name differ in this, by a factor of two in matrix products.
        return f"{name} with {torch.backends.cpu.get_cpu_capability()}"
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
