"""Convoy's losses beside those of transformers' Trainer: one model, one order of batches.

    python -m bench.learning.trainer [--quick]

A Qwen3-MoE of the size of the tiny recipe is initialized by Convoy and exported to Hugging Face.
transformers' Trainer takes the exported weights, the batches of the recipe in their order, torch's
AdamW and the recipe's schedule. Convoy trains from the same seed on two ranks with half of the
experts on each. The load-balancing loss is off: transformers computes another one. The rate is 3e-4
and not the recipe's 6e-3, with which a difference in the last bit grows tenfold in a few steps, in
either trainer. A third run is Convoy's on one rank with other micro-batches: its losses say how far
rounding and near ties of the router go. The table is bench/results/learning-trainer.json, the
picture docs/images/learning-trainer.svg; with --quick nothing is written.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bench.harness import Row
from bench.learning.curves import Curve
from bench.learning.plots import write_study
from bench.recipe_runs import RECIPE, ROOT, prepare_corpus, train
from convoy.commands.command_line import main as convoy
from pretrain.checkpoint import restore
from pretrain.data import Cursor
from pretrain.job import build_job
from pretrain.observe import Summary
from pretrain.runtime import start
from pretrain.spec import JobSpec, load_spec
from tests.support.jobs import save_checkpoint

_TOLERANCE = 1e-4
_CONTROL = ("parallel.ep=1", "batch.micro_batch_size=2")
"""What Convoy is compared with besides: itself, on one rank, with other micro-batches."""
_IGNORED = -100
"""A label that is no target, in transformers."""


def settings_of(corpus: Path, steps: int) -> list[str]:
    """What differs from the recipe."""
    return [
        f"data.path={corpus}", f"train.steps={steps}", "train.log_interval_steps=1",
        "moe.aux_loss_coeff=0.0", "optimizer.lr=3e-4", "eval.interval_steps=0",
        "eval.final_sequences=64", "sample.tokens=0", "metrics.port=-1",
        f"checkpoint.interval_steps={steps}",
    ]  # fmt: skip


def export(spec: JobSpec, folder: Path, steps: int) -> torch.Tensor:
    """Write the initial weights to ``folder``; returns the batches, int64 [steps, B, S + 1]."""
    job = build_job(spec, start(spec.train.timeout_seconds))
    try:
        save_checkpoint(job, restore(job))
        batches, cursor = [], Cursor(0)
        for _ in range(steps):
            micro, cursor = job.loader.step(cursor)
            batches.append(torch.cat(micro))
    finally:
        job.runtime.close()
    words = [str(spec.checkpoint_path), str(folder), "--family", "qwen3_moe"]
    if convoy("convert", ["export", *words]):
        raise SystemExit("the initial weights cannot be exported")
    return torch.stack(batches).long()


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """Sequences in order. transformers shifts the labels itself, and divides the loss by the labels
    that count: the first token of a sequence is no target."""

    def __init__(self, batches: torch.Tensor) -> None:
        self.rows = batches.flatten(0, 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[0] = _IGNORED
        return {"input_ids": self.rows[index], "labels": labels}


def train_theirs(spec: JobSpec, folder: Path, batches: torch.Tensor) -> list[float]:
    """Losses of transformers' Trainer, in nats per token."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    losses: list[float] = []
    size = batches.shape[1]

    class InOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(_Rows(batches), batch_size=size, shuffle=False)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            loss = found[0] if isinstance(found, tuple) else found
            losses.append(loss.item())
            return found

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    o = spec.optimizer
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: spec.schedule.ratio(step, spec.train.steps)
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=len(batches), use_cpu=True,
        per_device_train_batch_size=size, max_grad_norm=o.clip_norm, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    InOrder(model, arguments, train_dataset=_Rows(batches), optimizers=(optimizer, rates)).train()
    return losses


def losses_of(log: list[dict[str, Any]]) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in log if line["event"] == "step"]


def difference(some: list[float], others: list[float]) -> float:
    """The largest relative difference of a step's losses."""
    return max(abs(a - b) / b for a, b in zip(some, others, strict=True))


def main() -> None:
    """Train both, print, write and draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.learning.trainer")
    parser.add_argument("--quick", action="store_true", help="40 steps; nothing is written")
    args = parser.parse_args()
    steps = 40 if args.quick else 200
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = settings_of(prepare_corpus(folder), steps)
        spec = load_spec(RECIPE, [*settings, "parallel.ep=1", f"run_dir={folder / 'initial'}"])
        batches = export(spec, folder / "exported", steps)
        theirs = train_theirs(spec, folder / "exported", batches)
        ours = losses_of(train(folder / "convoy", Path(spec.data.path), settings))
        control = losses_of(
            train(folder / "control", Path(spec.data.path), [*settings, *_CONTROL], ranks=1)
        )
        summary = Summary.read(folder / "convoy" / "summary.json")
    assert summary is not None
    most, own = difference(ours, theirs), difference(control, ours)
    print(
        f"{steps} steps: losses differ by at most {most:.2e} (goal {_TOLERANCE:.0e}), and those of "
        f"Convoy with other micro-batches by {own:.2e}"
    )
    if args.quick:
        return
    rows = [
        Row("tiny Qwen3-MoE", "transformers", "loss_difference", most, "ratio", 1.0, [most]),
        Row("tiny Qwen3-MoE", "other micro-batches", "loss_difference", own, "ratio", 1.0, [own]),
    ]
    tokens = [
        (step + 1) * spec.batch.global_batch_size * spec.data.seq_len for step in range(steps)
    ]
    curves = [
        Curve("tiny Qwen3-MoE", subject, 0, tokens, losses, [], [], summary.val_bits_per_byte, 1.0)
        for subject, losses in (("transformers' Trainer", theirs), ("Convoy, 2 ranks", ours))
    ]  # fmt: skip
    name, packages = "learning-trainer", ["torch", "transformers", "accelerate"]
    table = ROOT / "bench" / "results" / f"{name}.json"
    picture = ROOT / "docs" / "images" / f"{name}.svg"
    write_study(name, "One model, two trainers", rows, curves, packages, table, picture)


if __name__ == "__main__":
    main()
