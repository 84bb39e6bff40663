"""Forward and backward of one step on one rank, up to the barrier.

Legend: B batch, S sequence, V vocab, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from moe import Stopwatch
from parallel import Documents, ParallelDims, sequence_part, set_gradient_sync
from pretrain.model import DecoderOutput
from pretrain.parallelize.results import Pass, Routing, routing_of


@dataclass(frozen=True)
class Part:
    """What of a micro-batch is a rank's: context-parallel ranks each take a part of every sequence,
    and the MoE layers of tensor-parallel ranks each see a part of that."""

    dims: ParallelDims | None = None
    end_token: int | None = None
    """The id that ends a document, where tokens attend to their own document alone."""

    def inputs_and_targets(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """[b, W + 1] token ids -> [b, S] each: what the model takes here, and what follows it."""
        inputs_BS, targets_BS = batch[:, :-1], batch[:, 1:]
        if self.dims is None:
            return inputs_BS, targets_BS
        mesh = self.dims.cp_mesh
        return sequence_part(inputs_BS, mesh), sequence_part(targets_BS, mesh)

    def documents(self, inputs_BW: Tensor) -> Documents | None:
        """Those of whole sequences, which every rank of a micro-batch finds alike; None where
        tokens attend to all before them."""
        return None if self.end_token is None else Documents.ended_by(self.end_token, inputs_BW)

    @property
    def tp_degree(self) -> int:
        """Ranks that compute the same logits together, and each see a part of their tokens."""
        return 1 if self.dims is None else self.dims.topology.tp

    @property
    def counts(self) -> bool:
        """Whether this rank is the one that counts a loss, of those that compute the same one."""
        return self.dims is None or self.dims.tp_mesh.get_local_rank() == 0

    def vocabulary_parallel(self) -> AbstractContextManager[None]:
        """Around the loss and its backward: logits cut along the vocabulary are never whole."""
        return nullcontext() if self.tp_degree == 1 else loss_parallel()


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Summed negative log-likelihood in nats, float32; targets of -1 do not count.

    Logits may be a DTensor cut along the vocabulary: all its ranks get the same sum.
    """
    if isinstance(logits_BSV, DTensor):
        # A DTensor without elements forgets in a flatten how it is cut.
        local_TV = logits_BSV.to_local().flatten(0, 1)
        logits_TV: Tensor = DTensor.from_local(local_TV, logits_BSV.device_mesh, (Shard(1),))
    else:
        logits_TV = logits_BSV.flatten(0, 1)
    loss = F.cross_entropy(
        logits_TV.float(), targets_BS.flatten(), ignore_index=-1, reduction="sum"
    )
    return loss.to_local() if isinstance(loss, DTensor) else loss


def forward_backward(
    model: nn.Module,
    micro_batches: Sequence[Tensor],
    divisor: float,
    device: torch.device,
    part: Part | None = None,
    reduce_once: bool = False,
) -> Pass:
    """Accumulate the gradient of one step's loss.

    The loss is the sum over micro-batches of (negative log-likelihood + target tokens · auxiliary
    losses), divided by ``divisor``: how sequences are spread over ranks does not enter, and
    gradients are summed over ranks. Auxiliary losses are each micro-batch's own, but for the
    load-balancing loss with the scope of a global batch, which counts the step's so far.

    Args:
        model: the laid-out decoder.
        micro_batches: [b, S + 1] token ids; as many on every rank, some perhaps empty.
        divisor: target tokens of the step over all ranks; over the loss scale, in float16.
        device: where the model is.
        part: what of the micro-batches is this rank's; all where None.
        reduce_once: reduce gradients after the last micro-batch alone, at the cost of holding them
            whole until then.
    """
    part = part or Part()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    target_tokens = 0
    routing: Routing | None = None
    stopwatches: list[Stopwatch] = []
    counts: Sequence[Tensor] | None = None
    for turn, batch in enumerate(micro_batches):
        set_gradient_sync(model, not reduce_once, last=turn == len(micro_batches) - 1)
        batch = batch.to(device, non_blocking=True)
        inputs_BS, targets_BS = part.inputs_and_targets(batch)
        routed = targets_BS.numel() // part.tp_degree
        with part.vocabulary_parallel():
            out: DecoderOutput = model(inputs_BS, counts, part.documents(batch[:, :-1]))
            nll = next_token_loss(out.logits, targets_BS)
            loss = nll
            for aux in out.aux:
                loss = loss + routed * aux.aux_loss
            (loss / divisor).backward()
        counts = [aux.expert_counts_E for aux in out.aux]
        if part.counts:
            loss_sum += nll.detach()
            target_tokens += targets_BS.numel()
        if out.aux:
            routing = routing_of(out.aux, routed).plus(routing)
            stopwatches += [aux.stopwatch for aux in out.aux]
    return Pass(loss_sum, target_tokens, routing, tuple(stopwatches))
