"""A micro-batch that several ranks share, with the numbers of one rank.

Legend: B sequences, S tokens of a sequence on this rank, W tokens of the full sequence, T tokens of
this rank or of the micro-batch, D d_model, E experts, K top_k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from router.padding import TokenRows, token_rows_of


class SharedMicroBatch(Protocol):
    """The ranks that have parts of the same sequences: ``parallel.apply.apply_exact_context``."""

    @property
    def ranks(self) -> int:
        """How many ranks share the micro-batch."""
        ...

    def positions(self, length: int, device: torch.device) -> Tensor:
        """[S] int64: positions in the full sequence of this rank's ``length`` tokens."""
        ...

    def linear(
        self, x_BSD: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """[B, S, D] -> [B, S, E], a product in ``dtype``."""
        ...

    def of_tokens(
        self, function: Callable[[Tensor, Tensor], Tensor], x_BSX: Tensor, vector: Tensor
    ) -> Tensor:
        """``function`` of each token's numbers and of a vector that is a parameter."""
        ...

    def with_own_gradient(self, x_BSX: Tensor) -> Tensor:
        """[B, S, ...] of each rank -> [B, W, ...]; the gradient is of this rank's tokens."""
        ...


class Places(NamedTuple):
    """Where the tokens of a rank are in a micro-batch that several ranks share."""

    positions_T: Tensor
    """[T] int64: of each token in [B, W], flat."""
    parts: int
    """The ranks that share the micro-batch: consecutive ones of a group of experts."""


class WholeMicroBatch(NamedTuple):
    """What a router routes of a micro-batch that ranks share: what one rank would have."""

    logits_TE: Tensor
    seq_len: int | None
    replay_TK: Tensor | None
    token_mask_T: Tensor | None
    places: Places
    own_rows: TokenRows | None
    """Of this rank's padding, where padding was taken out of everything else."""

    def inputs(self, prior_expert_counts_E: Tensor | None) -> tuple[Any, ...]:
        """The arguments of a router."""
        return (
            self.logits_TE,
            self.seq_len,
            self.replay_TK,
            prior_expert_counts_E,
            self.token_mask_T,
            self.places,
        )


def whole_micro_batch(
    shared: SharedMicroBatch,
    logits_BSE: Tensor,
    replay_TK: Tensor | None,
    token_mask_T: Tensor | None,
    *,
    keeps_padding: bool,
) -> WholeMicroBatch:
    """The whole micro-batch, from what this rank has of it.

    Args:
        shared: the ranks.
        logits_BSE: of this rank's tokens.
        replay_TK: recorded choices of these tokens, or None.
        token_mask_T: false for padding, or None where all are tokens.
        keeps_padding: padding is not taken out, as the sequence-wise loss asks.
    """
    B, S = logits_BSE.shape[:2]

    def gathered(x_TX: Tensor) -> Tensor:
        return shared.with_own_gradient(x_TX.view(B, S, *x_TX.shape[1:])).flatten(0, 1)

    logits_TE = shared.with_own_gradient(logits_BSE).flatten(0, 1)
    firsts_B = torch.arange(B, device=logits_BSE.device) * S * shared.ranks
    positions_T = (firsts_B.unsqueeze(1) + shared.positions(S, logits_BSE.device)).flatten()
    places, seq_len = Places(positions_T, shared.ranks), S * shared.ranks
    replay_TK = None if replay_TK is None else gathered(replay_TK)
    if token_mask_T is None:
        return WholeMicroBatch(logits_TE, seq_len, replay_TK, None, places, None)
    own_rows, mask_T = token_rows_of(token_mask_T), gathered(token_mask_T)
    rows = token_rows_of(mask_T)
    if own_rows is None or rows is None or keeps_padding:
        return WholeMicroBatch(logits_TE, seq_len, replay_TK, mask_T, places, None)
    numbers_T = mask_T.cumsum(0) - 1
    places = places._replace(positions_T=numbers_T[own_rows.of(positions_T)])
    replay_TK = None if replay_TK is None else rows.of(replay_TK)
    return WholeMicroBatch(rows.of(logits_TE), None, replay_TK, None, places, own_rows)
