"""Steps of PyTorch Lightning that accumulate micro-batches.

Legend: none, the model has one weight.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from bench.museum_peers.frame import Answer, peer_case

WITH = ("torchmetrics==1.9.0", "lightning-utilities==0.15.2")


def _module(weights: list[float]) -> Any:
    """A model of one weight whose gradient is 1 for each micro-batch; notes the weight."""
    from pytorch_lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            return self.weight.sum() + 0.0 * batch[0].sum()

        def on_train_batch_end(self, *_: Any) -> None:
            weights.append(float(self.weight))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    return Module()


def _trainer(folder: str, **options: Any) -> Any:
    from pytorch_lightning import Trainer

    return Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def _steps(batches: int, accumulated: int, epochs: int) -> list[float]:
    """The sizes of a run's optimizer steps."""
    weights: list[float] = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(
            folder, max_epochs=epochs, accumulate_grad_batches=accumulated,
            enable_checkpointing=False,
        )  # fmt: skip
        loader: Any = DataLoader(TensorDataset(torch.zeros(batches)), batch_size=1)
        trainer.fit(_module(weights), loader)
    moves = [before - after for before, after in pairwise(weights)]
    return [move for move in moves if move != 0]


@peer_case(
    "Lightning-AI/pytorch-lightning#19987",
    went_wrong="The last step of an epoch divided its fewer micro-batches by the full number.",
    wrong=("pytorch-lightning==2.6.6", *WITH),
    fixed=None,
    no_fix="The issue is open; 2.6.6 is the newest release.",
)
def an_epochs_last_step_is_the_mean_of_its_micro_batches() -> Answer:
    sizes = _steps(batches=5, accumulated=4, epochs=1)
    return Answer(
        all(abs(size - 1.0) < 1e-6 for size in sizes),
        f"steps of {', '.join(f'{size:.2f}' for size in sizes)}; each gradient is 1",
    )


@peer_case(
    "Lightning-AI/pytorch-lightning#21808",
    went_wrong="Epochs shorter than the accumulation stepped once an epoch, on a part.",
    wrong=("pytorch-lightning==2.6.6", *WITH),
    fixed=None,
    no_fix="The issue was closed; 2.6.6, the newest release, behaves so.",
)
def a_step_has_the_number_of_micro_batches_that_was_asked_for() -> Answer:
    sizes = _steps(batches=2, accumulated=4, epochs=4)
    return Answer(len(sizes) == 2, f"{len(sizes)} steps of 8 micro-batches, 4 to a step")
