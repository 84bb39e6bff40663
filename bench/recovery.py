"""Seconds from the SIGKILL of a rank to the first step after it, beside the bare cost of a start.

    python -m bench.recovery [--quick] [--json FILE] [--samples N]

The subjects take turns. ``limit`` starts 2 Python processes that import torch and join a gloo
group, and stops the clock when both have joined. ``restart`` trains the tiny recipe on 2 ranks
under torchrun with ``--max-restarts`` and checkpoints in the node's memory, kills one rank with
SIGKILL, and stops the clock when the log has the next step. ``warm`` does what ``restart`` does,
with ``elastic.recovery`` ``warm``. A second table has the seconds of the parts of each
recovery:

- ``detect``: from the SIGKILL to the start of the new process of rank 0;
- the parts of ``start_seconds`` in the log, see docs/metrics.md;
- ``first step``: from the start's end to the log's line of the step.

Machines with two cores or more: with fewer cores than ranks, the ranks' starts wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import Row, arguments, finish
from bench.recipe_runs import ENVIRONMENT, RANKS, RECIPE, ROOT, prepare_corpus, words
from tests.support.jobs import events_so_far
from tests.support.processes import kill_with_descendants, rank_process

AFTER_STEP = 6
_JOIN = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
_SETTINGS = [
    "train.steps=100000", "train.log_interval_steps=1", "eval.interval_steps=0",
    "checkpoint.interval_steps=5", "checkpoint.tiers.memory=true",
    "checkpoint.tiers.shared_interval=1000", "elastic.enabled=true",
]  # fmt: skip


def join() -> float:
    """Seconds until Python processes have imported torch and joined a group."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    began = time.perf_counter()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _JOIN],
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
            },
        )
        for rank in range(RANKS)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a bare start ended with {codes}")
    return time.perf_counter() - began


@contextlib.contextmanager
def training(run_dir: Path, corpus: Path, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """The tiny recipe on 2 ranks, until the context ends."""
    memory = run_dir.parent / "memory"
    options = [
        *_SETTINGS, f"run_dir={run_dir}", f"data.path={corpus}",
        f"checkpoint.tiers.memory_path={memory}", *settings,
    ]  # fmt: skip
    with (run_dir.parent / f"{run_dir.name}.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={RANKS}", "--max-restarts=3", "--monitor-interval=0.1",
             str(ROOT / "tools/pretrain.py"), str(RECIPE),
             *words(options)],
            stdout=log, stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
        )  # fmt: skip
    try:
        yield process
    finally:
        kill_with_descendants(process.pid)
        process.wait()


def first_step_after(process: Any, run_dir: Path, moment: float, least: int) -> dict[str, Any]:
    """The first step of at least ``least`` that was logged after a moment."""
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        for event in events_so_far(run_dir):
            if event["event"] == "step" and event["time"] > moment and event["step"] >= least:
                return event
        time.sleep(0.02)
    log = (run_dir.parent / f"{run_dir.name}.txt").read_text()
    raise SystemExit(f"no step after {moment}:\n{log[-4000:]}")


def recover(folder: Path, corpus: Path, turn: int, *settings: str) -> dict[str, float]:
    """Seconds of each part of one recovery, and their ``total``."""
    run_dir = folder / f"run-{turn}-{len(settings)}"
    with training(run_dir, corpus, *settings) as process:
        first_step_after(process, run_dir, 0.0, AFTER_STEP)
        time.sleep(0.2 + 0.1 * (turn % 4))  # any moment of a step
        victim = rank_process(process.pid, 1)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        # A survivor may still log the step that it was in.
        while not any(e["event"] == "start" and e["time"] > killed for e in events_so_far(run_dir)):
            if process.poll() is not None or time.time() > killed + 120:
                raise SystemExit((folder / f"{run_dir.name}.txt").read_text()[-4000:])
            time.sleep(0.02)
        began = next(e for e in reversed(events_so_far(run_dir)) if e["event"] == "start")
        step = first_step_after(process, run_dir, began["time"], 1)
        launch = next(e for e in reversed(events_so_far(run_dir)) if e["event"] == "launch")
    parts: dict[str, float] = {"detect": launch["process_start"] - killed}
    parts |= began["start_seconds"]
    parts["first step"] = step["time"] - killed - sum(parts.values())
    return parts | {"total": step["time"] - killed}


def main() -> None:
    """Measure, print, and write JSON where asked."""
    args = arguments(__doc__ or "")
    samples = 2 if args.quick else args.samples
    subjects = {"restart": (), "warm": ("elastic.recovery=warm",)}
    bare: list[float] = []
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        corpus = prepare_corpus(folder)
        join()  # files are in the page cache from here on
        for turn in range(samples):
            bare.append(join())
            for subject, settings in subjects.items():
                parts[subject].append(recover(folder, corpus, turn, *settings))
    limit = statistics.median(bare)
    rows = [Row("2 ranks", "limit", "seconds", limit, "s", 1.0, bare)]
    for subject, found in parts.items():
        totals = [each["total"] for each in found]
        median = statistics.median(totals)
        rows.append(Row("2 ranks", subject, "seconds", median, "s", limit / median, totals))
        print(f"{subject}: {median:.2f} s, {median / limit:.2f} times the bare start")
        for part in found[0]:
            values = [each.get(part, 0.0) for each in found]
            print(f"  {part:<12} {statistics.median(values):6.2f} s")
            rows.append(
                Row(f"parts of {subject}", part, "seconds", statistics.median(values), "part",
                    0.0, values)
            )  # fmt: skip
    finish("recovery", rows, ["torch"], args.json)


if __name__ == "__main__":
    main()
