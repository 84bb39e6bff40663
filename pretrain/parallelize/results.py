"""What one forward and backward pass returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe import MoEAux, Stopwatch


@dataclass(frozen=True)
class Routing:
    """What the routers did with some tokens of this rank; it adds up."""

    tokens_per_expert_LE: Tensor
    """[L, E] int64."""
    entropy_sum_L: Tensor
    """[L] float64, the routers' entropies summed over the tokens."""
    moved_L2: Tensor
    """[L, 2] int64, assignments dropped and rerouted for want of room."""
    nonfinite_L: Tensor
    """[L] int64, tokens whose logits are not finite."""

    def plus(self, before: Routing | None) -> Routing:
        """This and what was before, or this alone."""
        if before is None:
            return self
        return Routing(
            self.tokens_per_expert_LE + before.tokens_per_expert_LE,
            self.entropy_sum_L + before.entropy_sum_L,
            self.moved_L2 + before.moved_L2,
            self.nonfinite_L + before.nonfinite_L,
        )

    def placed(self, rows: Tensor, num_layers: int) -> Routing:
        """Of all ``num_layers`` MoE layers, where this is of those that ``rows`` says, int64."""

        def spread(values: Tensor) -> Tensor:
            out = values.new_zeros((num_layers, *values.shape[1:]))
            return out.index_copy_(0, rows, values)

        return Routing(
            spread(self.tokens_per_expert_LE),
            spread(self.entropy_sum_L),
            spread(self.moved_L2),
            spread(self.nonfinite_L),
        )


def routing_of(reports: Sequence[MoEAux], tokens: int) -> Routing:
    """The reports of a forward of ``tokens`` tokens, one for each MoE layer and at least one."""
    return Routing(
        torch.stack([aux.tokens_per_expert_E for aux in reports]),
        tokens * torch.stack([aux.entropy for aux in reports]).double(),
        torch.stack([torch.stack([aux.num_dropped, aux.num_rerouted]) for aux in reports]),
        torch.stack([aux.num_nonfinite_tokens for aux in reports]),
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
