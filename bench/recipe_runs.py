"""Runs of the tiny recipe for benchmarks: its corpus, and its ranks under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "tools/recipes/stdlib-tiny.toml"
RANKS = 2
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
}  # fmt: skip
"""Of torchrun and its ranks."""


def prepare_corpus(folder: Path) -> Path:
    """The prepared corpus of the recipe, below ``folder``."""
    corpus = folder / "corpus"
    subprocess.run(
        [sys.executable, "-m", "convoy", "prepare", str(RECIPE),
         *words((f"data.path={corpus}", f"run_dir={folder / 'run'}"))],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return corpus


def words(settings: Iterable[str]) -> list[str]:
    """``--set`` before each setting."""
    return [word for each in settings for word in ("--set", each)]


_PINNED = 'exec taskset --cpu-list "$LOCAL_RANK" "$@"'
"""A rank on the core of its number, with all of its threads and children."""


def torchrun(*command: str, ranks: int = RANKS, pinned: bool = False) -> None:
    """Run a command on all ranks, to its end; a failure ends the benchmark with its output.

    Args:
        command: a Python file and its arguments.
        ranks: how many.
        pinned: each rank has one core for itself.
    """
    started = list(command)
    if pinned:
        started = ["--no-python", "sh", "-c", _PINNED, "sh", sys.executable, *command]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={ranks}", *started],
        cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[:3000]}")


def train(
    run_dir: Path,
    corpus: Path,
    settings: Iterable[str],
    *,
    ranks: int = RANKS,
    pinned: bool = False,
) -> list[dict[str, Any]]:
    """Train the recipe on all ranks, each on one core where ``pinned``; returns the log."""
    every = (*settings, f"run_dir={run_dir}", f"data.path={corpus}")
    torchrun("tools/pretrain.py", str(RECIPE), *words(every), ranks=ranks, pinned=pinned)
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


_ALONE = (
    "parallel.ep=1", "eval.interval_steps=0", "eval.final_sequences=400", "sample.tokens=0",
    "metrics.port=-1", "checkpoint.interval_steps=1000",
)  # fmt: skip


def one_rank(
    run_dir: Path, corpus: Path, steps: int, settings: Iterable[str], seed: int
) -> tuple[list[float], float]:
    """Train the recipe on one rank: the loss of each step in nats per token, and the bits per byte
    of held-out text at the end. A failure ends the benchmark with its output."""
    every = [*_ALONE, *settings, f"train.steps={steps}", f"train.seed={seed}",
             f"schedule.warmup_steps={min(24, steps // 5)}"]  # fmt: skip
    log = train(run_dir, corpus, every, ranks=1)
    summary = json.loads((run_dir / "summary.json").read_text())
    return [line["loss"] for line in log if line["event"] == "step"], summary["val_bits_per_byte"]
