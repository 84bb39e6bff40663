"""How many tokens an expert has.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_tokens_per_expert(expert_indices_TK: Tensor, num_experts: int) -> Tensor:
    """[T, K] int64 -> [E] int64 assignments."""
    # bincount has no deterministic CUDA kernel; adding ones as integers is exact in any order.
    flat = expert_indices_TK.flatten()
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts_E.scatter_add_(0, flat, torch.ones_like(flat))
