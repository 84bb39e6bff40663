"""AdamW and Muon on the tiny recipe at equal steps: bits per byte by learning rate and by seed.

    OMP_NUM_THREADS=1 python -m bench.optimizers [--quick] [--json FILE] [--runs DIR]

The model of tools/recipes/stdlib-tiny.toml on one rank, 120 steps of 1,024 tokens (the recipe has
240 of 2,048). AdamW is tried with three learning rates, the recipe's own among them; then both
optimizers train with AdamW's best rate and three seeds, so that Muon's rate is not tuned. Reported
are bits per byte of held-out text at the end, and the mean training loss of the last ten steps. The
limit of a seed is AdamW; a ratio above 1 is better than that. Last, the seconds of one update of
all parameters; its limit is the matrix products of Muon's update alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from bench.harness import Row, finish, interleave
from bench.recipe_runs import ENVIRONMENT, RECIPE, ROOT, prepare_corpus, words
from pretrain.model import Decoder, is_hidden_matrix
from pretrain.optim import AdamWConfig, MuonConfig, build_optimizer
from pretrain.spec import load_spec

KINDS = ("adamw", "muon")
RATES = (3e-3, 6e-3, 1.2e-2)
SEEDS = (0, 1, 2)
SETTINGS = [
    "parallel.ep=1", "batch.global_batch_size=4", "eval.interval_steps=0",
    "eval.final_sequences=256", "sample.tokens=0", "metrics.port=-1",
    "checkpoint.interval_steps=1000",
]  # fmt: skip


class Result(NamedTuple):
    """What a run came to."""

    bits_per_byte: float
    loss: float
    """The mean of the last ten steps, in nats per token."""


def train(folder: Path, corpus: Path, steps: int, kind: str, rate: float, seed: int) -> Result:
    """One run, or what is left of it where ``folder`` has it already."""
    run = folder / f"{kind}-{rate}-{seed}-{steps}"
    if not (run / "summary.json").exists():
        settings = [*SETTINGS, f"optimizer.kind={kind}", f"optimizer.lr={rate}",
                    f"train.steps={steps}", f"schedule.warmup_steps={min(24, steps // 5)}",
                    f"train.seed={seed}", f"run_dir={run}", f"data.path={corpus}"]  # fmt: skip
        command = [sys.executable, "tools/pretrain.py", str(RECIPE), *words(settings)]
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
        if done.returncode == 3:
            return Result(float("inf"), float("inf"))  # it diverged
        if done.returncode:
            raise SystemExit(f"{run} ended with {done.returncode}: {done.stderr[-2000:]}")
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    summary = json.loads((run / "summary.json").read_text())
    result = Result(summary["val_bits_per_byte"], statistics.mean(losses[-10:]))
    print(
        f"{kind:<6} lr {rate:<7g} seed {seed}  {result.bits_per_byte:.4f} bits per byte"
        f"  loss {result.loss:.4f}",
        flush=True,
    )
    return result


def rows_of(case: str, kind: str, result: Result, limit: Result) -> list[Row]:
    """Bits per byte and loss of one run."""
    return [
        Row(case, kind, metric, value, unit, base / value, [])
        for metric, unit, value, base in zip(
            ("bits_per_byte", "loss"), ("bits", "nats"), result, limit, strict=True
        )
    ]


def compare(folder: Path, corpus: Path, quick: bool) -> list[Row]:
    """AdamW with every learning rate and the first seed, then both with its best and every seed."""
    steps, rates, seeds = (20, RATES[1:2], SEEDS[:1]) if quick else (120, RATES, SEEDS)
    first = {rate: train(folder, corpus, steps, "adamw", rate, seeds[0]) for rate in rates}
    best = min(rates, key=lambda rate: first[rate].bits_per_byte)
    rows = list[Row]()
    for rate, result in first.items():
        rows += rows_of(
            f"{steps} steps, lr {rate:g}, seed {seeds[0]}", "adamw", result, first[best]
        )
    for seed in seeds:
        found = {kind: train(folder, corpus, steps, kind, best, seed) for kind in KINDS}
        for kind in KINDS:
            case = f"{steps} steps, AdamW's best lr ({best:g}), seed {seed}"
            rows += rows_of(case, kind, found[kind], found["adamw"])
    return rows


def time_updates(samples: int) -> list[Row]:
    """One update of all parameters of the recipe's model in one process."""
    spec = load_spec(RECIPE)
    muon = MuonConfig(lr=1e-9)
    subjects: dict[str, Callable[[], None]] = {}
    for config in (AdamWConfig(lr=1e-9), muon):
        model = Decoder(spec.model, spec.moe)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        subjects[config.kind] = build_optimizer(model, config).step
    shapes = [
        (p.shape[0] if p.ndim == 3 else 1, *p.shape[-2:])
        for name, p in model.named_parameters()
        if is_hidden_matrix(name, p.shape)
    ]
    products = [
        (count, torch.randn(int(m), int(k)), torch.randn(int(k), int(n)))
        for count, rows, columns in shapes
        for m, n, k in muon.matrix_products(rows, columns)
    ]

    def limit() -> None:
        for count, a, b in products:
            for _ in range(count):
                a @ b

    return interleave("one update", "step", {"limit": limit, **subjects}, samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute; for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the runs there, and go on")
    parser.add_argument("--samples", type=int, default=9, help="of each subject's update")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = (args.runs or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rows = compare(folder, prepare_corpus(folder), args.quick)
        rows += time_updates(2 if args.quick else args.samples)
    finish("optimizers", rows, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    main()
