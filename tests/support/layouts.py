"""A run laid out over real ranks, put together again to be held against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt import LocalArray
from parallel import Topology, local_shard, parse_topology
from parallel.layout import Box, box_shape
from pretrain.checkpoint.resume import restore
from pretrain.job import Job, build_job
from pretrain.model.decoder import meta_decoder
from pretrain.observe import Digested, Events
from pretrain.parallelize.decoder import decoder_layouts
from pretrain.parallelize.stages import stage_layers
from pretrain.parts.step import Action
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.state.arrays import _stack
from pretrain.state.progress import Progress
from pretrain.train import trainer
from tests.support.jobs import make_spec, save_checkpoint
from tests.support.ranks import run_ranks

Slices = list[tuple[str, tuple[int, ...], Box, Tensor]]
"""Names, logical shapes, and what of each is on this rank."""


@dataclass(frozen=True)
class Trained:
    """What a run was, whole."""

    losses: list[float]
    """Of every step."""
    norms: list[float]
    """Of every step's gradients."""
    gradients: dict[str, Tensor]
    """Of the first step, before they are clipped."""
    state: dict[str, Tensor]
    """Parameters, buffers and moments, by their checkpoint's names."""
    saved: dict[str, Tensor]
    """The same when a checkpoint was taken, if one was."""
    attempts: list[Attempt]
    """Steps that were skipped too."""
    progress: Progress
    digests: list[Digested] = field(default_factory=list)
    """Of an exact run, of every step."""
    mtp_losses: list[float] | None = None
    """Of multi-token prediction, means over all steps."""


class Attempt(NamedTuple):
    """One call of the training step, as every rank has it."""

    samples: int
    """The first sample that it used."""
    outcome: str
    """``commit``, or the reason of a skip."""
    loss_scale: float | None
    loss: float


def spec_for(folder: Path, data: dict[str, str], layout: str, **sections: Any) -> JobSpec:
    """The tiny job with ``layout`` as parse_topology reads it, to be saved under ``folder``; after
    a space it may have a schedule of two stages on a rank."""
    degrees, _, schedule = (layout or "dp_shard=1").partition(" ")
    parallel = topology_of(degrees).as_dict() | sections.pop("parallel", {})
    if schedule:
        parallel |= {"pipeline": {"schedule": schedule, "stages_per_rank": 2}}
    return make_spec(folder, data={**data, **sections.pop("data", {})}, parallel=parallel,
                     **sections)  # fmt: skip


def topology_of(layout: str) -> Topology:
    """The degrees of a layout as :func:`spec_for` reads it."""
    return parse_topology(layout.partition(" ")[0])


def train(
    spec: JobSpec,
    steps: int,
    save_at: int = 0,
    loss_scale: float | None = None,
    first: Callable[[], None] = int,
) -> Trained:
    """``steps`` committed steps on as many ranks as the spec's layout has, from its newest
    checkpoint; with ``save_at``, one is taken after so many of them, and with ``loss_scale`` the
    loss is scaled, whatever the precision. Every rank calls ``first`` before anything else."""
    run = partial(_on_rank, spec, steps, save_at, loss_scale, first)
    results = run_ranks(run, _world(spec), group=False)
    figures = [result[0] for result in results]
    assert all(each == figures[0] for each in figures), "ranks know different losses"
    losses, norms = (list(values) for values in zip(*figures[0], strict=True))
    states = (whole([result[i] for result in results]) for i in (1, 2, 3))
    attempts, progress, digests, mtp_losses = results[0][4:]
    assert all(result[4] == attempts for result in results), "ranks decide differently"
    return Trained(losses, norms, *states, attempts, progress, digests, mtp_losses)


def _world(spec: JobSpec) -> int:
    p = spec.parallel
    return p.pp * p.dp_replicate * p.dp_shard * p.cp * p.tp


def _on_rank(
    spec: JobSpec,
    steps: int,
    save_at: int,
    loss_scale: float | None,
    first: Callable[[], None],
    rank: int,
) -> tuple[Any, ...]:
    first()
    if spec.train.compile:
        warnings.simplefilter("default")  # torch warns of itself while it compiles
    runtime = start(spec.train.timeout_seconds)
    published: list[Any] = []
    job = build_job(spec, runtime, Events(published.append))
    progress = restore(job)
    if loss_scale is not None:
        progress = replace(progress, loss_scale=loss_scale)
    training = trainer.Trainer(job, progress, NoCheckpoints())
    gradients: Slices = []
    scale = trainer.scale_gradients

    def scale_and_keep(model: Any, factor: float) -> None:
        if not gradients:
            gradients.extend(_gradients(job, training.progress.loss_scale or 1.0))
        scale(model, factor)

    trainer.scale_gradients = scale_and_keep
    figures, saved, attempts = [], [], []
    while len(figures) < steps:
        samples = training.progress.consumed_samples
        decision = training.step(False)
        committed = decision.action is Action.COMMIT
        outcome = "commit" if committed else decision.reason
        attempts.append(Attempt(samples, outcome, decision.loss_scale, decision.loss))
        if committed:
            figures.append((decision.loss, decision.grad_norm))
        if committed and len(figures) == save_at:
            save_checkpoint(job, training.progress)
            saved = _state(job)
    state = _state(job)
    mtp_losses = training.interval.mtp_losses(runtime)
    runtime.close()
    digests = [event for event in published if isinstance(event, Digested)]
    return figures, gradients, state, saved, attempts, training.progress, digests, mtp_losses


def _state(job: Job) -> Slices:
    return [piece for array in job.arrays() for piece in slices(array)]


def slices(array: LocalArray) -> Slices:
    """What a rank has of an array."""
    found: Slices = []
    pieces = iter(array.pieces)
    for box in array.boxes:
        value = next(pieces)
        if array.stacked:
            value = torch.stack([value, *(next(pieces) for _ in range(1, box[0][1] - box[0][0]))])
        found.append((array.spec.name, array.spec.shape, box, value.clone()))
    return found


def _gradients(job: Job, scale: float) -> Slices:
    return [
        (name, job.layouts[name].shape, job.layouts[name].box(job.runtime.rank),
         local_shard(parameter.grad) / scale)
        for name, parameter in job.model.named_parameters() if parameter.requires_grad
    ]  # fmt: skip


def empty_arrays(spec: JobSpec, topology: Topology, rank: int) -> list[LocalArray]:
    """Room for what a rank of a topology has of the training state, without any process group."""
    p, decoder = spec.parallel, meta_decoder(spec.model, spec.moe)
    stages = stage_layers(
        spec.model, spec.moe, seq_len=spec.data.seq_len, pp=p.pp,
        stages_per_rank=p.pipeline.stages_per_rank, schedule=p.pipeline.schedule,
    )  # fmt: skip
    layouts = decoder_layouts(decoder, stages, topology, p.pipeline.schedule, spec.train.exact)
    tensors = dict(chain(decoder.named_parameters(), decoder.named_buffers()))
    parameters = dict(decoder.named_parameters())

    def here(names: dict[str, Tensor]) -> dict[str, Tensor]:
        boxes = {name: layouts[name].boxes(rank) for name in names}
        return {
            name: torch.full(box_shape(box[0]), torch.nan)
            for name, box in boxes.items() if box
        }  # fmt: skip

    groups = {"model": tensors, "optimizer/exp_avg": parameters, "optimizer/exp_avg_sq": parameters}
    return [
        array
        for prefix, names in groups.items()
        for array in _stack(prefix, names, here(names), layouts, rank)
    ]


def whole(ranks: list[Slices]) -> dict[str, Tensor]:
    """Every rank's slices, together; where several have the same they must be the same bits."""
    values: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for found in ranks:
        for name, shape, box, local in found:
            if name not in values:
                values[name] = torch.zeros(shape, dtype=local.dtype)
                seen[name] = torch.zeros(shape, dtype=torch.bool)
            at = tuple(slice(*extent) for extent in box)
            assert values[name][at].shape == local.shape, (name, box, local.shape)
            again = seen[name][at]
            assert torch.equal(values[name][at][again], local[again]), f"copies of {name} differ"
            values[name][at], seen[name][at] = local, torch.ones_like(again)
    for name, where in seen.items():
        assert where.all(), f"nobody has all of {name}"
    return values


class NoCheckpoints:
    """In the place of a checkpointer: a run that saves nothing by itself."""

    requested = False

    def way_back(self) -> str:
        return "nothing was saved"


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of norms; absolute where there is nothing expected."""
    error = (actual.double() - expected.double()).norm()
    return float(error / expected.double().norm().clamp_min(1e-12))


def check_gradients(trained: Trained, alone: Trained) -> None:
    """Every parameter's, of the first step."""
    for name, expected in alone.gradients.items():
        error = relative_error(trained.gradients[name], expected)
        assert error <= 1e-5, f"gradient of {name}: {error}"


def bits_that_differ(trained: Trained, alone: Trained) -> list[str]:
    """What of a run has other bits than one process: figures, gradients, parameters, moments."""
    found = [
        f"{what} {getattr(trained, what)}, alone {getattr(alone, what)}"
        for what in ("losses", "norms", "digests")
        if getattr(trained, what) != getattr(alone, what)
    ]
    for what in ("gradients", "state"):
        here, there = getattr(trained, what), getattr(alone, what)
        assert here.keys() == there.keys()
        for name, value in here.items():
            different = int((_bits(value) != _bits(there[name])).sum())
            if different:
                found.append(f"{what} of {name}: {different} of {value.numel()}")
    return found


def _bits(x: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])
