"""What products in float8 do to the loss: the tiny recipe in bfloat16 with and without, by seeds.

    OMP_NUM_THREADS=1 python -m bench.float8_loss [--quick] [--json FILE]

The model of tools/recipes/stdlib-tiny.toml on one rank, 200 steps of 256 tokens in two
sequences (the recipe has 2,048 in 8), with three seeds: in bfloat16, and in bfloat16 with the
products of experts, attention and dense layers in float8, which a CPU emulates. The figures are the
mean training loss of the last 20 steps, and bits per byte of held-out text at the end. The limit is
bfloat16 with the same seed; a ratio is a subject's figure over it. Two runs part by chance too: the
cases ``seeds to N`` have means over seeds, which are to be within .25 %.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import Row, arguments, finish
from bench.recipe_runs import one_rank, prepare_corpus

SEEDS = (0, 1, 2)
LAST_STEPS = 20
SUBJECTS = {
    "bfloat16": ["precision.compute=bfloat16"],
    "float8": ["precision.compute=bfloat16", "precision.experts=float8", "precision.dense=float8"],
}
SETTINGS = ["batch.global_batch_size=2", "batch.micro_batch_size=2", "data.seq_len=128",
            "eval.final_sequences=200"]  # fmt: skip


def row(case: str, subject: str, metric: str, value: float, limit: float) -> Row:
    """A figure, printed too."""
    print(f"{case}  {subject:<8} {metric:<14} {value:.5f}  {value / limit:.5f}", flush=True)
    unit = "nats" if metric == "loss" else "bits"
    return Row(case, subject, metric, value, unit, value / limit, [])


def main() -> None:
    args = arguments(__doc__)
    steps, rows = (10 if args.quick else 200), []
    found: dict[tuple[str, str], list[float]] = {}
    with TemporaryDirectory() as name:
        corpus = prepare_corpus(Path(name))
        for seed in SEEDS[: 1 if args.quick else None]:
            for subject, precision in SUBJECTS.items():
                run = Path(name) / f"{seed}-{subject}"
                losses, bits = one_rank(run, corpus, steps, [*SETTINGS, *precision], seed)
                figures = {"loss": statistics.mean(losses[-LAST_STEPS:]), "bits_per_byte": bits}
                for metric, value in figures.items():
                    found.setdefault((subject, metric), []).append(value)
                    limit = found["bfloat16", metric][-1]
                    rows.append(row(f"{steps} steps, seed {seed}", subject, metric, value, limit))
            means = {key: statistics.mean(values) for key, values in found.items()}
            both = [
                row(
                    f"{steps} steps, seeds to {seed}",
                    subject,
                    metric,
                    value,
                    means["bfloat16", metric],
                )
                for (subject, metric), value in means.items()
            ]
            # After each seed: a run of hours that ends early has told something.
            finish("float8_loss", rows + both, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    main()
