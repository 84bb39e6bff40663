"""Forward and backward of one step on one rank, up to the barrier.

Legend: B batch, S sequence, V vocab, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe import MoEAux, Stopwatch
from parallel import ShardLayout, local_shard, sequence_part, set_gradient_sync
from pretrain.model import DecoderOutput


@dataclass(frozen=True)
class Routing:
    """What the routers did with some tokens of this rank; it adds up."""

    tokens_per_expert_LE: Tensor
    """[L, E] int64."""
    entropy_sum_L: Tensor
    """[L] float64, the routers' entropies summed over the tokens."""
    moved_L2: Tensor
    """[L, 2] int64, assignments dropped and rerouted for want of room."""
    not_finite_L: Tensor
    """[L] int64, tokens whose logits are not finite."""

    def plus(self, before: Routing | None) -> Routing:
        """This and what was before, or this alone."""
        if before is None:
            return self
        return Routing(
            self.tokens_per_expert_LE + before.tokens_per_expert_LE,
            self.entropy_sum_L + before.entropy_sum_L,
            self.moved_L2 + before.moved_L2,
            self.not_finite_L + before.not_finite_L,
        )


def routing_of(reports: Sequence[MoEAux], tokens: int) -> Routing:
    """The reports of a forward of ``tokens`` tokens, one for each MoE layer and at least one."""
    return Routing(
        torch.stack([aux.tokens_per_expert_E for aux in reports]),
        tokens * torch.stack([aux.entropy for aux in reports]).double(),
        torch.stack([torch.stack([aux.num_dropped, aux.num_rerouted]) for aux in reports]),
        torch.stack([aux.num_not_finite for aux in reports]),
    )


@dataclass(frozen=True)
class Pass:
    """What one rank's micro-batches gave; gradients are in the parameters."""

    loss_sum: Tensor
    """Scalar float64: summed negative log-likelihood in nats."""
    target_tokens: int
    routing: Routing | None
    """None for a model without MoE layers."""
    stopwatches: tuple[Stopwatch, ...]
    """Of the experts, one for each layer and micro-batch."""

    @property
    def expert_rows(self) -> int:
        """Assignments that this rank's experts computed."""
        return int(sum(watch.rows for watch in self.stopwatches))

    @property
    def expert_seconds(self) -> float:
        """What they took in the forward."""
        return sum(watch.seconds() for watch in self.stopwatches)


def inputs_and_targets(batch: Tensor, cp_mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """[b, W + 1] token ids -> [b, S] each: this rank's part of the sequences, and what follows."""
    inputs_BS, targets_BS = batch[:, :-1], batch[:, 1:]
    if cp_mesh is None:
        return inputs_BS, targets_BS
    return sequence_part(inputs_BS, cp_mesh), sequence_part(targets_BS, cp_mesh)


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Summed negative log-likelihood in nats, float32; targets of -1 do not count."""
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=-1, reduction="sum"
    )


def forward_backward(
    model: nn.Module,
    micro_batches: Sequence[Tensor],
    planned_tokens: int,
    device: torch.device,
    reduce_once: bool = False,
    cp_mesh: DeviceMesh | None = None,
) -> Pass:
    """Accumulate the gradient of one step's loss.

    The loss is the sum over micro-batches of (negative log-likelihood + target tokens · auxiliary
    losses), divided by ``planned_tokens``: how sequences are spread over ranks does not enter, and
    gradients are summed over ranks. Auxiliary losses are each micro-batch's own, but for the
    load-balancing loss with the scope of a global batch, which counts the step's so far.

    Args:
        model: the laid-out decoder.
        micro_batches: [b, S + 1] token ids; as many on every rank, some perhaps empty.
        planned_tokens: target tokens of the step over all ranks.
        device: where the model is.
        reduce_once: reduce gradients after the last micro-batch alone, at the cost of holding them
            whole until then.
        cp_mesh: the ranks that have the same micro-batches, and take a part of each sequence.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    target_tokens = 0
    routing: Routing | None = None
    stopwatches: list[Stopwatch] = []
    counts: Sequence[Tensor] | None = None
    for turn, batch in enumerate(micro_batches):
        set_gradient_sync(model, not reduce_once or turn == len(micro_batches) - 1)
        batch = batch.to(device, non_blocking=True)
        inputs_BS, targets_BS = inputs_and_targets(batch, cp_mesh)
        out: DecoderOutput = model(inputs_BS, counts)
        counts = [aux.batch_counts_E for aux in out.aux]
        nll = next_token_loss(out.logits, targets_BS)
        tokens = targets_BS.numel()
        loss = nll
        for aux in out.aux:
            loss = loss + tokens * aux.loss
        (loss / planned_tokens).backward()
        loss_sum += nll.detach()
        target_tokens += tokens
        if out.aux:
            routing = routing_of(out.aux, tokens).plus(routing)
            stopwatches += [aux.stopwatch for aux in out.aux]
    return Pass(loss_sum, target_tokens, routing, tuple(stopwatches))


def grad_square_sum(model: nn.Module, layouts: dict[str, ShardLayout]) -> Tensor:
    """This rank's share of the squared global gradient norm, a float64 scalar.

    Summed over ranks it is the whole, on whatever meshes the parameters are: a slice that n ranks
    hold counts 1/n on each.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        by_copies.setdefault(layouts[name].num_replicas, []).append(local_shard(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for copies, grads in by_copies.items():
        norms = torch.stack(torch._foreach_norm(grads)).double()
        total += norms.square().sum() / copies
    return total


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply every gradient in place; exactly nothing for a factor of 1."""
    if factor != 1.0:
        grads = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(grads, factor)
