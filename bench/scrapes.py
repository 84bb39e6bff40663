"""What scrapes of the metrics cost a training step.

    OMP_NUM_THREADS=1 python -m bench.scrapes [--quick] [--json FILE] [--samples N]
                                              [--only answers|steps]

``answers``: the processor time of the rank's thread that gives the metrics to the process that
answers scrapes. However many scrapes there are, that process asks once a second, so this time is
the share of a second that scrapes can take from training. The limit is no such time.

``steps``: one rank trains the tiny recipe with a batch of 2 sequences, on the first core. The
process that answers scrapes, and a client that scrapes 1,000 times a second, are on the second
core: with one core for all, a client's own work would be measured as a cost of training. It needs a
machine that does nothing else. Windows of 4 seconds
without scrapes and with scrapes take turns, in random order within each turn; a step counts where
all of it is within a window, and the first second of each window does not count.

Of each window there is the median step, and the processor time of the rank (all of its threads) for
a step. Both are divided by those of the window without scrapes of the same turn, and the table has
the medians of these ratios: what else the machine does changes from minute to minute. It has the
scrapes that were answered in a second, too.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from bench.harness import Row, arguments, finish
from bench.recipe_runs import ENVIRONMENT, RECIPE, ROOT, prepare_corpus, words
from parallel import Topology
from pretrain.observe import IntervalEnded, Metrics, RoutingReport
from pretrain.observe.metrics_server import OLD_SECONDS
from pretrain.spec import load_spec
from tests.support.jobs import events_so_far
from tests.support.processes import descendants, kill_with_descendants

SIZES = ((3, 2), (61, 256))
"""MoE layers and ranks: of the tiny recipe; of a large model, and the most ranks with metrics."""
RATES = {"limit": 0, "1 a second": 1, "1,000 a second": 1000}
_WINDOW_SECONDS = 4.0
_SETTLE_SECONDS = 1.0
_SETTINGS = [
    "parallel.ep=1", "batch.global_batch_size=2", "batch.micro_batch_size=2",
    "train.steps=1000000", "schedule.kind=constant", "eval.interval_steps=0",
    "checkpoint.interval_steps=1000000", "sample.tokens=0", "metrics.all_ranks=true",
]  # fmt: skip


@dataclass(frozen=True)
class Window:
    """One subject for some seconds."""

    turn: int
    subject: str
    began: float
    """Unix time from which steps count."""
    ended: float
    processor_seconds: float
    """Of the rank from ``began`` to ``ended``."""
    answers: float
    """Scrapes that were answered in a second."""


@contextmanager
def training(folder: Path) -> Iterator[tuple[Path, int]]:
    """The run on the first core, until the context ends: its folder and its process."""
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
        yield run, process.pid
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


def processor_seconds(process: int) -> float:
    """Of all threads of a process since its start."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(address: tuple[str, int], rank: int, samples: int) -> Iterator[Window]:
    """Windows of all subjects in turn."""
    for turn in range(samples):
        for name in random.Random(turn).sample(list(RATES), len(RATES)):
            scrape_for(address, RATES[name], _SETTLE_SECONDS)
            began, used = time.time(), processor_seconds(rank)
            count = scrape_for(address, RATES[name], _WINDOW_SECONDS)
            ended = time.time()
            used = processor_seconds(rank) - used
            yield Window(turn, name, began, ended, used, count / (ended - began))


def figures(events: Sequence[dict[str, Any]], window: Window) -> dict[str, float]:
    """The median step of a window, and the rank's processor time for a step."""
    steps = [(e["time"] - e["seconds"], e["time"]) for e in events if e["event"] == "step"]
    taken = [
        stop - start for start, stop in steps if window.began <= start and stop <= window.ended
    ]
    if not taken:
        raise SystemExit("a window has no whole step: the machine is too slow or too busy")
    # The mean length of a step in the window, and not only of those that are whole.
    inside = sum(
        max(0.0, min(stop, window.ended) - max(start, window.began)) / (stop - start)
        for start, stop in steps
    )
    return {
        "step": statistics.median(taken),
        "processor_seconds_per_step": window.processor_seconds / inside,
    }


def rows_of(events: Sequence[dict[str, Any]], windows: Sequence[Window]) -> Iterator[Row]:
    """Medians over windows, and over turns of the ratios to the turn's window without scrapes."""
    found = {(w.turn, w.subject): figures(events, w) for w in windows}
    for subject in RATES:
        mine = [w for w in windows if w.subject == subject]
        answers = [w.answers for w in mine]
        yield Row("1 rank", subject, "scrapes_per_second", statistics.median(answers), "1/s", 0.0,
                  answers)  # fmt: skip
        for metric in ("step", "processor_seconds_per_step"):
            values = [found[w.turn, subject][metric] for w in mine]
            ratios = [found[w.turn, "limit"][metric] / found[w.turn, subject][metric] for w in mine]
            yield Row("1 rank", subject, metric, statistics.median(values), "s",
                      statistics.median(ratios), values)  # fmt: skip


def answer_rows(samples: int) -> Iterator[Row]:
    """Thread time of one answer for runs of different sizes."""
    for layers, ranks in SIZES:
        registry = CollectorRegistry()
        metrics = Metrics(registry, load_spec(RECIPE), Topology(), "0")
        metrics(interval(layers, ranks))
        seconds = []
        for _ in range(samples):
            began = time.thread_time()
            size = len(generate_latest(registry))
            seconds.append(time.thread_time() - began)
        case, median = f"{layers} layers, {ranks} ranks", statistics.median(seconds)
        print(f"{case:<22} {size / 1024:.0f} KiB: {1e3 * median:.1f} ms of a thread, once a second")
        yield Row(case, "convoy", "thread_seconds_of_an_answer", median, "s",
                  1 - median / OLD_SECONDS, seconds)  # fmt: skip


def interval(layers: int, ranks: int) -> IntervalEnded:
    """A log interval with a value for every layer and rank."""
    losses = {name: [1.0] * layers for name in ("load_balance", "sequence_balance", "z")}
    return IntervalEnded(
        step=1, loss=1.0, lr=1.0, grad_norm=1.0, tokens_per_second=1.0, mfu=0.5, seconds=1.0,
        communication_seconds={}, exposed_seconds={}, rank_seconds=[1.0] * ranks,
        capacity_shares=[1.0] * ranks, relative_speeds=[1.0] * ranks,
        routing=RoutingReport(
            layers=list(range(layers)), tokens_per_expert=[[1] * 8] * layers,
            entropies=[1.0] * layers, dropped=[1] * layers, rerouted=[1] * layers,
            copied=[1] * layers, bias_abs_max=1.0, rank_imbalance=1.0, aux_losses=losses,
            aux_loss=1.0,
        ),
    )  # fmt: skip


def main() -> None:
    """Measure, print, and write JSON where asked."""
    args = arguments(__doc__ or "")
    rows = list(answer_rows(20 if args.quick else 200)) if args.only != "steps" else []
    if args.only != "answers":
        rows += step_rows(3 if args.quick else args.samples)
    finish("scrapes", rows, ["torch", "prometheus-client"], args.json)


def step_rows(samples: int) -> list[Row]:
    """Train, scrape and measure."""
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("bench.scrapes needs two cores: one for the rank, one for the scrapes")
    with tempfile.TemporaryDirectory() as name, training(Path(name)) as (run, rank):
        os.sched_setaffinity(0, {1})
        (target,) = json.loads(next((run / "metrics").glob("*.json")).read_text())[0]["targets"]
        host, _, port = target.rpartition(":")
        windows = list(measure((host, int(port)), rank, samples))
        rows = list(rows_of(events_so_far(run), windows))
    for row in rows:
        if row.unit != "s":
            print(f"{row.subject:<16} {row.value:,.0f} scrapes answered a second")
        else:
            cost = 1 / row.ratio_to_limit - 1
            print(f"{row.subject:<16} {row.metric:<28} {1e3 * row.value:7.1f} ms, {cost:+.2%}")
    return rows


if __name__ == "__main__":
    main()
