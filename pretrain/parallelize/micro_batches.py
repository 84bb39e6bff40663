"""Forward and backward of one step on one rank.

Legend: B batch, S tokens of a sequence on this rank, W tokens of the full sequence, V vocab, E
experts, K layers of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from moe import Stopwatch
from parallel import (
    Documents,
    ParallelDims,
    local_sequence,
    on_loss_grid,
    set_gradient_sync,
)
from parallel.apply import ExactSequence
from pretrain.model import DecoderOutput
from pretrain.parallelize.loss import next_token_loss
from pretrain.parallelize.mtp import NO_MTP, MTPLoss, shifted
from pretrain.parallelize.results import RoutingStats, StepResult, routing_stats


class RoutedTokens(NamedTuple):
    """The tokens of a micro-batch that the MoE layers of one rank route."""

    token_mask_BS: Tensor | None
    """[B, S / tp] bool, true for a token; None where all are tokens."""
    tokens: int
    """How many."""
    loss_weight: float
    """What the mean of an auxiliary loss over these tokens is multiplied by: the targets of the
    micro-batch, times this rank's part of the micro-batch's tokens."""
    counted_weight: float
    """The same for sums over ranks of what was computed. Under exact sums every rank computes the
    losses of the whole micro-batch, with a gradient for its own tokens, and one counts them."""

    def mask_on(self, device: torch.device) -> Tensor | None:
        """``token_mask_BS`` on a device."""
        mask = self.token_mask_BS
        return None if mask is None else mask.to(device, non_blocking=True)


@dataclass(frozen=True)
class LocalBatch:
    """This rank's part of a micro-batch.

    A context-parallel rank takes a part of every sequence; a MoE layer on a tensor-parallel rank
    takes a part of those tokens. In an exact run both kinds of ranks take parts of sequences.
    """

    dims: ParallelDims | None = None
    end_token: int | None = None
    """The id that ends a document; None where tokens attend across documents."""
    masked_targets: bool = False
    """Whether some tokens of training batches are no targets."""
    num_mtp_layers: int = 0
    """Layers of multi-token prediction that training computes."""
    exact: bool = False
    """Whether ranks that share a sequence compute numbers with the bits of one rank."""

    @cached_property
    def sequence(self) -> ExactSequence | None:
        """The ranks that share a sequence, where numbers have the bits of one rank."""
        if self.dims is None or not self.exact or self.dims.token_mesh.size() == 1:
            return None
        return ExactSequence(self.dims.token_mesh.get_group())

    def next_token_loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """See :func:`pretrain.parallelize.loss.next_token_loss`."""
        return next_token_loss(logits_BSV, targets_BS, self.sequence)

    def inputs_and_targets(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """[B, W + 1] token ids -> [B, S] each: this rank's inputs, and the next token of each.

        A negative number is the complement of a token that is no target: the target is then -1.
        Padding is -1, which is 0 as an input.
        """
        return self._split(batch, self.masked_targets)

    def training_inputs(self, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, W + 1] token ids -> [(1 + K) · B, S]: this rank's inputs, and then those of each
        layer of multi-token prediction, as :class:`pretrain.model.Decoder` takes them; and 1 + K
        times [B, S]: their targets. A target of -1 does not count."""
        inputs_BS, targets_BS = self.inputs_and_targets(batch)
        later = range(1, self.num_mtp_layers + 1)
        pairs = [self._split(shifted(batch, by, self.end_token), True) for by in later]
        if not pairs:
            return inputs_BS, [targets_BS]
        inputs = torch.cat((inputs_BS, *(each for each, _ in pairs)))
        return inputs, [targets_BS, *(each for _, each in pairs)]

    def count_all_targets(self, batch: Tensor) -> list[int]:
        """The targets that count of the full sequences: of the next token, then of each layer of
        multi-token prediction."""
        alone = replace(self, dims=None)
        return [int((each >= 0).sum()) for each in alone.training_inputs(batch)[1]]

    def _split(self, batch: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
        inputs_BS, targets_BS = batch[:, :-1], batch[:, 1:]
        if masked:
            inputs_BS = torch.where(inputs_BS < 0, ~inputs_BS, inputs_BS)
            targets_BS = targets_BS.clamp_min(-1)
        if self.dims is None:
            return inputs_BS, targets_BS
        mesh = self.dims.token_mesh if self.exact else self.dims.cp_mesh
        return local_sequence(inputs_BS, mesh), local_sequence(targets_BS, mesh)

    def documents(self, inputs_BW: Tensor) -> Documents | None:
        """The documents of the full sequences [B, W], equal on all ranks of a micro-batch; None
        where tokens attend across documents."""
        if self.end_token is None:
            return None
        if self.masked_targets:
            # Padding stays what it is: as a token it could be the end token.
            inputs_BW = torch.where(inputs_BW < -1, ~inputs_BW, inputs_BW)
        return Documents.ended_by(self.end_token, inputs_BW)

    def routed_tokens(self, batch: Tensor) -> RoutedTokens:
        """What the MoE layers of this rank route of [B, W + 1] token ids on the host.

        Padding is no token: the places of a sequence after which no other token comes. All ranks
        that share the micro-batch have a mask, or none has.
        """
        inputs_BW, targets_BW = batch[:, :-1], batch[:, 1:]
        targets = int((targets_BW >= 0).sum()) if self.masked_targets else targets_BW.numel()
        mask_BW: Tensor | None = None
        if bool((batch[:, -1] == -1).any()):
            # A token 0 that is no target is -1 too: only the end of a sequence is padding.
            mask_BW = (batch != -1).flip(1).cumsum(1).flip(1)[:, :-1] > 0
            mask_BW = None if bool(mask_BW.all()) else mask_BW
        tokens = inputs_BW.numel() if mask_BW is None else int(mask_BW.sum())
        if self.dims is not None and self.exact:
            mask_BS = None if mask_BW is None else local_sequence(mask_BW, self.dims.token_mesh)
            counts = int(self.owns_loss)
            return RoutedTokens(mask_BS, counts * tokens, targets, counts * targets)
        mask_BS, parts = mask_BW, 1
        if self.dims is not None:
            parts = self.dims.cp_mesh.size() * self.tp_degree
            if mask_BW is not None:
                mask_BS = local_sequence(mask_BW, self.dims.cp_mesh)
                mask_BS = mask_BS.chunk(self.tp_degree, 1)[self.dims.tp_mesh.get_local_rank()]
        own_tokens = tokens // parts if mask_BS is None else int(mask_BS.sum())
        weight = own_tokens * targets / max(tokens, 1)
        return RoutedTokens(mask_BS, own_tokens, weight, weight)

    def counted_targets(self, batch: Tensor, targets_BS: Tensor) -> Tensor:
        """The targets that a rank that :attr:`owns_loss` counts: those of
        :meth:`inputs_and_targets`, or of the full sequences, as the loss is."""
        return targets_BS if self.sequence is None else batch[:, 1:].clamp_min(-1)

    def count_targets(self, batch: Tensor, targets_BS: Tensor) -> int:
        """How many of :meth:`counted_targets` count."""
        counted = self.counted_targets(batch, targets_BS)
        return int((counted >= 0).sum()) if self.masked_targets else counted.numel()

    @property
    def tp_degree(self) -> int:
        """The number of ranks that share the tokens of ``inputs_and_targets``."""
        return 1 if self.dims is None or self.exact else self.dims.topology.tp

    @property
    def owns_loss(self) -> bool:
        """Whether this rank adds its loss to sums over ranks: one of those that all compute the
        same loss, as the ranks of a tp group do."""
        if self.sequence is not None:
            return self.sequence.is_first
        return self.tp_degree == 1 or self.dims is None or self.dims.tp_mesh.get_local_rank() == 0

    def vocabulary_parallel(self) -> AbstractContextManager[None]:
        """A context for the loss and its backward with logits sharded along the vocabulary."""
        return nullcontext() if self.tp_degree == 1 else loss_parallel()


def depth_of(local_batch: LocalBatch) -> tuple[int, ...]:
    """The decoder's argument for multi-token prediction; none where there is none."""
    return (local_batch.num_mtp_layers,) if local_batch.num_mtp_layers else ()


def mask_of(routed: RoutedTokens, device: torch.device) -> dict[str, Tensor]:
    """The decoder's argument for a mask of tokens; none where all are tokens."""
    mask_BS = routed.mask_on(device)
    return {} if mask_BS is None else {"token_mask": mask_BS}


def mtp_losses(
    out: DecoderOutput, targets: Sequence[Tensor], local_batch: LocalBatch
) -> list[Tensor]:
    """The summed loss of each layer of multi-token prediction."""
    pairs = zip(out.mtp_logits, targets, strict=True)
    return [local_batch.next_token_loss(*pair) for pair in pairs]


def summed_mtp_losses(losses: Sequence[Tensor], like: Tensor) -> Tensor:
    """[K] float64: losses whose sums over micro-batches and ranks have equal bits in any order."""
    return torch.stack([on_loss_grid(each.detach()) for each in losses]) if losses else like * 0


def forward_backward(
    model: nn.Module,
    micro_batches: Sequence[Tensor],
    divisor: float,
    *,
    device: torch.device,
    local_batch: LocalBatch | None = None,
    reduce_once: bool = False,
    mtp: MTPLoss = NO_MTP,
) -> StepResult:
    """Accumulate the gradient of one step's loss.

    The loss is the sum over micro-batches of (negative log-likelihood + target tokens · auxiliary
    losses), divided by ``divisor``. Gradients are summed over ranks, so that the loss does not
    depend on the layout. Each micro-batch has its own auxiliary losses; but the load-balancing loss
    with the scope ``global_batch`` counts the step's micro-batches so far.

    Args:
        model: the parallelized decoder.
        micro_batches: [B, W + 1] token ids; some may be empty. Ranks that share
            parameters or experts have equally many.
        divisor: target tokens of the step over all ranks; in float16 divided by the loss scale.
        device: the model's device.
        local_batch: this rank's part of the micro-batches; all where None.
        reduce_once: reduce gradients after the last micro-batch only; each rank then holds
            unsharded gradients during the step.
        mtp: the losses of multi-token prediction, where ``local_batch`` has such layers.
    """
    local_batch = local_batch or LocalBatch()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    mtp_loss_sums_K = loss_sum.new_zeros(len(mtp.weights))
    target_tokens = 0
    routing: RoutingStats | None = None
    stopwatches: list[Stopwatch] = []
    counts: Sequence[Tensor] | None = None
    for turn, batch in enumerate(micro_batches):
        set_gradient_sync(model, sync=not reduce_once, last=turn == len(micro_batches) - 1)
        routed = local_batch.routed_tokens(batch)
        batch = batch.to(device, non_blocking=True)
        inputs_BS, (targets_BS, *later) = local_batch.training_inputs(batch)
        with local_batch.vocabulary_parallel():
            documents = local_batch.documents(batch[:, :-1])
            out: DecoderOutput = model(
                inputs_BS,
                counts,
                documents,
                *depth_of(local_batch),
                **mask_of(routed, device),
            )
            nll = local_batch.next_token_loss(out.logits, targets_BS)
            # As a pipeline's stages do it: in float32 another order of the factors is another loss.
            loss = nll / divisor
            mtp_nlls = mtp_losses(out, later, local_batch)
            for mtp_nll, weight in zip(mtp_nlls, mtp.weights, strict=True):
                loss = loss + weight / divisor * mtp_nll
            for aux in out.aux:
                loss = loss + routed.loss_weight / divisor * aux.aux_loss
            loss.backward()
        counts = [aux.expert_counts_E for aux in out.aux]
        if local_batch.owns_loss:
            loss_sum += on_loss_grid(nll.detach())
            mtp_loss_sums_K += summed_mtp_losses(mtp_nlls, like=mtp_loss_sums_K)
            target_tokens += local_batch.count_targets(batch, targets_BS)
        if out.aux:
            stats = routing_stats(out.aux, routed.tokens, routed.counted_weight)
            routing = stats.plus(routing)
            stopwatches += [aux.stopwatch for aux in out.aux if aux.stopwatch is not None]
    return StepResult(loss_sum, target_tokens, routing, tuple(stopwatches), mtp_loss_sums_K)
