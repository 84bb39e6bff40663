"""What ``train.exact`` does to the loss: the tiny recipe with and without it, by seeds.

    OMP_NUM_THREADS=1 python -m bench.exact_loss [--quick] [--json FILE]

The model of tools/recipes/stdlib-tiny.toml on one rank, 200 steps of 512 tokens in 8 micro-batches
(the recipe has 2,048 in 2), with three seeds, in float32 and with exact sums: the mean training
loss of the last ten steps, and bits per byte of held-out text at the end. Exact sums lose nothing
if the difference of a seed's two runs is within the spread of seeds. The limit is float32 with the
same seed; a ratio is a subject's figure over it.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import Row, arguments, finish
from bench.recipe_runs import one_rank, prepare_corpus

SEEDS = (0, 1, 2)
SUBJECTS = {"float32": "false", "exact": "true"}
SETTINGS = ["batch.global_batch_size=8", "batch.micro_batch_size=1", "data.seq_len=64"]


def main() -> None:
    args = arguments(__doc__)
    steps, rows = (20 if args.quick else 200), []
    with TemporaryDirectory() as name:
        corpus = prepare_corpus(Path(name))
        for seed in SEEDS[: 1 if args.quick else None]:
            limit: tuple[float, float] | None = None
            for subject, exact in SUBJECTS.items():
                run, settings = Path(name) / f"{seed}-{exact}", [*SETTINGS, f"train.exact={exact}"]
                losses, bits = one_rank(run, corpus, steps, settings, seed)
                found = statistics.mean(losses[-10:]), bits
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
