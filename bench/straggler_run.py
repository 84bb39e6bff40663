"""A run under torchrun whose second rank computes half as fast: what fewer micro-batches recover.

    python -m bench.straggler_run [--quick] [--json FILE] [--samples N]

The tiny recipe trains on 2 replicas, 32 sequences a step, one in a micro-batch. The subjects take
turns. ``free`` has no slow rank. In ``as before``, rank 1 stands still for half of the time from
its fourth step on (a fault ``slow``). ``convoy`` has ``stragglers.rebalance`` too, and its steps
count from the eighth after the new division of micro-batches on. ``limit`` is 4/3 of ``free``: one
and a half ranks do the work of two, and nothing is lost. The recovered share is (as before -
convoy) / (as before - limit).
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import Row, arguments, finish
from bench.recipe_runs import prepare_corpus, train

_STEPS = {"free": 16, "as before": 16, "convoy": 34}
"""A division is found, tried for some steps, and kept; then steps count."""
_SETTINGS = (
    "parallel.ep=1", "parallel.dp_shard=1", "parallel.dp_replicate=2", "batch.global_batch_size=32",
    "batch.micro_batch_size=1", "data.seq_len=256", "train.log_interval_steps=1",
    "schedule.warmup_steps=4", "eval.interval_steps=0", "eval.final_sequences=2",
    "sample.tokens=0", "metrics.port=-1", "checkpoint.interval_steps=1000",
)  # fmt: skip
_SLOW = 'inject=[{kind="slow",step=4,rank=1,factor=2.0,duration_steps=1000}]'
SUBJECTS = {
    "free": (),
    "as before": (_SLOW,),
    "convoy": (_SLOW, "stragglers.rebalance=true"),
}


def step_seconds(log: list[dict[str, Any]], subject: str) -> float:
    """The median step in which the subject is as it will stay."""
    first = 8
    if subject == "convoy":
        divisions = [e["step"] for e in log if e["event"] == "micro_batch_plan"]
        if not divisions:
            raise SystemExit("the slow rank was not found")
        first = divisions[-1] + 8
    steps = [e["seconds"] for e in log if e["event"] == "step" and e["step"] >= first]
    if not steps:
        raise SystemExit(f"{subject}: the last division of micro-batches left no steps to count")
    return float(statistics.median(steps))


def main() -> None:
    """Measure, print, and write JSON where asked."""
    args = arguments(__doc__ or "")
    samples = 1 if args.quick else min(args.samples, 3)
    found: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = prepare_corpus(folder)
        for sample in range(samples):
            for subject, settings in SUBJECTS.items():
                every = (*_SETTINGS, *settings, f"train.steps={_STEPS[subject]}")
                run = folder / f"{subject}-{sample}".replace(" ", "-")
                log = train(run, corpus, every, pinned=True)
                found[subject].append(step_seconds(log, subject))
                if subject == "convoy":
                    print([e for e in log if e["event"] == "micro_batch_plan"])
    median = {subject: statistics.median(values) for subject, values in found.items()}
    limit = 4 / 3 * median["free"]
    rows = [
        Row("half as fast", subject, "step_seconds", value, "s", limit / value, found[subject])
        for subject, value in median.items()
    ]
    rows.append(Row("half as fast", "limit", "step_seconds", limit, "s", 1.0, [limit]))
    finish("straggler_run", rows, ["torch"], args.json)
    gain = (median["as before"] - median["convoy"]) / (median["as before"] - limit)
    print(f"recovered of the ideal gain: {gain:.0%}")


if __name__ == "__main__":
    main()
