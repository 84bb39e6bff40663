"""Results of one forward and backward of a step.

Legend: L MoE layers, E experts, A auxiliary losses, K layers of multi-token prediction, M bins of
margins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe import MoEAux, Stopwatch
from parallel import all_reduce, on_loss_grid

AUX_LOSSES = ("load_balance", "sequence_balance", "z", "all")
"""The columns of ``RoutingStats.aux_loss_sum_LA``: three losses without their coefficients, and
their sum with coefficients, which is what the model's loss has."""


@dataclass(frozen=True)
class RoutingStats:
    """Sums over some tokens of this rank of what the routers did."""

    tokens_per_expert_LE: Tensor
    """[L, E] int64, routed tokens of each expert."""
    entropy_sum_L: Tensor
    """[L] float64, entropies in nats of the routers' probabilities, summed over tokens."""
    moved_L3: Tensor
    """[L, 3] int64, assignments that an expert at capacity dropped, and rerouted, and those that a
    copy of their expert computed."""
    nonfinite_L: Tensor
    """[L] int64, tokens with router logits that are not finite."""
    aux_loss_sum_LA: Tensor
    """[L, A] float64, the losses of :data:`AUX_LOSSES`: the first three summed over tokens, and the
    last over targets, as in the model's loss."""
    tokens_L: Tensor
    """[L] int64, the tokens that these sums are over."""
    margins_LEM: Tensor | None = None
    """[L, E, M] int64, the histograms of a balancing rule that moves biases by margins; None for
    other rules, and in evaluation."""

    @cached_property
    def everywhere_LE(self) -> Tensor:
        """[L, E] int64, ``tokens_per_expert_LE`` summed over all ranks of the run.

        The sum is made at the first use, by a collective: every rank must use it, or none.
        """
        return _summed_everywhere(self.tokens_per_expert_LE)

    @cached_property
    def margins_everywhere_LEM(self) -> Tensor:
        """[L, E, M] int64, ``margins_LEM`` summed over all ranks, as ``everywhere_LE``."""
        assert self.margins_LEM is not None
        return _summed_everywhere(self.margins_LEM)

    def plus(self, before: RoutingStats | None) -> RoutingStats:
        """The sum with ``before``, or self where ``before`` is None."""
        if before is None:
            return self
        return RoutingStats(
            self.tokens_per_expert_LE + before.tokens_per_expert_LE,
            self.entropy_sum_L + before.entropy_sum_L,
            self.moved_L3 + before.moved_L3,
            self.nonfinite_L + before.nonfinite_L,
            self.aux_loss_sum_LA + before.aux_loss_sum_LA,
            self.tokens_L + before.tokens_L,
            None if self.margins_LEM is None or before.margins_LEM is None
            else self.margins_LEM + before.margins_LEM,
        )  # fmt: skip

    def placed(self, rows: Tensor, num_layers: int) -> RoutingStats:
        """Stats of all ``num_layers`` MoE layers: zeros but at the int64 indices ``rows``."""

        def spread(values: Tensor) -> Tensor:
            out = values.new_zeros((num_layers, *values.shape[1:]))
            return out.index_copy_(0, rows, values)

        return RoutingStats(
            spread(self.tokens_per_expert_LE),
            spread(self.entropy_sum_L),
            spread(self.moved_L3),
            spread(self.nonfinite_L),
            spread(self.aux_loss_sum_LA),
            spread(self.tokens_L),
            None if self.margins_LEM is None else spread(self.margins_LEM),
        )


def _summed_everywhere(counts: Tensor) -> Tensor:
    counts = counts.clone()
    all_reduce(counts).wait()
    return counts


def routing_stats(
    reports: Sequence[MoEAux], tokens: int, loss_weight: float | None = None
) -> RoutingStats:
    """The stats of a forward of ``tokens`` tokens, from one report for each MoE layer (>= 1).

    ``loss_weight`` is what the model's loss multiplies auxiliary losses by; None for ``tokens``.
    """
    means_LA = losses_of(reports)
    weights_A = means_LA.new_full((len(AUX_LOSSES),), tokens)
    weights_A[-1].fill_(tokens if loss_weight is None else loss_weight)
    counts_LE = torch.stack([aux.tokens_per_expert_E for aux in reports])
    margins = [aux.margins_EM for aux in reports if aux.margins_EM is not None]
    return RoutingStats(
        counts_LE,
        on_loss_grid(tokens * torch.stack([aux.entropy for aux in reports]).double()),
        torch.stack([torch.stack([a.num_dropped, a.num_rerouted, a.num_copied]) for a in reports]),
        torch.stack([aux.num_nonfinite_tokens for aux in reports]),
        on_loss_grid(weights_A * means_LA),
        counts_LE.new_full((len(reports),), tokens),
        torch.stack(margins) if margins else None,
    )


def losses_of(reports: Sequence[MoEAux]) -> Tensor:
    """[L, A] float64: the losses of :data:`AUX_LOSSES`, means over the tokens of a forward."""
    losses = torch.stack(
        [
            loss
            for aux in reports
            for loss in (
                aux.load_balance_loss, aux.sequence_balance_loss, aux.z_loss, aux.aux_loss
            )
        ]
    )  # fmt: skip
    return losses.detach().double().view(len(reports), len(AUX_LOSSES))


@dataclass(frozen=True)
class StepResult:
    """The losses and stats of one rank's micro-batches; the parameters hold the gradients."""

    loss_sum: Tensor
    """Scalar float64: summed negative log-likelihood in nats; 0 on ranks that do not own the
    loss."""
    target_tokens: int
    """Target tokens of ``loss_sum``."""
    routing: RoutingStats | None
    """None for a model without MoE layers."""
    stopwatches: tuple[Stopwatch, ...]
    """Times of the experts, one for each MoE layer and micro-batch."""
    mtp_loss_sums_K: Tensor
    """[K] float64: as ``loss_sum``, of each layer of multi-token prediction."""

    @property
    def expert_rows(self) -> int:
        """Assignments that this rank's experts computed."""
        return int(sum(watch.rows for watch in self.stopwatches))

    @property
    def expert_seconds(self) -> float:
        """Seconds of this rank's experts in the forward."""
        return sum(watch.seconds() for watch in self.stopwatches)
