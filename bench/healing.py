"""Faults in runs whose replicas heal: what survives, in what time, with which bits.

Each case is a run of a tiny recipe in exact mode, under torchrun. Faults come one after another:
SIGKILL or SIGSTOP to the process that trains as a rank, at a random moment of a step, in a save, in
an evaluation, while replicas meet, or while a replica gets its state. After each fault all replicas
are waited for. Then losses, gradient norms, digests of gradients and parameters, sample counters
and a checkpoint's moments are compared with a run on one rank.

``--samples 1000`` has 1,000 faults, in an hour on two cores; ``--only pp=2`` has one layout's.
"""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import Row, arguments, finish
from parallel import Topology
from tests.support.healing import (
    HealingRun,
    LogTail,
    arrays_in_common,
    differences,
    healing_spec,
    lost_or_repeated,
)
from tests.support.jobs import prepare_job

LAYOUTS: tuple[dict[str, int], ...] = (
    {"dp_replicate": 2},
    {"dp_replicate": 3},
    {"dp_replicate": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"dp_replicate": 2, "pp": 2},
    {"dp_replicate": 3, "dp_shard": 2, "ep": 2},
    {"dp_replicate": 3, "pp": 2},
)
WHERE = ("step", "step", "step", "save", "evaluation", "meeting", "join")
"""Where faults hit, in turn; most of them at a random moment of a step."""


@dataclass
class Result:
    """What became of the faults of one layout."""

    faults: int = 0
    seconds: list[float] = field(default_factory=list)
    """To the next finished step, by fault that left survivors."""
    step_seconds: list[float] = field(default_factory=list)
    """Of an undisturbed step on the survivors."""
    join_seconds: list[float] = field(default_factory=list)
    restarted: int = 0
    """Processes of healthy replicas that were not the same afterwards."""
    hangs: int = 0
    problems: list[str] = field(default_factory=list)
    checkpoints_alike: bool = False


def strike(run: HealingRun, where: str, rng: random.Random, result: Result) -> None:
    """One fault, and what it should have left alone."""
    before = run.wait_for_all()
    rank = rng.choice(sorted(before))
    number = signal.SIGSTOP if rng.random() < 0.15 else signal.SIGKILL
    log, since = run.log, time.time()
    if where == "save":
        run.wait(lambda: log.of("save", since), "no save")
    elif where == "evaluation":
        run.wait(lambda: [e for e in log.of("step", since) if e["step"] % 5 == 0], "no evaluation")
    else:
        time.sleep(rng.random() * 0.3)
    moment = run.strike(rank, number, before[rank])
    result.faults += 1
    hit = {run.replica_of(rank)}
    second = None
    if where == "meeting" and run.topology.dp_replicate > 2:
        time.sleep(rng.random() * 0.06)
        second = rng.choice([r for r in sorted(before) if run.replica_of(r) not in hit])
    elif where == "join":
        run.first_step_after_regroup(moment)
        time.sleep(0.3 + rng.random() * 0.8)  # as long as building takes, more or less
        rest = run.trainers()
        second = rng.choice(sorted(rest)) if run.topology.dp_replicate > 2 else rank
    process = None if second is None else run.trainers().get(second)
    if second is not None and process is not None:
        hit.add(run.replica_of(second))
        run.strike(second, process=process)
        result.faults += 1
    result.seconds.append(run.first_step_after_regroup(moment))
    after = run.trainers()
    for other, process in before.items():
        if run.replica_of(other) not in hit and after.get(other) != process:
            result.restarted += 1


def campaign(folder: Path, job: Path, degrees: dict[str, int], faults: int, seed: int) -> Result:
    """Faults in a run of one layout."""
    result, rng = Result(), random.Random(seed)
    spec, topology = healing_spec(folder, job, dict(degrees)), Topology(**degrees)
    run = HealingRun(folder, spec, topology)
    try:
        turn = 0
        while result.faults < faults:
            strike(run, WHERE[turn % len(WHERE)], rng, result)
            turn += 1
        run.train_on(11)
        run.stop()
    except AssertionError as error:
        result.hangs += 1
        result.problems.append(str(error)[-3000:])
    finally:
        run.close()
    log = LogTail(run.run)
    regroups = log.of("regrouped")
    result.join_seconds = [e["seconds"] for e in regroups if e["joined"] and not e["left"]]
    result.step_seconds = [e["seconds"] for e in log.of("step")]
    return result


def judge(folder: Path, reference: Path, result: Result) -> None:
    """Compare a run with the run on one rank."""
    log, other = LogTail(folder / "run"), LogTail(reference / "run")
    result.problems += differences(log, other)
    result.problems += [f"step {step} is lost or repeated" for step in lost_or_repeated(log)]
    words = [sys.executable, "-m", "convoy", "audit-data", str(folder / "run")]
    audit = subprocess.run(words, capture_output=True, text=True, check=False)
    if audit.returncode:
        result.problems.append(f"audit-data: {audit.stdout[-300:]} {audit.stderr[-300:]}")
    arrays = arrays_in_common(folder / "run", reference / "run")
    if not arrays:
        result.problems.append("no common checkpoint")
        return
    wrong = [name for name, what in arrays.items() if what != "alike"]
    result.problems += [f"array {name} of the newest common checkpoint differs" for name in wrong]
    result.checkpoints_alike = not wrong


def reference_run(folder: Path, job: Path, steps: int) -> None:
    """The same spec on one rank, to some step."""
    run = HealingRun(folder, healing_spec(folder, job, {}), Topology())
    try:
        run.wait(lambda: run.log.of("step")[-1:] and run.log.of("step")[-1]["step"] >= steps,
                 "the run on one rank", 3600)  # fmt: skip
        run.stop()
    finally:
        run.close()


def main() -> None:
    """Strike, compare, print, and write JSON where asked."""
    args = arguments(__doc__ or "")
    total = 16 if args.quick else args.samples
    rows, problems = list[Row](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        job = prepare_job(root)
        layouts = list(LAYOUTS[:2] if args.quick else LAYOUTS)
        layouts = [d for d in layouts if args.only in Topology(**d).describe()]
        results: dict[str, Result] = {}
        for i, degrees in enumerate(layouts):
            name = Topology(**degrees).describe()
            results[name] = campaign(root / str(i), job, degrees, -(-total // len(layouts)), i)
            print(name, results[name].faults, "faults", *results[name].problems, flush=True)
        steps = max(
            LogTail(root / str(i) / "run").of("step")[-1]["step"] for i in range(len(layouts))
        )
        reference_run(root / "alone", job, steps)
        for i, (name, result) in enumerate(results.items()):
            judge(root / str(i), root / "alone", result)
            rows += rows_of(name, result)
            problems += [f"{name}: {problem}" for problem in result.problems]
    finish("healing", rows, ["torch"], args.json)
    for row in rows:
        if row.unit != "s":
            print(f"{row.case}  {row.metric}: {row.value:g}")
    for problem in problems[:20]:
        print(problem)
    raise SystemExit(1 if problems else 0)


def rows_of(case: str, result: Result) -> list[Row]:
    """The rows of a layout. The limit of the time to the next finished step is a step."""
    step = statistics.median(result.step_seconds)

    def row(metric: str, value: float, unit: str, samples: list[float], ratio: float) -> Row:
        return Row(case, "convoy", metric, value, unit, ratio, samples)

    seconds = statistics.median(result.seconds)
    counts: dict[str, Any] = {
        "faults": result.faults,
        "hangs": result.hangs,
        "processes of healthy replicas started again": result.restarted,
        "differences": len(result.problems),
    }
    return [
        row("seconds to the next finished step", seconds, "s", result.seconds, step / seconds),
        row("seconds of a step", step, "s", result.step_seconds, 1.0),
        row("seconds that all wait for a replica that comes",
            statistics.median(result.join_seconds), "s", result.join_seconds, 0.0),
        *(row(name, float(count), "", [], 0.0) for name, count in counts.items()),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
