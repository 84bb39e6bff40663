"""A job of a spec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cluster.members import EXCLUDE_LIST, exclude, node_name
from corpus.tokenizer import end_of_document, load_tokenizer
from parallel import CompressedSum, Topology
from pretrain.data import Corpora, Division, Loader, Sequences, open_corpora
from pretrain.errors import InputError
from pretrain.job.job import Job
from pretrain.job.rank_model import RankModel, build_model
from pretrain.observe import Events
from pretrain.optim import Surroundings, build_optimizer
from pretrain.parts.capacity import CapacityPart
from pretrain.parts.rank_watch import OddLosses
from pretrain.parts.step import Part, PartContext, named_part
from pretrain.parts.stragglers import StragglersPart
from pretrain.runtime import Runtime, starts_again_without_machine
from pretrain.spec import JobSpec


@dataclass(frozen=True)
class Built:
    """What a process builds once, whatever replicas come and leave."""

    model: RankModel
    optimizer: torch.optim.Optimizer
    corpora: Corpora
    train: Sequences
    held_out: dict[str, Sequences]


def build_job(
    spec: JobSpec,
    runtime: Runtime,
    events: Events | None = None,
    topology: Topology | None = None,
) -> Job:
    """Build on this rank; the corpus must be prepared. :func:`restore` gives the parameters values.

    Without ``topology`` the layout is that of ``[parallel]``.

    Raises InputError where the corpus is not the spec's, or the layer has no path for its sizes.
    """
    built = build(spec, runtime, topology)
    return assemble(built, runtime, built.model.topology, events)


def build(spec: JobSpec, runtime: Runtime, topology: Topology | None = None) -> Built:
    """Build what a process keeps; see :func:`build_job`."""
    corpora = runtime.together(lambda: open_corpora(spec.data, spec.model.vocab_size))
    train, held_out = runtime.together(
        lambda: (corpora.train_sequences(), corpora.held_out_sequences())
    )
    model = build_model(spec, runtime, topology, runtime.together(lambda: _end_token(spec)))
    optimizer = build_optimizer(
        model.parallel_model.local_model,
        spec.optimizer,
        Surroundings(
            layouts=model.layouts,
            dims=model.dims,
            device=runtime.device,
            compute=spec.precision.compute,
            exact=spec.train.exact,
        ),
    )
    return Built(model, optimizer, corpora, train, held_out)


def assemble(
    built: Built, runtime: Runtime, topology: Topology, events: Events | None = None
) -> Job:
    """The job of what was built, on ``topology``, which may have another number of replicas than
    the model was built with; every rank must call."""
    spec, corpora, train, optimizer = built.model.spec, built.corpora, built.train, built.optimizer
    dims = replace(built.model.dims, topology=topology)
    layouts = {
        name: replace(layout, topology=topology) for name, layout in built.model.layouts.items()
    }
    parallel_model = replace(built.model.parallel_model, layouts=layouts)
    loader = Loader(
        train,
        corpora.order(corpora.blend(), train, spec.train.seed),
        partial(spec.batch.size_at, seq_len=spec.data.seq_len),
        spec.batch.micro_batch_size,
        dims.dp_rank,
        dims.dp_size,
        pin_memory=runtime.device.type == "cuda",
    )
    loader.blend = corpora.blend()
    loader.division = _division(spec, topology)
    machines = tuple(runtime.gather_texts(node_name()))
    events = Events() if events is None else events
    context = _context(runtime, topology, events, spec.run_path, machines)
    how, compressed = spec.parallel.gradient_compression, None
    if how != "none":
        compressed = CompressedSum(parallel_model.local_model, dims.replicate_group, how)
    job = Job(
        spec=spec,
        runtime=runtime,
        topology=topology,
        dims=dims,
        parallel_model=parallel_model,
        local_batch=replace(built.model.local_batch, dims=dims),
        corpora=corpora,
        optimizer=optimizer,
        loader=loader,
        held_out=built.held_out,
        blend=corpora.blend(),
        parts=_parts(spec, runtime, context, loader.division),
        compressed=compressed,
        machines=machines,
        context=context,
        events=events,
    )
    for router in job.routers:
        router.balance_group = dims.stage_mesh.get_group()
    return job


def _end_token(spec: JobSpec) -> int | None:
    if not spec.data.document_mask:
        return None
    return end_of_document(load_tokenizer(spec.data), spec.data.end_token)


def _division(spec: JobSpec, topology: Topology) -> Division:
    """Equal parts; ranks that share parameters or exchange tokens wait for each other in every
    micro-batch."""
    counts_all = spec.moe is not None and spec.moe.aux_loss_scope == "global_batch"
    return Division(
        topology.dp_replicate * topology.dp_shard,
        lockstep=topology.dp_shard > 1 or counts_all,
    )


def _parts(
    spec: JobSpec, runtime: Runtime, context: PartContext, division: Division
) -> tuple[Part, ...]:
    """The parts of a run: those of Convoy, then those that ``train.parts`` names."""
    capacity = runtime.together(lambda: CapacityPart.of_spec(spec, context))
    stragglers = StragglersPart.of_spec(
        spec,
        context,
        timed=runtime.device.type != "cuda" or runtime.comm_monitor.time_cuda,
        division=division,
        capacity_follows_speed=capacity is not None,
    )
    own: list[Part] = [OddLosses(context), *([] if capacity is None else [capacity]), stragglers]
    others = runtime.together(lambda: [named_part(kind)(context) for kind in spec.train.parts])
    parts = (*own, *others)
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise InputError(f"train.parts must have a name each, and these are {', '.join(names)}")
    return parts


def _context(
    runtime: Runtime, topology: Topology, events: Events, run_path: Path, machines: tuple[str, ...]
) -> PartContext:
    def exclude_machine(machine: str, why: str) -> bool:
        def write() -> int:
            path = run_path / EXCLUDE_LIST
            try:
                exclude(path, machine, why)
            except (OSError, ValueError) as error:
                events.note(f"{machine} cannot be put on {path}: {error}", problem=True)
                return 0
            return 1

        return bool(runtime.from_first(write))

    return PartContext(
        rank=runtime.rank,
        topology=topology,
        device=runtime.device,
        publish=events.publish,
        machines=machines,
        exclude=exclude_machine,
        goes_on_without=lambda left: bool(
            runtime.from_first(lambda: int(starts_again_without_machine(left)))
        ),
    )
