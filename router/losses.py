"""Auxiliary losses that keep a router balanced and its logits small.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from router.scores import count_tokens_per_expert


def sum_over_tokens(values_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    """[T] or [T, X] -> [] or [X]: the sum over the tokens where the mask is true, or over all.

    A masked value is left out and not multiplied by 0: it may be NaN.
    """
    if token_mask_T is not None:
        mask = token_mask_T if values_TX.ndim == 1 else token_mask_T.unsqueeze(1)
        values_TX = values_TX.masked_fill(~mask, 0)
    return values_TX.sum(0)


def mean_over_tokens(values_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    """As :func:`sum_over_tokens`, divided by the number of these tokens; 0 for no tokens."""
    total = sum_over_tokens(values_TX, token_mask_T)
    if token_mask_T is None:
        return total / max(values_TX.shape[0], 1)
    return total / token_mask_T.sum().clamp(min=1)


def load_balance_loss(
    probs_TE: Tensor, tokens_per_expert_E: Tensor, token_mask_T: Tensor | None = None
) -> Tensor:
    """Switch load-balancing loss, E · Σ_i f_i · P_i (Fedus et al., arXiv 2101.03961, eqs. 4-6).

    f_i = count_i / Σ count is the fraction of assignments of expert i, and P_i the mean over tokens
    of the probability of expert i. The loss is 1 where f and P are uniform; the gradient flows
    through P. With the counts of a global batch this is the loss of Qiu et al. (arXiv 2501.11873,
    eqs. 3 and 4): f is then equal in all calls, and the token-weighted mean of the calls' losses is
    the loss with P averaged over the global batch.

    Args:
        probs_TE: [T, E] scores normalized to sum to one over the experts, float32.
        tokens_per_expert_E: [E] int64 assignments, of these tokens or of more.
        token_mask_T: [T] bool, the tokens of the mean; None for all.

    Returns:
        A scalar; 0 for no tokens.
    """
    counts_E = tokens_per_expert_E.to(probs_TE.dtype)
    f_E = counts_E / counts_E.sum().clamp(min=1)
    return probs_TE.shape[1] * torch.dot(f_E, mean_over_tokens(probs_TE, token_mask_T))


def sequence_balance_loss(
    probs_TE: Tensor,
    expert_indices_TK: Tensor,
    seq_len: int | None,
    group: dist.ProcessGroup | None = None,
    token_mask_T: Tensor | None = None,
) -> Tensor:
    """Mean over sequences of the load-balancing loss of one sequence (DeepSeek-V3, arXiv
    2412.19437, eqs. 17-20).

    The fractions f count the actual choices, bias and groups included. Where sequences are spread
    over a group, f counts the whole sequence and P this rank's part; the mean over ranks, weighted
    by their tokens, is the loss. With a mask the mean is over sequences that have a token.

    Args:
        probs_TE: [T, E] scores normalized over the experts, sequence after sequence.
        expert_indices_TK: [T, K] int64.
        seq_len: tokens of each sequence on this rank, a divisor of T; None for one sequence.
        group: the ranks that have equal parts of the same sequences; all must call, all with a
            mask or all without.
        token_mask_T: [T] bool, the tokens that count; None for all.

    Returns:
        A scalar; 0 for no tokens.
    """
    T, E = probs_TE.shape
    if T == 0:  # on all ranks of a group
        return probs_TE.sum()
    S = seq_len or T
    sequences = T // S
    sequence_T1 = (torch.arange(T, device=probs_TE.device) // S).unsqueeze(1)
    # One bin more in each sequence, for places without an expert.
    bins_TK = sequence_T1 * (E + 1) + expert_indices_TK
    counts = count_tokens_per_expert(bins_TK, sequences * (E + 1)).view(sequences, E + 1)[:, :E]
    own_tokens = counts.new_full((sequences,), S)
    if token_mask_T is not None:
        own_tokens = token_mask_T.view(sequences, S).sum(1)
    if group is not None:
        both = torch.cat((counts, own_tokens.unsqueeze(1)), 1)
        dist.all_reduce(both, group=group)
        counts, tokens = both[:, :E], both[:, E]
    else:
        tokens = own_tokens
    f = counts.to(probs_TE.dtype) / counts.sum(1, keepdim=True).clamp(min=1)
    if token_mask_T is None:
        return E * (f * probs_TE.view(sequences, S, E).mean(1)).sum(-1).mean()
    probs_TE = probs_TE.masked_fill(~token_mask_T.unsqueeze(1), 0)
    p = probs_TE.view(sequences, S, E).sum(1) / tokens.clamp(min=1).unsqueeze(1)
    # A rank's loss is weighted by its part of all tokens: its part of the sum is divided by it.
    weight = tokens.sum() / own_tokens.sum().clamp(min=1)
    return weight * E * (f * p).sum() / (tokens > 0).sum().clamp(min=1)


def z_loss(
    logits_TE: Tensor, token_mask_T: Tensor | None = None, logsumexp_T: Tensor | None = None
) -> Tensor:
    """Router z-loss, mean over tokens of logsumexp(logits)² (Zoph et al., arXiv 2202.08906, eq. 5).

    Args:
        logits_TE: [T, E] float32.
        token_mask_T: [T] bool, the tokens of the mean; None for all.
        logsumexp_T: [T] of the logits, where they are known.

    Returns:
        A scalar; 0 for no tokens.
    """
    logsumexp_T = logits_TE.logsumexp(-1) if logsumexp_T is None else logsumexp_T
    return mean_over_tokens(logsumexp_T.square(), token_mask_T)
