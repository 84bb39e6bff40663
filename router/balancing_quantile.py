"""Quantile balancing: each expert's bias is a quantile of the step's margins.

Legend: T tokens, E experts, K top_k, M bins of margins, H bins of the margins of one sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router.balancing import StandardBalancing
from router.config import BALANCINGS

H = BALANCINGS["quantile"].margin_bins // 2
_BITS = 2
"""A power of two is cut into 2**_BITS bins of equal widths."""
_SHIFT = 23 - _BITS
_LEAST = (127 - 22) << _BITS
"""The number of the bin that begins at 2**-22, were the bins numbered from 0.0 on."""


def _edges(device: torch.device) -> Tensor:
    """[H + 1] float64: where the bins of sizes of margins begin, and where the last one ends."""
    steps = torch.arange(_LEAST, _LEAST + H, dtype=torch.int32, device=device)
    edges = (steps << _SHIFT).view(torch.float32).double()
    return torch.cat((edges.new_zeros(1), edges))


def _reach(counts_EH: Tensor, wanted_E: Tensor) -> Tensor:
    """[E] float64: the distance from 0 within which an expert has ``wanted_E`` / E margins of
    ``counts_EH``. Margins of one bin are taken for evenly spread."""
    E = len(counts_EH)
    reached_EH = counts_EH.cumsum(1) * E
    bins_E1 = (reached_EH < wanted_E.unsqueeze(1)).sum(1, keepdim=True).clamp(max=H - 1)
    in_bin_E = counts_EH.gather(1, bins_E1).squeeze(1) * E
    before_E = reached_EH.gather(1, bins_E1).squeeze(1) - in_bin_E
    share_E = (wanted_E - before_E).double() / in_bin_E.clamp(min=1)
    edges, bins_E = _edges(counts_EH.device), bins_E1.squeeze(1)
    return edges[bins_E] + share_E * (edges[bins_E + 1] - edges[bins_E])


class QuantileBalancing(StandardBalancing):
    """A step sets each bias so that the expert would have had T·K / E of the step's tokens.

    A token takes an expert whose score plus bias exceeds the token's threshold. The bias that gives
    an expert T·K / E tokens at these thresholds is minus the (1 - K/E)-quantile of scores minus
    thresholds: one iteration of the dual of the best assignment (Su, kexue.fm/archives/11619,
    "Quantile Balancing", the practical form). The next step chooses with the biases, so that no
    token's choice depends on later tokens. There is no rate and no coefficient.

    A threshold may be any value between the K-th and the next of a token's values. Su takes the
    lower one, which leaves a margin of 0 at one expert of each token, and an expert with many of
    these is not raised. Here the threshold is midway.

    The quantile is taken of a histogram: integers have one sum however tokens are divided, so that
    biases do not depend on the layout. The histogram counts margins, which are values of the choice
    minus thresholds. A bias moves by minus the quantile of its margins, which is 0 for an expert
    that has its part. Bins near 0 are narrow, and no bin is wider than a quarter of its margins: a
    move is as exact. Biases keep their mean, on which no choice depends.
    """

    traits = BALANCINGS["quantile"]

    def margins(self, preferences_TE: Tensor, token_mask_T: Tensor | None) -> Tensor:
        """See :class:`router.Balancing`. The first H columns are of margins up to 0, the largest
        first; the others are of margins above 0, the smallest first."""
        E = preferences_TE.shape[1]
        best = preferences_TE.topk(self.config.top_k + 1, dim=1).values[:, -2:]
        margins_TE = (preferences_TE - best.mean(1, keepdim=True)).float()
        # The first bits of a float are its exponent, and the next ones cut a power of two.
        sizes_TE = (margins_TE.abs().view(torch.int32) >> _SHIFT) - (_LEAST - 1)
        columns_TE = sizes_TE.clamp(0, H - 1).long() + H * (margins_TE > 0)
        places_TE = columns_TE + 2 * H * torch.arange(E, device=columns_TE.device)
        ones = torch.ones_like(places_TE)
        if token_mask_T is not None:
            ones = ones * token_mask_T.unsqueeze(1)
        counts = torch.zeros(E * 2 * H, dtype=torch.int64, device=places_TE.device)
        return counts.scatter_add_(0, places_TE.flatten(), ones.flatten()).view(E, 2 * H)

    def bias_change(self, counts: Tensor) -> Tensor:
        """Of the ``margins`` of a step [E, M]: minus the quantiles, plus their mean."""
        below_EH, above_EH = counts.tensor_split(2, dim=1)
        # In integers, times E: an expert that has T·K / E tokens is not moved at all.
        excess_E = above_EH.sum(1) * len(counts) - counts.sum(1) * self.config.top_k
        quantiles_E = torch.where(
            excess_E > 0, _reach(above_EH, excess_E), -_reach(below_EH, -excess_E)
        )
        quantiles_E = quantiles_E.where(excess_E != 0, 0)
        return (quantiles_E.mean() - quantiles_E).float()
