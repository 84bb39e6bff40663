"""Cases of PyTorch Lightning: accumulation of gradients, resumes, saves, and seeds."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from bench.museum_peers.frame import Answer, peer_case


def _lightning(version: str) -> tuple[str, ...]:
    return (f"pytorch-lightning=={version}", f"lightning-fabric=={version}",
            "torchmetrics==1.8.2", "lightning-utilities==0.15.2", "setuptools==80.9.0")  # fmt: skip


def _weight_after(batches: int, *, step_takes_index: bool = True, **options: Any) -> float:
    """A weight, from 0, after SGD at rate 1 on the loss weight * x, for x of 1, 2, 4, ..."""
    import pytorch_lightning as pl
    import torch

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    if step_takes_index:
        Model.training_step = lambda self, batch, batch_idx: (self.weight * batch).sum()
    else:
        Model.training_step = lambda self, batch: (self.weight * batch).sum()
    samples: Any = [float(2**i) for i in range(batches)]
    data: Any = torch.utils.data.DataLoader(samples, batch_size=1)
    model, quiet = Model(), ("logger", "enable_checkpointing", "enable_progress_bar")
    pl.Trainer(
        accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, enable_model_summary=False,
        **dict.fromkeys(quiet, False), **options,
    ).fit(model, data, data)  # fmt: skip
    return float(-model.weight)


@peer_case(
    "Lightning-AI/pytorch-lightning#18710",
    went_wrong="A validation in the middle of an accumulation erased the gradients of the "
    "micro-batches before it.",
    wrong=_lightning("2.0.9"),
    fixed=_lightning("2.1.0"),
)
def a_validation_leaves_the_gradients_of_a_step() -> Answer:
    seen = _weight_after(2, accumulate_grad_batches=2, val_check_interval=1)
    return Answer(abs(seen - 1.5) < 1e-6, f"a step of {seen:g} by gradients 1 and 2, of 1.5")


@peer_case(
    "Lightning-AI/pytorch-lightning#18619",
    went_wrong="A training step without an argument for the batch's number erased the gradients "
    "of the micro-batches before it.",
    wrong=_lightning("2.0.9"),
    fixed=_lightning("2.1.0"),
)
def each_micro_batch_of_a_step_has_its_gradient() -> Answer:
    seen = _weight_after(2, accumulate_grad_batches=2, step_takes_index=False)
    return Answer(abs(seen - 1.5) < 1e-6, f"a step of {seen:g} by gradients 1 and 2, of 1.5")


@peer_case(
    "Lightning-AI/pytorch-lightning#21079",
    went_wrong="A save in the background wrote the tensors of the model while training changed "
    "them.",
    wrong=_lightning("2.5.3"),
    fixed=_lightning("2.5.4"),
)
def a_save_in_the_background_has_the_state_of_its_step() -> Answer:
    """The inner writer waits until training has changed the weight, as a slow disk does."""
    import torch
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
    from pytorch_lightning.plugins.io import AsyncCheckpointIO

    changed = threading.Event()

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            changed.wait(60)
            super().save_checkpoint(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        path, weight = Path(folder) / "save.ckpt", torch.ones(3)
        saver = AsyncCheckpointIO(checkpoint_io=Slow())
        if hasattr(saver, "setup"):
            saver.setup()
        saver.save_checkpoint({"weight": weight}, path)
        weight.add_(1.0)
        changed.set()
        saver.teardown()
        seen = torch.load(path)["weight"][0].item()
    return Answer(seen == 1.0, f"the file has weight {seen:g} of a step whose weight was 1")


@peer_case(
    "Lightning-AI/pytorch-lightning#21399",
    went_wrong="Seeds of workers forgot the seed of the job, so workers of jobs with other seeds "
    "drew the same numbers.",
    wrong=_lightning("2.6.0"),
    fixed=_lightning("2.6.1"),
)
def two_seeds_of_a_job_give_workers_other_numbers() -> Answer:
    import torch
    from lightning_fabric.utilities.seed import pl_worker_init_function

    draws = []
    for seed in (1, 2, 42, 123):
        torch.manual_seed(seed)
        pl_worker_init_function(0, rank=0)
        draws.append(torch.rand(1).item())
    return Answer(len(set(draws)) == 4, f"{len(set(draws))} different draws of 4 seeds")


def _read_on_resume() -> list[int]:
    """Numbers that a resumed run trains on, of a stream that goes on from number 3."""
    import pytorch_lightning as pl
    import torch

    read: list[int] = []

    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, first: int) -> None:
            self.numbers = iter(range(first, first + 100))

        def __iter__(self) -> Any:
            for _ in range(3):
                yield next(self.numbers)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            read.extend(int(number) for number in batch)
            return (self.weight * batch).sum()

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "save.ckpt")
        for epochs, first, resume in ((1, 0, None), (2, 3, path)):
            read.clear()
            trainer = pl.Trainer(
                accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False,
                enable_checkpointing=False, enable_model_summary=False,
            )  # fmt: skip
            loader = torch.utils.data.DataLoader(Stream(first), batch_size=1)
            trainer.fit(Model(), loader, ckpt_path=resume)
            trainer.save_checkpoint(path)
    return read


@peer_case(
    "Lightning-AI/pytorch-lightning#20775",
    went_wrong="A resumed run began the stream of its data twice, and threw away what the first "
    "start had read.",
    wrong=_lightning("2.5.2"),
    fixed=_lightning("2.5.3"),
)
def a_resumed_run_trains_on_each_sample_that_follows() -> Answer:
    seen = _read_on_resume()
    return Answer(seen == [3, 4, 5], f"trained on {seen} of the next samples [3, 4, 5]")
