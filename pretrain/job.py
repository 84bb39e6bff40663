"""Everything that a run is made of, built from the spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ckpt import LocalArray
from cluster.members import EXCLUDE_LIST, exclude, node_name
from corpus.tokenizer import end_of_document, load_tokenizer
from parallel import CompressedSum, Topology
from pretrain.data import Blend, Corpora, Division, Loader, Sequences, open_corpora
from pretrain.errors import InputError
from pretrain.observe import Events, Notice
from pretrain.optim import Surroundings, build_optimizer
from pretrain.parallelize import (
    NO_MTP,
    MTPLoss,
    StepResult,
    forward_backward,
)
from pretrain.parts.capacity import CapacityBalance, CapacityPart
from pretrain.parts.rank_watch import OddLosses
from pretrain.parts.stragglers import StragglersPart
from pretrain.rank_model import RankModel, build_model
from pretrain.runtime import Runtime, starts_again_without_machine
from pretrain.spec import JobSpec
from pretrain.state import residual_arrays, training_arrays
from pretrain.step import Part, PartContext, Wish, named_part
from router import TopKRouter


@dataclass(frozen=True, kw_only=True)
class Job(RankModel):
    """A run on one rank: parallelized model, optimizer and data."""

    corpora: Corpora
    optimizer: torch.optim.Optimizer
    loader: Loader
    held_out: dict[str, Sequences]
    """The sequences that are scored, by set: what each source holds out, and ``[data.validation]``.
    """
    blend: Blend
    """The blend of the spec; the blend of the run, which may have had others, is the loader's."""
    parts: tuple[Part, ...]
    """The capabilities of a step, in the order in which they judge."""
    compressed: CompressedSum | None
    """Under gradient compression alone."""
    machines: tuple[str, ...]
    """The machine of each rank, as the exclude list names machines."""
    context: PartContext
    """What parts know of the run."""
    events: Events
    """Where this rank publishes what happens."""

    @property
    def moe_layers(self) -> list[int]:
        """The numbers of the layers that are MoE layers; those of multi-token prediction come after
        the last layer."""
        return [] if self.spec.moe is None else self.spec.model.moe_layers

    @property
    def routers(self) -> list[TopKRouter]:
        """The routers of those layers that are here, in order."""
        return [b.moe.router for b in self.model.blocks.values() if b.moe is not None]

    @property
    def router_rows(self) -> list[int]:
        """Which of the model's MoE layers have these routers."""
        here = self.model.blocks
        return [row for row, number in enumerate(self.moe_layers) if number in here]

    @property
    def balance(self) -> CapacityBalance | None:
        """Speeds and plans of straggler-aware capacity."""
        found = (part.balance for part in self.parts if isinstance(part, CapacityPart))
        return next(found, None)

    def act(self, wish: Wish) -> None:
        """Do what a part wishes for coming steps: capacity, division of micro-batches."""
        if wish.division is not None:
            self.loader.division = wish.division
        if wish.plans is not None:
            if self.balance is None:
                raise InputError(
                    "a part wishes for a plan of capacity, which needs moe.capacity.policy "
                    "straggler_aware"
                )
            self.balance.set_plans(wish.plans)
            self.balance.apply(self.routers, self.runtime.rank)

    def continue_blend(self, blend: Blend, cursor: int) -> None:
        """Draw the samples before ``cursor`` as another blend says, and later ones as the spec
        says."""
        self.set_blend(blend.continued(self.blend, cursor))

    def set_blend(self, blend: Blend) -> None:
        """Draw samples as a blend says, where the run has several sources or had others."""
        loader, seed = self.loader, self.spec.train.seed
        self.loader.blend = blend
        self.loader.order = self.corpora.order(blend, loader.sequences, seed)

    def forward_backward(
        self,
        batches: Sequence[Tensor],
        planned_tokens: int,
        loss_scale: float | None = None,
        mtp: MTPLoss = NO_MTP,
    ) -> StepResult:
        """Gradients of one step's loss, see :func:`pretrain.parallelize.micro_batches`, times
        ``loss_scale``, a power of two: that rounds nothing. ``mtp`` is what :meth:`mtp_loss` says
        of the step."""
        divisor = planned_tokens / (loss_scale or 1.0)
        once = self.spec.parallel.memory.zero_stage == 1
        local_batch, device = self.local_batch, self.runtime.device
        exact, pipeline = self.parallel_model.exact, self.parallel_model.pipeline
        alone = partial(forward_backward, self.model)
        through = alone if pipeline is None else pipeline.forward_backward
        if exact is not None:
            exact.begin()
        result = through(
            batches, divisor, device=device, local_batch=local_batch, reduce_once=once, mtp=mtp
        )
        if exact is not None:
            exact.finish()
        return result

    def mtp_loss(
        self, batches: Sequence[Tensor], planned_tokens: int, sample_index: int
    ) -> MTPLoss:
        """The losses of multi-token prediction in a step; every rank must call.

        Args:
            batches: this rank's micro-batches of the step.
            planned_tokens: target tokens of the step over all ranks, if all positions have one.
            sample_index: the first sample of the step.
        """
        spec, part = self.spec, self.local_batch
        layers, seq_len = spec.model.num_mtp_layers, spec.data.seq_len
        if not layers:
            return NO_MTP
        if part.end_token is None and not part.masked_targets:
            samples = planned_tokens // seq_len
            counts = [samples * max(seq_len - by, 0) for by in range(layers + 1)]
        else:
            # Before the backward: a layer's weight among the losses depends on its targets.
            mine = torch.zeros(layers + 1, dtype=torch.int64)
            if self.dims.reads_first:
                for batch in batches:
                    mine += torch.tensor(part.count_all_targets(batch))
            counts = self.runtime.sum_in_training(mine).tolist()
        return MTPLoss.of(spec.mtp.weight_at(sample_index * seq_len), counts)

    def arrays(self) -> list[LocalArray]:
        """Parameters and moments, as a checkpoint has them."""
        return training_arrays(
            self.parallel_model.meta_model,
            self.model,
            self.optimizer,
            self.layouts,
            self.runtime.rank,
        )

    def residuals(self) -> list[LocalArray]:
        """What compressed sums of gradients still owe."""
        owed = {} if self.compressed is None else self.compressed.residuals
        return residual_arrays(
            self.parallel_model.meta_model, owed, self.layouts, self.runtime.rank
        )


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
    corpora = runtime.together(lambda: open_corpora(spec.data, spec.model.vocab_size))
    train, held_out = runtime.together(
        lambda: (corpora.train_sequences(), corpora.held_out_sequences())
    )
    built = build_model(spec, runtime, topology, runtime.together(lambda: _end_token(spec)))
    topology, dims, parallel_model = built.topology, built.dims, built.parallel_model
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
    optimizer = build_optimizer(
        parallel_model.local_model,
        spec.optimizer,
        Surroundings(
            layouts=parallel_model.layouts,
            dims=dims,
            device=runtime.device,
            compute=spec.precision.compute,
            exact=spec.train.exact,
        ),
    )
    machines = tuple(runtime.gather_texts(node_name()))
    events = Events() if events is None else events
    context = _context(runtime, topology, events, spec.run_path, machines)
    how, compressed = spec.parallel.gradient_compression, None
    if how != "none":
        compressed = CompressedSum(parallel_model.local_model, dims.replicate_mesh.get_group(), how)
    job = Job(
        spec=spec,
        runtime=runtime,
        topology=topology,
        dims=dims,
        parallel_model=parallel_model,
        local_batch=built.local_batch,
        corpora=corpora,
        optimizer=optimizer,
        loader=loader,
        held_out=held_out,
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
                text = f"{machine} cannot be put on {path}: {error}"
                events.publish(Notice(step=0, text=text, problem=True))
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
