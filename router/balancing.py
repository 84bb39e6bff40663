"""What keeps experts evenly loaded: a loss, or a step of a bias for each expert.

Legend: T tokens, E experts, K top_k, M bins of margins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from router import kernels
from router.config import BALANCING, BALANCINGS, BalancingTraits, RouterConfig
from router.losses import load_balance_loss, mean_over_tokens, sequence_balance_loss, z_loss


class RoutedTokens(NamedTuple):
    """What a loss may depend on, of one call."""

    logits_TE: Tensor
    """With gradients, as ``probs_TE``."""
    probs_TE: Tensor
    """The scores of a token, scaled to a sum of 1."""
    expert_indices_TK: Tensor
    """The chosen experts before capacity; E, which is no expert, for padding."""
    tokens_per_expert_E: Tensor
    """[E] int64: how many tokens of this call chose each expert."""
    expert_counts_E: Tensor
    """[E] int64: the same of the tokens that ``aux_loss_scope`` names."""
    token_mask_T: Tensor | None
    """[T] bool, false for padding, whose logits may be anything; None where all are tokens."""
    seq_len: int | None
    """Tokens of each sequence, a divisor of T; None for one sequence."""
    token_group: dist.ProcessGroup | None
    """The ranks that have equal parts of the same sequences."""
    logsumexp_T: Tensor | None = None
    """[T] of the logits, with gradients, where the choice computed them; None elsewhere."""


class Losses(NamedTuple):
    """Scalar losses of a call; the first three without coefficients, for metrics."""

    load_balance: Tensor
    sequence_balance: Tensor
    z: Tensor
    total: Tensor
    """What the model's loss gets."""


class Balancing(ABC):
    """A rule that balances experts.

    ``moe.balancing`` names a rule: by its line in :data:`router.config.BALANCINGS`, or as
    ``package.module:Class``. Each passes :class:`router.testing.BalancingContract`. A rule that
    replaces one of the two steps derives from :class:`StandardBalancing`.
    """

    traits: ClassVar[BalancingTraits] = BalancingTraits()

    def __init__(self, config: RouterConfig) -> None:
        self.config = config

    @abstractmethod
    def losses(self, tokens: RoutedTokens) -> Losses:
        """The losses of one call, in the dtype of the logits; of no tokens they are 0.

        Several ranks that share sequences must all call collectives, or none.
        """

    def margins(self, preferences_TE: Tensor, token_mask_T: Tensor | None) -> Tensor:
        """[E, M] int64, without a gradient: a histogram of one call in training.

        M is ``margin_bins`` of the traits; a rule with such bins must have this method, and of
        others it is not called. :meth:`bias_change` gets the sum over a step's calls and ranks.

        Args:
            preferences_TE: the values of the choice, biases included.
            token_mask_T: [T] bool, false for padding, which must not be counted; None where all
                are tokens.
        """
        raise ValueError(f"{type(self).__name__} must have a method margins: it has margin_bins")

    @abstractmethod
    def bias_change(self, counts: Tensor) -> Tensor:
        """[E] what is added to each expert's bias after a step, without a gradient.

        Args:
            counts: [E] the assignments of the step on all ranks, or the ``margins`` [E, M] of a
                rule with ``margin_bins``. The result must depend on them alone: biases stay equal
                on all ranks.
        """


class StandardBalancing(Balancing):
    """The Switch loss, the sequence-wise loss and the z-loss; and with ``expert_bias`` a step of
    ``bias_update_rate`` up or down for each expert."""

    traits = BALANCINGS["standard"]

    def losses(self, tokens: RoutedTokens) -> Losses:
        """See :class:`Balancing`."""
        c, t = self.config, tokens
        # With a coefficient of 0 the sequence-wise loss, which needs a collective, is not computed.
        sequence = t.logits_TE.new_zeros(())
        if c.seq_aux_loss_coeff:
            sequence = sequence_balance_loss(
                t.probs_TE, t.expert_indices_TK, t.seq_len, t.token_group, t.token_mask_T
            )
        losses = (
            load_balance_loss(t.probs_TE, t.expert_counts_E, t.token_mask_T),
            sequence,
            z_loss(t.logits_TE, t.token_mask_T, t.logsumexp_T),
        )
        coefficients = (c.aux_loss_coeff, c.seq_aux_loss_coeff, c.z_loss_coeff)
        terms = [factor * loss for factor, loss in zip(coefficients, losses, strict=True)]
        return Losses(*losses, total=terms[0] + terms[1] + terms[2])

    def bias_change(self, counts: Tensor) -> Tensor:
        """b_i += u · sign(mean(n) - n_i) (Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3,
        arXiv 2412.19437, section 2.1.2)."""
        # n_i is compared with the mean in integers, E · n_i with the sum: exact for any counts.
        direction_E = torch.sign(counts.sum() - counts * len(counts))
        return self.config.bias_update_rate * direction_E


def balance_by_kernel(
    balancing: Balancing,
    logits_TE: Tensor,
    chosen: kernels.Selection,
    expert_counts_E: Tensor,
    seq_len: int | None,
    token_group: dist.ProcessGroup | None,
) -> kernels.Balance:
    """Losses and statistics of experts that a kernel chose; by another kernel where the rule is
    ``standard`` without the sequence-wise loss. Arguments as in :class:`RoutedTokens`."""
    is_standard = type(balancing).losses is StandardBalancing.losses
    if is_standard and not balancing.config.seq_aux_loss_coeff:
        return kernels.balance(chosen, expert_counts_E, balancing.config)
    losses = balancing.losses(
        RoutedTokens(
            logits_TE, chosen.probs_TE, chosen.indices_TK, chosen.tokens_per_expert_E,
            expert_counts_E, None, seq_len, token_group, chosen.logsumexp_T,
        )
    )  # fmt: skip
    return kernels.Balance(
        load_balance=losses.load_balance,
        z=losses.z,
        total=losses.total,
        entropy=mean_over_tokens(chosen.entropy_T, None),
        num_nonfinite=chosen.nonfinite_T.sum(),
        sequence_balance=losses.sequence_balance,
        no_tokens=expert_counts_E.new_zeros(()),
    )


def balancing_of(config: RouterConfig) -> Balancing:
    """The rule that ``config.balancing`` names."""
    balancing: Balancing = BALANCING.load(config.balancing)(config)
    return balancing
