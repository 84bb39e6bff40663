"""What scrapes of the metrics cost a training step.

    OMP_NUM_THREADS=1 python -m bench.scrapes [--quick] [--json FILE] [--samples N]

One rank trains the tiny recipe with a batch of 2 sequences, on the first core. The process that
answers scrapes, and a client that scrapes 1,000 times a second, are on the second core: with one
core for all, a client's own work would be measured as a cost of training. Windows of 4 seconds
without scrapes and with scrapes take turns, in random order within each pair; a step counts where
all of it is within a window, and the first second of each window does not count. The limit is the
median step without scrapes. The table has the scrapes that were answered in a second, too.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Row, arguments, finish
from bench.recipe_runs import ENVIRONMENT, RECIPE, ROOT, prepare_corpus, words
from tests.support.jobs import events_so_far
from tests.support.processes import descendants, kill_with_descendants

RATES = {"limit": 0, "1 a second": 1, "1,000 a second": 1000}
_WINDOW_SECONDS = 4.0
_SETTLE_SECONDS = 1.0
_SETTINGS = [
    "parallel.ep=1", "batch.global_batch_size=2", "batch.micro_batch_size=2",
    "train.steps=1000000", "schedule.kind=constant", "eval.interval_steps=0",
    "checkpoint.interval_steps=1000000", "sample.tokens=0", "metrics.all_ranks=true",
]  # fmt: skip
Window = tuple[str, float, float]
"""A subject, and the Unix times between which it was."""


@contextmanager
def training(folder: Path) -> Iterator[Path]:
    """The run on the first core, until the context ends; its folder."""
    corpus, run = prepare_corpus(folder), folder / "measured"
    settings = [*_SETTINGS, f"run_dir={run}", f"data.path={corpus}"]
    with (folder / "run.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools/pretrain.py"), str(RECIPE), *words(settings)],
            stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT, cwd=ROOT,
            preexec_fn=lambda: os.sched_setaffinity(0, {0}),
        )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while sum(event["event"] == "step" for event in events_so_far(run)) < 10:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"no steps:\n{(folder / 'run.txt').read_text()[-3000:]}")
            time.sleep(0.2)
        _move_server(process.pid)
        yield run
    finally:
        kill_with_descendants(process.pid)
        process.wait()


def _move_server(rank: int) -> None:
    """Let all threads of the process that answers scrapes run on the second core."""
    for process in descendants(rank):
        if b"metrics_server.py" in Path(f"/proc/{process}/cmdline").read_bytes():
            for thread in Path(f"/proc/{process}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {1})
            return
    raise SystemExit("the rank has no process that answers scrapes")


def scrape(address: tuple[str, int]) -> int:
    """Scrape once; returns the bytes of the answer."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        size = 0
        while part := connection.recv(1 << 16):
            size += len(part)
    return size


def scrape_for(address: tuple[str, int], rate: int, seconds: float) -> int:
    """Scrape at a rate, or as fast as answers come; returns the number of answers."""
    began = time.perf_counter()
    count = 0
    while (now := time.perf_counter() - began) < seconds:
        if not rate:
            time.sleep(seconds - now)
        elif (ahead := count / rate - now) > 0:
            time.sleep(min(ahead, seconds - now))
        else:
            assert scrape(address) > 1000
            count += 1
    return count


def measure(address: tuple[str, int], samples: int) -> tuple[list[Window], dict[str, list[float]]]:
    """Windows of all subjects in turn, and the scrapes a second of each window."""
    windows: list[Window] = []
    reached: dict[str, list[float]] = {name: [] for name in RATES}
    for turn in range(samples):
        for name in random.Random(turn).sample(list(RATES), len(RATES)):
            began = time.time()
            count = scrape_for(address, RATES[name], _WINDOW_SECONDS)
            ended = time.time()
            windows.append((name, began + _SETTLE_SECONDS, ended))
            reached[name].append(count / (ended - began))
    return windows, reached


def steps_within(
    events: Sequence[dict[str, Any]], windows: Sequence[Window]
) -> dict[str, list[float]]:
    """Seconds of the steps that were within a window, by subject."""
    found: dict[str, list[float]] = {name: [] for name in RATES}
    steps = [(e["time"] - e["seconds"], e["time"]) for e in events if e["event"] == "step"]
    for name, began, ended in windows:
        found[name] += [stop - start for start, stop in steps if began <= start and stop <= ended]
    return found


def main() -> None:
    """Measure, print, and write JSON where asked."""
    args = arguments(__doc__ or "")
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("bench.scrapes needs two cores: one for the rank, one for the scrapes")
    with tempfile.TemporaryDirectory() as name, training(Path(name)) as run:
        os.sched_setaffinity(0, {1})
        (target,) = json.loads(next((run / "metrics").glob("*.json")).read_text())[0]["targets"]
        host, _, port = target.rpartition(":")
        windows, reached = measure((host, int(port)), 3 if args.quick else args.samples)
        taken = steps_within(events_so_far(run), windows)
    limit = statistics.median(taken["limit"])
    rows = []
    for subject, seconds in taken.items():
        median = statistics.median(seconds)
        rows.append(Row("1 rank", subject, "step", median, "s", limit / median, seconds))
        rate = statistics.median(reached[subject])
        rows.append(Row("1 rank", subject, "scrapes_per_second", rate, "1/s", 0.0,
                        reached[subject]))  # fmt: skip
        print(
            f"{subject:<16} {1e3 * median:7.1f} ms a step ({len(seconds)} steps), "
            f"{median / limit - 1:+.2%}; {rate:,.0f} scrapes answered a second"
        )
    finish("scrapes", rows, ["torch", "prometheus-client"], args.json)


if __name__ == "__main__":
    main()
