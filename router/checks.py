"""Checks of what a router is called with.

Legend: T tokens, D d_model, E experts, K top_k, M bins of margins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router.config import RouterConfig


def check_mask(token_mask_T: Tensor | None, x_TD: Tensor) -> None:
    """Raise ValueError for a mask of another shape or dtype."""
    if token_mask_T is None:
        return
    tokens = x_TD.shape[0]  # and not len(), which an export would take for a constant
    if token_mask_T.shape != (tokens,) or token_mask_T.dtype != torch.bool:
        raise ValueError(
            f"token_mask ({list(token_mask_T.shape)}, {token_mask_T.dtype}) must be bool, with "
            f"one element for each of {tokens} tokens: true for a token, false for padding"
        )


def check_replay(replay_TK: Tensor, tokens: int, config: RouterConfig) -> None:
    """Raise ValueError for choices of another shape or dtype, and on a CPU for experts that there
    are not."""
    E, K = config.num_experts, config.max_experts_per_token
    if replay_TK.shape != (tokens, K) or replay_TK.dtype != torch.int64:
        raise ValueError(
            f"replay_indices_TK ({list(replay_TK.shape)}, {replay_TK.dtype}) must be "
            f"[{tokens}, {K}] int64: the tokens, and top_k or, where experts choose, "
            f"num_experts"
        )
    # On an accelerator this check would wait for the device; compiled, it would end the graph.
    compiling = torch.compiler.is_compiling()
    if replay_TK.device.type == "cpu" and not compiling and replay_TK.numel():
        low, high = replay_TK.min(), replay_TK.max()
        if low < -E or high > E:
            raise ValueError(
                f"replay_indices_TK ({int(low)} to {int(high)}) must be below "
                f"num_experts ({E}), {E} for no expert, or -1 - e for a dropped expert e"
            )


def check_counts(name: str, counts_E: Tensor, config: RouterConfig) -> None:
    """Raise ValueError for what is no tensor of a count for each expert."""
    E = config.num_experts
    if not isinstance(counts_E, Tensor):
        raise ValueError(f"{name} ({type(counts_E).__name__}) must be a tensor [{E}]")
    if counts_E.shape != (E,):
        raise ValueError(
            f"{name} ({list(counts_E.shape)}) must be [{E}], a count for each of num_experts"
        )


def check_counts_of_step(counts: Tensor, config: RouterConfig) -> None:
    """Raise ValueError for what is not what the balancing rule moves biases by."""
    bins = config.balancing_traits.margin_bins
    if not bins:
        check_counts("tokens_per_expert_E", counts, config)
        return
    shape = [config.num_experts, bins]
    given = list(counts.shape) if isinstance(counts, Tensor) else type(counts).__name__
    if given != shape:
        raise ValueError(
            f"margins_EM ({given}) must be {shape}, the sum of the step's aux.margins_EM, with "
            f"balancing ({config.balancing})"
        )
