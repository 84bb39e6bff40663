"""Train three small runs, and write the routing of each at three steps.

    python -m bench.traces [--only NAME] [--runs DIR] [--output DIR] [--quick]

Runs are kept in DIR (runs/traces); a second call trains what is missing. A run is the tiny recipe
on the source of Python's standard library, with 32 experts, of which a token takes 4, in 3 MoE
layers. Nothing here is timed: other work on the machine changes no figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import ckpt
from bench.recipe_runs import prepare_corpus, train
from bench.traces import TRACES
from convoy.tracing import trace_routing
from moe import RoutingTrace, write_trace

COMMON = (
    "moe.num_experts=32", "moe.top_k=4", "moe.d_ff=128", "parallel.ep=1", "train.steps=320",
    "eval.interval_steps=0", "eval.final_sequences=64", "sample.tokens=0", "metrics.port=-1",
    "checkpoint.interval_steps=20", "checkpoint.retention.keep_every=20",
)  # fmt: skip
RUNS: dict[str, tuple[str, ...]] = {
    "none": ("moe.aux_loss_coeff=0.0",),
    "switch": ("moe.aux_loss_coeff=0.01",),
    "bias": (
        "moe.aux_loss_coeff=0.0", "moe.score_func=sigmoid", "moe.expert_bias=true",
        "moe.bias_update_rate=0.01",
    ),
}  # fmt: skip
STEPS = (20, 160, 320)
CALLS, SENDERS = 32, 8
QUICK = ("train.steps=40", "checkpoint.interval_steps=20", "schedule.warmup_steps=4")


def joined(traces: Sequence[RoutingTrace], name: str, settings: Sequence[str]) -> RoutingTrace:
    """Traces of one run at several steps, one after another."""
    return replace(
        traces[0],
        counts_CLSE=np.concatenate([trace.counts_CLSE for trace in traces]),
        step_C=np.concatenate([trace.step_C for trace in traces]),
        recipe=name,
        notes={**traces[0].notes, "first_sample": [t.notes["first_sample"] for t in traces],
               "settings": list(settings)},
    )  # fmt: skip


def main() -> None:
    """Train what is missing, and write the traces."""
    parser = argparse.ArgumentParser(description="Write traces of natural routing.")
    parser.add_argument("--only", choices=[*RUNS], help="one run; all without this option")
    parser.add_argument("--runs", type=Path, default=Path("runs/traces"))
    parser.add_argument("--output", type=Path, default=TRACES)
    parser.add_argument("--quick", action="store_true", help="40 steps, and few calls")
    args = parser.parse_args()
    steps, calls = (STEPS, CALLS) if not args.quick else ((20, 40), 2)
    root = args.runs.absolute()
    corpus = prepare_corpus(root) if not (root / "corpus").exists() else root / "corpus"
    for name in RUNS if args.only is None else [args.only]:
        settings = (*COMMON, *RUNS[name], *(QUICK if args.quick else ()))
        checkpoints = root / name / "checkpoints"
        if not checkpoints.exists() or not set(steps) <= set(ckpt.committed_steps(checkpoints)):
            train(root / name, corpus, settings, ranks=1)
        traces = [
            trace_routing(str(checkpoints), calls=calls, senders=SENDERS, step=step)
            for step in steps
        ]
        file = args.output / f"{name}.npz"
        file.unlink(missing_ok=True)
        write_trace(file, joined(traces, name, settings))
        loads = [trace.counts_CLSE.sum((0, 2)) for trace in traces]
        worst = ", ".join(f"{(n.max(-1) / n.mean(-1)).max():.2f}" for n in loads)
        print(f"{file}: {file.stat().st_size / 1024:.0f} KiB; largest load over mean: {worst}")


if __name__ == "__main__":
    main()
