"""Gradients summed over copies with fewer bits: bytes, and what they do to the loss.

    OMP_NUM_THREADS=1 python -m bench.compression [--quick] [--json FILE]

The recipe that ``make pretrain`` trains (tools/recipes/stdlib-tiny.toml), on 2 ranks that each have
a copy of the model, under every ``parallel.gradient_compression``: bytes that a rank gives to
collectives in a step, the mean training loss of the last ten steps, and bits per byte of held-out
text. (Not speed: loopback is no slow link.) The limit is float32, ``none``; a ratio is float32's
bytes over a subject's, and a subject's loss over float32's. What a rank gives to itself counts:
on the wire float32's all-reduce sends twice (n - 1) / n of its bytes, and bfloat16's two exchanges
half of that.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import Row, arguments, finish

ROOT = Path(__file__).resolve().parent.parent

LAYOUT = ["parallel.ep=1", "parallel.dp_shard=1", "parallel.dp_replicate=2"]


def train(how: str, steps: int, folder: Path) -> dict[str, Any]:
    """One run; its summary, and the lines of its log by event."""
    run = folder / how
    values = [*LAYOUT, f"parallel.gradient_compression={how}", f"train.steps={steps}",
              f"run_dir={run}", "metrics.port=-1", "sample.tokens=0", "eval.interval_steps=0",
              f"schedule.warmup_steps={min(24, steps // 5)}"]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", "tools/pretrain.py", "tools/recipes/stdlib-tiny.toml"]  # fmt: skip
    for value in values:
        command += ["--set", value]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {"summary": json.loads((run / "summary.json").read_text()),
            "steps": [e for e in events if e["event"] == "step"]}  # fmt: skip


def main() -> None:
    args = arguments(__doc__)
    steps = 12 if args.quick else 120
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        runs = {how: train(how, steps, Path(folder)) for how in ("none", "bfloat16", "one_bit")}
    float32: dict[str, float] = {}
    for how, found in runs.items():
        last = [step["loss"] for step in found["steps"][-10:]]
        figures = {
            "bytes_per_step": (found["steps"][-1]["communication_bytes"]["dp"], "bytes"),
            "loss": (statistics.mean(last), "nats"),
            "bits_per_byte": (found["summary"]["val_bits_per_byte"], "bits"),
        }
        for metric, (value, unit) in figures.items():
            base = float32.setdefault(metric, value)
            ratio = base / value if metric == "bytes_per_step" else value / base
            rows.append(Row(f"{steps} steps", how, metric, value, unit, ratio, []))
            print(f"{how:<10} {metric:<18} {value:14,.4f} {unit:<9} {ratio:7.3f}")
    finish("compression", rows, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    main()
