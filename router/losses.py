"""Auxiliary losses that keep a router balanced and its logits small.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from router.select import count_tokens_per_expert


def load_balance_loss(probs_TE: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """Switch load-balancing loss, E · Σ_i f_i · P_i (Fedus et al., arXiv 2101.03961, eqs. 4-6).

    f_i = count_i / Σ count is the fraction of assignments of expert i, and P_i the mean over tokens
    of the probability of expert i. The loss is 1 where f and P are uniform; the gradient flows
    through P. With the counts of a global batch this is the loss of Qiu et al. (arXiv 2501.11873,
    eqs. 3 and 4): f is then equal in all calls, and the token-weighted mean of the calls' losses is
    the loss with P averaged over the global batch.

    Args:
        probs_TE: [T, E] scores normalized to sum to one over the experts, float32.
        tokens_per_expert_E: [E] int64 assignments, of these tokens or of more.

    Returns:
        A scalar; 0 for no tokens.
    """
    num_tokens, num_experts = probs_TE.shape
    counts_E = tokens_per_expert_E.to(probs_TE.dtype)
    f_E = counts_E / counts_E.sum().clamp(min=1)
    p_E = probs_TE.sum(0) / max(num_tokens, 1)
    return num_experts * torch.dot(f_E, p_E)


def sequence_balance_loss(
    probs_TE: Tensor,
    expert_indices_TK: Tensor,
    seq_len: int | None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Mean over sequences of the load-balancing loss of one sequence (DeepSeek-V3, arXiv
    2412.19437, eqs. 17-20).

    The fractions f count the actual choices, bias and groups included. Where sequences are spread
    over a group, f counts the whole sequence and P this rank's part; the mean over ranks is the
    loss.

    Args:
        probs_TE: [T, E] scores normalized over the experts, sequence after sequence.
        expert_indices_TK: [T, K] int64.
        seq_len: tokens of each sequence on this rank, a divisor of T; None for one sequence.
        group: the ranks that have equal parts of the same sequences; all must call.

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
    if group is not None:
        dist.all_reduce(counts := counts.contiguous(), group=group)
    f = counts.to(probs_TE.dtype) / counts.sum(1, keepdim=True).clamp(min=1)
    p = probs_TE.view(sequences, S, E).mean(1)
    return E * (f * p).sum(-1).mean()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Router z-loss, mean over tokens of logsumexp(logits)² (Zoph et al., arXiv 2202.08906, eq. 5).

    Args:
        logits_TE: [T, E] float32.

    Returns:
        A scalar; 0 for no tokens.
    """
    return logits_TE.logsumexp(-1).square().sum() / max(logits_TE.shape[0], 1)
