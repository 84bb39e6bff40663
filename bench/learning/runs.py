"""The runs of a study: each is trained where it has not ended yet, and goes on where it stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.learning.studies import Start, Study, Subject
from bench.recipe_runs import ENVIRONMENT, ROOT, words
from pretrain.observe import StepCommitted, read_log

_POLL_SECONDS = 0.2


def each_run(study: Study, quick: bool) -> Iterator[tuple[str, Subject, int]]:
    """Case, subject and seed of every run; with ``quick`` one seed of the first case."""
    for case in list(study.cases)[: 1 if quick else None]:
        for seed in study.seeds[: 1 if quick else None]:
            for subject in study.subjects:
                yield case, subject, seed


def folder_of(root: Path, case: str, subject: Subject, seed: int) -> Path:
    """Where a run is kept."""
    plain = "".join(c if c.isalnum() else "-" for c in f"{case} {subject.name} {seed}")
    return root / plain


def spec_of(
    study: Study, case: str, subject: Subject, seed: int
) -> tuple[dict[str, Any], list[str]]:
    """The recipe of a run, and ``section.field=value`` over it."""
    recipe = tomllib.loads(study.recipe.read_text())
    for table in subject.without:
        recipe.pop(table)
    settings = [
        *study.settings, *study.cases[case], *subject.settings, f"train.seed={seed}",
        "metrics.port=-1",
    ]  # fmt: skip
    return recipe, [each for each in settings if each.split(".")[0] not in subject.without]


def train_run(study: Study, case: str, subject: Subject, seed: int, run: Path, quick: bool) -> None:
    """Train a run to its end, in as many starts as the subject asks for."""
    run.mkdir(parents=True, exist_ok=True)
    recipe, settings = spec_of(study, case, subject, seed)
    spec = run / "spec.json"
    spec.write_text(json.dumps(recipe, indent=1))
    settings += [f"run_dir={run}"]
    if quick:
        settings += ["train.steps=24", "schedule.warmup_steps=4"]
    for start in subject.starts:
        if start.stop_after is None or _steps(run) < start.stop_after:
            _start(spec, settings, start, run)


def _start(spec: Path, settings: list[str], start: Start, run: Path) -> None:
    """One start: to the end, or until SIGTERM after some steps, which commits a checkpoint."""
    if start.ranks != 2 or start.stop_after is not None:
        settings = [*settings, f"parallel.ep={start.ranks}"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={start.ranks}", "tools/pretrain.py", str(spec), *words(settings),
    ]  # fmt: skip
    with (run / "output.txt").open("a") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                if start.stop_after is not None and _steps(run) >= start.stop_after:
                    process.send_signal(signal.SIGTERM)
                    break
                time.sleep(_POLL_SECONDS)
            code = process.wait(timeout=120)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code and start.stop_after is None:
        raise SystemExit(f"the run in {run} ended with {code}: see {run / 'output.txt'}")


def _steps(run: Path) -> int:
    """The steps that the log has."""
    try:
        events = read_log(run / "log.jsonl").events
    except OSError:
        return 0
    return max((e.step for e in events if isinstance(e, StepCommitted)), default=0)
