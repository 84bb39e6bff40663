"""Train what a study compares, write its table, and draw its picture.

    python -m bench.learning STUDY [--quick] [--runs DIR]

STUDY is half-hour, moe-dense, balancing, quantile or one-curve. Runs are kept in DIR
(runs/learning/STUDY): a second call trains what is missing, and goes on where a run was stopped.
The table goes to bench/results/learning-STUDY.json and the picture to
docs/images/learning-STUDY.svg; with --quick both go to DIR. Nothing here is timed: other work on
the machine changes no figure.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness import Row
from bench.learning.curves import Curve, read_curve
from bench.learning.plots import write_study
from bench.learning.runs import each_run, folder_of, train_run
from bench.learning.studies import STUDIES
from bench.recipe_runs import ROOT


def rows_of(curves: Sequence[Curve]) -> list[Row]:
    """Each figure of a subject: the mean over seeds, with every seed's; the limit of bits per byte
    is the best subject of a case."""
    rows = []
    for case in dict.fromkeys(curve.case for curve in curves):
        here = [curve for curve in curves if curve.case == case]
        subjects = dict.fromkeys(curve.subject for curve in here)
        of = {name: [c for c in here if c.subject == name] for name in subjects}
        best = min(statistics.mean(c.bits_per_byte for c in each) for each in of.values())
        for name, each in of.items():
            bits = [c.bits_per_byte for c in each]
            loads = [c.worst_load for c in each]
            mean = statistics.mean(bits)
            rows.append(Row(case, name, "bits_per_byte", mean, "bits", best / mean, bits))
            load = statistics.mean(loads)
            rows.append(Row(case, name, "worst_load", load, "max / mean", 1 / load, loads))
    return rows


def differences(curves: Sequence[Curve]) -> list[Row]:
    """Of single runs, the largest relative difference of a step's loss to the first run's."""
    first = curves[0]
    rows = []
    for curve in curves[1:]:
        pairs = zip(first.losses, curve.losses, strict=True)
        most = max(abs(b - a) / a for a, b in pairs)
        rows.append(Row(curve.case, curve.subject, "loss_difference", most, "ratio", 1.0, [most]))
    return rows


def main() -> None:
    """Train, print, write and draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.learning")
    parser.add_argument("study", choices=STUDIES, metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--quick", action="store_true", help="24 steps of one seed and case")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="where runs are kept")
    args = parser.parse_args()
    study, name = STUDIES[args.study], f"learning-{args.study}"
    root = (args.runs or ROOT / "runs" / "learning" / args.study).absolute()
    root.mkdir(parents=True, exist_ok=True)
    prepare = [sys.executable, "-m", "convoy", "prepare", str(study.recipe)]
    subprocess.run(prepare, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    curves = []
    for case, subject, seed in each_run(study, args.quick):
        run = folder_of(root, case, subject, seed)
        train_run(study, case, subject, seed, run, args.quick)
        curves.append(read_curve(run, case, subject.name, seed))
        print(f"{case}, {subject.name}, seed {seed}: {curves[-1].bits_per_byte:.4f} bits per byte, "
              f"worst load {curves[-1].worst_load:.2f}", flush=True)  # fmt: skip
    rows = rows_of(curves)
    if study.compares_losses:
        rows += differences(curves)
    for row in rows:
        print(f"{row.case}  {row.subject:<34} {row.metric:<16} {row.value:.6g}")
    table = root / f"{name}.json" if args.quick else ROOT / "bench" / "results" / f"{name}.json"
    picture = root / f"{name}.svg" if args.quick else ROOT / "docs" / "images" / f"{name}.svg"
    write_study(name, study.title, rows, curves, ["torch", "numpy"], table, picture)


if __name__ == "__main__":
    main()
