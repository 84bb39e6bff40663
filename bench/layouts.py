"""Step times of layouts beside those that ``convoy plan`` plans for this machine.

    python -m bench.layouts [--quick] [--json FILE] [--samples N] [--only TEXT]

First ``convoy plan --calibrate`` measures this machine under torchrun, on as many ranks as train.
Then the tiny recipe trains some steps on each layout, each layout ``samples`` times in turn. The
measured step is the median of the steps after the first three. The subject ``plan`` is the planned
step, and its ratio is measured / planned: above 1 the plan is too fast. The last line says on which
place of the measured layouts the best planned one is.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from bench.harness import Row, arguments, finish
from bench.recipe_runs import RANKS, RECIPE, prepare_corpus, torchrun, train
from convoy.plan import load_cluster, plan_of
from pretrain.spec import load_spec

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
    "eval.final_sequences=2", "sample.tokens=0", f"checkpoint.interval_steps={_STEPS}",
    "metrics.port=-1", "schedule.warmup_steps=2",
)  # fmt: skip


def overrides(layout: tuple[str, ...]) -> list[str]:
    """``SECTION.FIELD=VALUE`` of a layout."""
    degrees, *more = layout
    return [*(f"parallel.{degree}" for degree in degrees.split()), *more]


def measured(layout: tuple[str, ...], folder: Path, corpus: Path) -> float:
    """Seconds of a step."""
    log = train(folder, corpus, [*_SETTINGS, *overrides(layout)])
    steps = [event["seconds"] for event in log if event["event"] == "step"]
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
        corpus, calibrated = prepare_corpus(folder), folder / "here.toml"
        torchrun("-m", "convoy", "plan", "--calibrate", str(calibrated))
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
