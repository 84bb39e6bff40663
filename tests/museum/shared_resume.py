"""What ranks of the cases about resumes run: a tiny job in float16, whose loss scale is a state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckpt
from pretrain.checkpoint.resume import restore
from pretrain.job import build_job
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.state import Progress
from pretrain.train.trainer import Trainer
from tests.support.jobs import make_spec, save_checkpoint
from tests.support.layouts import NoCheckpoints, Slices, slices

SAVED_AT = 2
STEPS = 4
ONE, TWO = {"dp_shard": 1}, {"dp_shard": 2, "ep": 2}
ROWS = 7
"""Of an embedding that two ranks cannot share evenly."""


@dataclass(frozen=True)
class State:
    """What a rank has between two steps."""

    progress: Progress
    arrays: Slices
    """Weights and moments."""
    random: Tensor
    """The state of the random numbers."""
    updates: set[float]
    """How often the optimizer has updated each parameter."""


@dataclass(frozen=True)
class Ran:
    """What a rank did."""

    saved: State | None
    """When the checkpoint was taken."""
    begun: State
    """When the first step began."""
    ended: State
    rates: list[float]
    """The learning rate of each step."""
    samples: list[int]
    """The first sample of each step."""


def spec_of(
    folder: Path, data: dict[str, str], parallel: dict[str, int], checkpoint: dict[str, Any]
) -> JobSpec:
    """The tiny job on ``parallel`` axes."""
    return make_spec(
        folder,
        data=data,
        parallel=parallel,
        checkpoint=checkpoint,
        precision={"compute": "float16", "loss_scale": 64},
        schedule={"warmup_steps": 3},
        train={"steps": 8, "log_interval_steps": 2, "timeout_seconds": 60.0},
    )


def run(rank: int, spec: JobSpec, saves: bool) -> Ran:
    """Go on after the newest checkpoint up to step :data:`STEPS`; with ``saves``, save one."""
    runtime = start(spec.train.timeout_seconds)
    job = build_job(spec, runtime)
    progress = restore(job)
    training = Trainer(job, progress, NoCheckpoints())  # type: ignore[arg-type]
    torch.rand(rank + 1 if saves else 0)  # what a model with dropout would have drawn

    def state() -> State:
        updates = {float(of["step"]) for of in job.optimizer.state.values()}
        arrays = [piece for array in job.arrays() for piece in slices(array)]
        return State(training.progress, arrays, torch.get_rng_state(), updates)

    begun, saved, rates, samples = state(), None, list[float](), list[int]()
    while training.progress.step < STEPS:
        samples.append(training.progress.consumed_samples)
        training.step(False)  # type: ignore[arg-type]
        rates.append(job.optimizer.param_groups[0]["lr"])
        if saves and training.progress.step == SAVED_AT:
            saved = state()
            save_checkpoint(job, training.progress)
    ended = state()
    runtime.close()
    return Ran(saved, begun, ended, rates, samples)


def _embedding(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Embedding(ROWS, 6)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _learn(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> Tensor:
    for _ in range(steps):
        (model(torch.arange(ROWS)) * torch.arange(6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight: Tensor = model.weight.full_tensor().detach().clone()
    return weight


def resume_uneven(rank: int, root: str) -> tuple[Tensor, Tensor]:
    """An embedding after four steps: of a run, and of one that resumed it after two of them."""
    model, optimizer = _embedding(0)
    _learn(model, optimizer, 2)
    weights, moments = get_state_dict(model, optimizer)
    ckpt.save_state_dict(root, {"model": weights, "optim": moments}, step=2)
    wanted = _learn(model, optimizer, 2)
    model, optimizer = _embedding(1)
    weights, moments = get_state_dict(model, optimizer)
    ckpt.load_state_dict(root, {"model": weights, "optim": moments})
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return wanted, _learn(model, optimizer, 2)


def load_newest(rank: int, root: str) -> tuple[int, Tensor]:
    """Load from a folder of this rank's own, in which rank 0 has a newer step than rank 1."""
    state = {"w": torch.zeros(3)}
    return ckpt.load_state_dict(Path(root, f"node-{rank}"), state), state["w"]
