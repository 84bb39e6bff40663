"""The balancing rule ``standard``: three losses by their coefficients, and biases without a loss.

Legend: E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router.balancing import Balancing, Losses, RoutedTokens
from router.config import BALANCINGS
from router.losses import load_balance_loss, sequence_balance_loss, z_loss


class StandardBalancing(Balancing):
    """The Switch loss, the sequence-wise loss and the z-loss; and with ``expert_bias`` a step of
    ``bias_update_rate`` up or down for each expert."""

    traits = BALANCINGS["standard"]

    def losses(self, tokens: RoutedTokens) -> Losses:
        """See :class:`router.balancing.Balancing`."""
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
            z_loss(t.logits_TE, t.token_mask_T),
        )
        coefficients = (c.aux_loss_coeff, c.seq_aux_loss_coeff, c.z_loss_coeff)
        terms = [factor * loss for factor, loss in zip(coefficients, losses, strict=True)]
        return Losses(*losses, total=terms[0] + terms[1] + terms[2])

    def bias_change(self, tokens_per_expert_E: Tensor) -> Tensor:
        """b_i += u · sign(mean(n) - n_i) (Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3,
        arXiv 2412.19437, section 2.1.2)."""
        # n_i is compared with the mean in integers, E · n_i with the sum: exact for any counts.
        counts_E = tokens_per_expert_E
        direction_E = torch.sign(counts_E.sum() - counts_E * len(counts_E))
        return self.config.bias_update_rate * direction_E
