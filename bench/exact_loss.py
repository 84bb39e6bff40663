"""What ``train.exact`` does to the loss: the tiny recipe with and without it, by seeds.

    OMP_NUM_THREADS=1 python -m bench.exact_loss [--quick] [--json FILE]

The model of tools/recipes/stdlib-tiny.toml on one rank, 200 steps of 512 tokens in 8 micro-batches
(the recipe has 2,048 in 2), with three seeds, in float32 and with exact sums: the mean training
loss of the last ten steps, and bits per byte of held-out text at the end. Exact sums lose nothing
if the difference of a seed's two runs is within the spread of seeds. The limit is float32 with the
same seed; a ratio is a subject's figure over it.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import Row, arguments, finish
from bench.recipe_runs import prepare_corpus, train

SEEDS = (0, 1, 2)
SUBJECTS = {"float32": "false", "exact": "true"}
SETTINGS = [
    "parallel.ep=1", "batch.global_batch_size=8", "batch.micro_batch_size=1", "data.seq_len=64",
    "eval.interval_steps=0", "eval.final_sequences=400", "sample.tokens=0", "metrics.port=-1",
    "checkpoint.interval_steps=1000",
]  # fmt: skip


def losses(folder: Path, corpus: Path, steps: int, seed: int, exact: str) -> tuple[float, float]:
    """Of one run: the mean loss of the last ten steps, in nats per token, and bits per byte."""
    run = folder / f"{seed}-{exact}"
    settings = [*SETTINGS, f"train.steps={steps}", f"train.seed={seed}", f"train.exact={exact}",
                f"schedule.warmup_steps={min(24, steps // 5)}"]  # fmt: skip
    log = train(run, corpus, settings, ranks=1)
    of_steps = [line["loss"] for line in log if line["event"] == "step"]
    summary = json.loads((run / "summary.json").read_text())
    return statistics.mean(of_steps[-10:]), summary["val_bits_per_byte"]


def main() -> None:
    args = arguments(__doc__)
    steps, rows = (20 if args.quick else 200), []
    with TemporaryDirectory() as name:
        corpus = prepare_corpus(Path(name))
        for seed in SEEDS[: 1 if args.quick else None]:
            limit: tuple[float, float] | None = None
            for subject, exact in SUBJECTS.items():
                found = losses(Path(name), corpus, steps, seed, exact)
                limit = limit or found
                for metric, value, base in zip(
                    ("loss", "bits_per_byte"), found, limit, strict=True
                ):
                    unit = "nats" if metric == "loss" else "bits"
                    print(f"seed {seed}  {subject:<8} {metric:<14} {value:.5f}", flush=True)
                    rows.append(Row(f"{steps} steps, seed {seed}", subject, metric, value, unit,
                                    value / base, []))  # fmt: skip
    finish("exact_loss", rows, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    main()
