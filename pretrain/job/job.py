"""A run on one rank: model, optimizer, data and parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ckpt import LocalArray
from parallel import CompressedSum
from parallel.apply import begin_gradients
from parallel.crossing import check_sums, gate
from pretrain.data import Blend, Corpora, Loader, Sequences
from pretrain.errors import InputError
from pretrain.job.rank_model import RankModel
from pretrain.observe import Events
from pretrain.parallelize import (
    NO_MTP,
    MTPLoss,
    StepResult,
    forward_backward,
)
from pretrain.parts.capacity import CapacityBalance, CapacityPart
from pretrain.parts.step import Part, PartContext, Wish
from pretrain.state import Progress, residual_arrays, rng_arrays, training_arrays
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
        parts = (part for part in self.parts if isinstance(part, CapacityPart))
        return next((part.balance for part in parts), None)

    @property
    def evaluated_moe_layers(self) -> list[int]:
        """The numbers of the MoE layers that an evaluation computes: without multi-token
        prediction."""
        return [layer for layer in self.moe_layers if layer < self.spec.model.num_layers]

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

    def set_step_counts(self, counts_LE: Sequence[Sequence[int]] | Tensor) -> None:
        """Give routers the loads of the step before, [MoE layers, experts] over all ranks."""
        for row, router in zip(self.router_rows, self.routers, strict=True):
            router.set_step_counts(torch.as_tensor(counts_LE[row], device=self.runtime.device))

    def continue_step_counts(self, progress: Progress) -> Progress:
        """The progress of a checkpoint, whose loads the routers get where the loss of the next step
        counts them; without them elsewhere."""
        counts = progress.expert_counts
        if self.spec.moe is None or self.spec.moe.aux_loss_scope != "previous_step":
            return replace(progress, expert_counts=None)
        if counts is not None:
            self.set_step_counts(counts)
        return progress

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
        gate()
        divisor = planned_tokens / (loss_scale or 1.0)
        once = self.spec.parallel.memory.zero_stage == 1
        local_batch, device = self.local_batch, self.runtime.device
        exact, pipeline = self.parallel_model.exact, self.parallel_model.pipeline
        alone = partial(forward_backward, self.model)
        through = alone if pipeline is None else pipeline.forward_backward
        for stage in self.parallel_model.stages.values():
            begin_gradients(stage)
        if exact is not None:
            exact.begin()
        result = through(
            batches, divisor, device=device, local_batch=local_batch, reduce_once=once, mtp=mtp
        )
        check_sums()
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
        spec, local_batch = self.spec, self.local_batch
        layers, seq_len = spec.model.num_mtp_layers, spec.data.seq_len
        if not layers:
            return NO_MTP
        if local_batch.end_token is None and not local_batch.masked_targets:
            samples = planned_tokens // seq_len
            counts = [samples * max(seq_len - by, 0) for by in range(layers + 1)]
        else:
            # Before the backward: a layer's weight among the losses depends on its targets.
            mine = torch.zeros(layers + 1, dtype=torch.int64)
            if self.dims.reads_first:
                for batch in batches:
                    mine += torch.tensor(local_batch.count_all_targets(batch))
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

    def checkpoint_arrays(self) -> list[LocalArray]:
        """This rank's share of what a checkpoint holds, as it is now."""
        rng = rng_arrays(self.topology, self.runtime.rank, self.runtime.device)
        return [*self.arrays(), *self.residuals(), *rng]
