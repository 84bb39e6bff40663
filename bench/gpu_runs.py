"""Runs of the tiny recipe on CUDA devices, whose losses are compared.

    python -m bench.gpu_runs train --folder FOLDER [--gpus N] [--quick] [--json FILE]

``train``: in bfloat16 on one device; the loss must fall. ``fsdp`` and ``ep``: on N devices, with
all that is sharded, and with experts spread over the devices; the losses and the first gradient
norm must be those of one device, up to rounding. ``exact``: with ``train.exact`` on one device, and
on N with FSDP and EP (on one device: twice); losses and gradient norms must have equal bits. The
corpus and the runs are kept below FOLDER; a run of one device that is there is not run again.

Exit codes: 0 as it must be; 1 not so, or a run failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from bench.harness import Row, finish
from bench.recipe_runs import ENVIRONMENT, RECIPE, ROOT, words

_ALWAYS = (
    "precision.compute=bfloat16", "batch.micro_batch_size=1", "eval.interval_steps=0",
    "sample.tokens=0", "metrics.port=-1", "checkpoint.interval_steps=1000",
)  # fmt: skip
"""A micro-batch of one sequence, so that eight devices have one each."""
QUICK = (
    "model.vocab_size=512", "model.num_layers=2", "data.seq_len=64", f"data.source={ROOT}/docs",
    "schedule.warmup_steps=2",
)  # fmt: skip
"""A smaller model, and little text."""
_LOSS_TOLERANCE = 0.02
"""Of a loss, relative: bfloat16 rounds otherwise on other shapes, and near-ties route otherwise."""
_NORM_TOLERANCE = 0.02
"""Of the first step's gradient norm, relative: a gradient that is summed twice is far beyond it."""

Step = tuple[float, float, float]
"""Loss, gradient norm and seconds."""


class Runs:
    """Runs of the recipe below one folder."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder, self.steps = folder.resolve(), 4 if quick else 40
        corpus = self.folder / ("corpus-quick" if quick else "corpus")
        self.settings = (*_ALWAYS, *(QUICK if quick else ()), f"train.steps={self.steps}",
                         f"data.path={corpus}")  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        self._call("convoy", "prepare", str(RECIPE), *words(self.settings),
                   "--set", f"run_dir={self.folder / 'prepare'}")  # fmt: skip

    def run(self, name: str, gpus: int, *settings: str) -> list[Step]:
        """Train from the start on so many devices; returns all steps."""
        run_dir = self.folder / name
        shutil.rmtree(run_dir, ignore_errors=True)
        self._call(
            "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}",
            "tools/pretrain.py", str(RECIPE),
            *words((*self.settings, *settings, f"run_dir={run_dir}")),
        )  # fmt: skip
        return self.log(name)

    def log(self, name: str) -> list[Step]:
        """The steps of a run that ended; none where there is no such run."""
        path = self.folder / name / "log.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = [(e["loss"], e["grad_norm"], e["seconds"]) for e in lines if e["event"] == "step"]
        return found if len(found) == self.steps else []

    def one(self) -> list[Step]:
        """The run on one device, run if need be."""
        return self.log("one") or self.run("one", 1, "parallel.ep=1")

    def _call(self, module: str, *arguments: str) -> None:
        print("+", module, *arguments, flush=True)
        done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, env=ENVIRONMENT)
        if done.returncode:
            raise SystemExit(f"error: {module} ended with {done.returncode}")


def rows_of(name: str, steps: list[Step]) -> list[Row]:
    """First and last loss, and the median step."""
    times = [seconds for _, _, seconds in steps[1:]]
    median = statistics.median(times)
    return [
        Row(name, "convoy", "first_loss", steps[0][0], "nats", 1.0, []),
        Row(name, "convoy", "last_loss", steps[-1][0], "nats", 1.0, []),
        Row(name, "convoy", "step_seconds", median, "s", 1.0, times),
    ]


def far(found: list[Step], expected: list[Step]) -> tuple[float, float]:
    """The largest relative difference of a loss, and that of the first gradient norm."""
    losses = [abs(a[0] / b[0] - 1) for a, b in zip(found, expected, strict=True)]
    return max(losses), abs(found[0][1] / expected[0][1] - 1)


def train(runs: Runs) -> tuple[list[Row], str]:
    """A run on one device, and what is wrong with it."""
    steps = runs.run("one", 1, "parallel.ep=1")
    first, last = steps[0][0], steps[-1][0]
    return rows_of("1 device", steps), "" if last < first else (
        f"the loss went from {first:.4f} to {last:.4f}, and should fall"
    )


def parity(runs: Runs, name: str, gpus: int) -> tuple[list[Row], str]:
    """A run on several devices beside that on one."""
    expected = runs.one()
    degree = gpus if name == "ep" else 1
    found = runs.run(name, gpus, f"parallel.dp_shard={gpus}", f"parallel.ep={degree}")
    losses, norm = far(found, expected)
    case = f"{gpus} devices, {name}"
    rows = [*rows_of(case, found),
            Row(case, "convoy", "loss_difference", losses, "relative", 1.0, []),
            Row(case, "convoy", "first_norm_difference", norm, "relative", 1.0, [])]  # fmt: skip
    right = losses <= _LOSS_TOLERANCE and norm <= _NORM_TOLERANCE
    return rows, "" if right else (
        f"losses differ from one device's by up to {losses:.2%}, which must be at most "
        f"{_LOSS_TOLERANCE:.0%}; the first gradient norm by {norm:.2%} of {_NORM_TOLERANCE:.0%}"
    )


def exact(runs: Runs, gpus: int) -> tuple[list[Row], str]:
    """Runs whose bits must be equal."""
    layouts = {"again": 1} if gpus == 1 else {"fsdp": 1, "ep": gpus}
    alone = runs.run("exact-one", 1, "train.exact=true", "parallel.ep=1")
    rows, differ = rows_of("1 device", alone), []
    for name, ep in layouts.items():
        settings = "train.exact=true", f"parallel.dp_shard={gpus}", f"parallel.ep={ep}"
        found = runs.run(f"exact-{name}", gpus, *settings)
        at = [n for n, (a, b) in enumerate(zip(found, alone, strict=True), 1) if a[:2] != b[:2]]
        rows.append(Row(f"{gpus} devices, {name}", "convoy", "equal_bits", float(not at), "bool",
                        float(not at), []))  # fmt: skip
        differ += [f"{name} on {gpus} devices from step {at[0]}"] if at else []
    return rows, f"bits differ from one device's: {', '.join(differ)}" if differ else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["train", "fsdp", "ep", "exact"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a smaller model, and few steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    args = parser.parse_args()
    runs = Runs(args.folder, args.quick)
    if args.what == "train":
        rows, wrong = train(runs)
    elif args.what == "exact":
        rows, wrong = exact(runs, args.gpus)
    else:
        rows, wrong = parity(runs, args.what, args.gpus)
    finish(f"gpu_{args.what}", rows, ["torch", "numpy"], args.json)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
