"""Step times of layouts beside those that ``convoy plan`` plans for this machine.

    python -m bench.layouts [--quick] [--json FILE] [--samples N] [--only TEXT]

First ``convoy plan --calibrate`` measures this machine under torchrun, on as many ranks as train.
Then the tiny recipe trains some steps on each layout, each layout ``samples`` times in turn. The
measured step is the median of the steps after the first three. The subject ``plan`` is the planned
step, and its ratio is measured / planned: above 1 the plan is too fast. The last line says on which
place of the measured layouts the best planned one is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.harness import Row, arguments, finish
from pretrain.plan import load_cluster, plan_of
from pretrain.spec import load_spec

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "tools/recipes/stdlib-tiny.toml"
RANKS = 2
_STEPS = 15
_FIRST = 3
LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("dp_shard=2 ep=2",),
    ("dp_shard=2 ep=1",),
    ("dp_replicate=2 ep=1",),
    ("dp_shard=2 ep=2", "batch.micro_batch_size=2"),
    ("dp_shard=2 ep=2", "batch.micro_batch_size=1"),
    ("dp_shard=2 ep=2", "parallel.memory.recompute=full"),
    ("dp_shard=2 ep=2", "parallel.memory.zero_stage=1"),
    ("pp=2 ep=1",),
    ("pp=2 ep=1", "batch.micro_batch_size=2"),
    ("tp=2 ep=2",),
    ("cp=2 ep=2",),
)
_SETTINGS = (
    f"train.steps={_STEPS}", "train.log_interval_steps=1", "eval.interval_steps=0",
    "eval.sequences=2", "sample.tokens=0", f"checkpoint.interval_steps={_STEPS}",
    "metrics.port=-1", "schedule.warmup_steps=2",
)  # fmt: skip


def torchrun(*words: str) -> None:
    """Run a command of ours on all ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={RANKS}", *words],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[:3000]}")


def overrides(layout: tuple[str, ...]) -> list[str]:
    """``SECTION.FIELD=VALUE`` of a layout."""
    degrees, *more = layout
    return [*(f"parallel.{degree}" for degree in degrees.split()), *more]


def measured(layout: tuple[str, ...], folder: Path, corpus: Path) -> float:
    """Seconds of a step."""
    settings = [*_SETTINGS, *overrides(layout), f"run_dir={folder}", f"data.path={corpus}"]
    words = [word for each in settings for word in ("--set", each)]
    torchrun("tools/pretrain.py", str(RECIPE), *words)
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    steps = [line["seconds"] for line in lines if line["event"] == "step"]
    return float(statistics.median(steps[_FIRST:]))


def main() -> None:
    """Measure, print, and write JSON where asked."""
    args = arguments(__doc__ or "")
    samples = 1 if args.quick else min(args.samples, 3)
    layouts = [each for each in LAYOUTS if args.only in " ".join(each)]
    if args.quick:
        layouts = layouts[:2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, calibrated = folder / "corpus", folder / "here.toml"
        subprocess.run(
            [sys.executable, str(ROOT / "tools/prepare_data.py"), str(RECIPE),
             "--set", f"data.path={corpus}", "--set", f"run_dir={folder / 'run'}"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        torchrun("tools/plan.py", "--calibrate", str(calibrated))
        cluster = load_cluster(str(calibrated))
        print(calibrated.read_text())
        taken: dict[tuple[str, ...], list[float]] = {layout: [] for layout in layouts}
        for sample in range(samples):
            for number, layout in enumerate(layouts):
                run = folder / f"run-{sample}-{number}"
                taken[layout].append(measured(layout, run, corpus))
    rows, planned = [], {}
    for layout, seconds in taken.items():
        spec = load_spec(RECIPE, overrides(layout))
        planned[layout] = plan_of(spec, RANKS, cluster).seconds
        case, median = " ".join(layout), statistics.median(seconds)
        rows.append(Row(case, "convoy", "step", median, "s", 1.0, seconds))
        rows.append(Row(case, "plan", "step", planned[layout], "s", median / planned[layout], []))
    finish("layouts", rows, ["torch"], args.json)
    by_time = sorted(layouts, key=lambda layout: statistics.median(taken[layout]))
    best = min(layouts, key=lambda layout: planned[layout])
    errors = sorted(abs(planned[k] / statistics.median(taken[k]) - 1) for k in layouts)
    print(
        f"the best planned layout, {' '.join(best)}, is number {by_time.index(best) + 1} of "
        f"{len(layouts)} measured; median error {100 * statistics.median(errors):.0f} %, worst "
        f"{100 * errors[-1]:.0f} %"
    )


if __name__ == "__main__":
    main()
