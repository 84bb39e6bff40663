"""What a router gives.

Legend: T tokens, E experts, K top_k, M bins of margins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from router.micro_batch import Places
from router.padding import TokenRows


class RouterOutput(NamedTuple):
    """The routing of every token. FSDP and pipelining find tensors in a NamedTuple."""

    logits_TE: Tensor
    """[T, E] in the router's dtype, with gradients. The first field: transformers records the first
    output of a router as its ``router_logits``."""
    expert_indices_TK: Tensor
    """[T, K] int64, best first; E, which is no expert, for padding and dropped assignments. Under
    expert choice [T, E]: column e is e where expert e takes the token, and E elsewhere."""
    expert_weights_TK: Tensor
    """Float32, of the shape of ``expert_indices_TK``: the weight of each expert's output; 0 for no
    expert; NaN for a token whose logits are not finite."""
    topk_indices_TK: Tensor
    """The record of the routing, which a later call replays: as ``expert_indices_TK``, but -1 - e
    where expert e was chosen and the assignment was dropped."""
    rows_per_expert_E: Tensor
    """[E] int64: the assignments that each expert computes."""
    dropped_TK: Tensor | None
    """Bool, of the shape of ``expert_indices_TK``: the assignment is dropped. None where none
    is."""
    num_rerouted: Tensor
    """Scalar int64: assignments that were rerouted from a full expert to another one."""
    tokens_per_expert_E: Tensor
    """[E] int64: the assignments as chosen, before capacity. The sum is T·K, or under expert choice
    E · min(ceil(T·K / E), T)."""
    expert_counts_E: Tensor
    """[E] int64: the assignments that the load-balancing loss counted, of these tokens, or of all
    ranks and of the step so far. The step's next call takes these counts."""
    margins_EM: Tensor | None
    """[E, M] int64: what ``update_bias`` needs in the place of ``tokens_per_expert_E``, where the
    balancing rule has ``margin_bins`` (M) and moves biases; None elsewhere, and in evaluation."""
    nonfinite_T: Tensor
    """[T] bool: tokens with a NaN or an infinity among their logits. The weights of such a token,
    and the layer's output for such a token, are NaN."""
    num_nonfinite_tokens: Tensor
    """Scalar int64: the number of such tokens."""
    load_balance_loss: Tensor
    """Scalar float32, without its coefficient."""
    sequence_balance_loss: Tensor
    """Scalar float32, without its coefficient; 0 where the coefficient is 0."""
    z_loss: Tensor
    """Scalar float32, without its coefficient."""
    aux_loss: Tensor
    """Scalar float32: what the model's loss gets of the balancing rule, coefficients included."""
    entropy: Tensor
    """Scalar float32 without a gradient: the mean over tokens of the entropy of their
    probabilities, in nats; from 0 to log(E)."""
    places: Places | None = None
    """Where these tokens are in a micro-batch that ranks share under exact sums: losses and means
    are then of the whole micro-batch. None elsewhere."""


_OF_TOKENS = ("logits_TE", "expert_indices_TK", "expert_weights_TK", "topk_indices_TK",
              "dropped_TK", "nonfinite_T")  # fmt: skip
"""The fields with a row for each token."""


def own_part(routed: RouterOutput, places: Places) -> RouterOutput:
    """The routing of a rank's tokens, from that of the micro-batch that ranks share. What is
    counted by rank is left to the caller."""
    own = _of_tokens(routed, lambda rows_T: rows_T.index_select(0, places.positions_T))
    return own._replace(places=places)


def routed_with_padding(routed: RouterOutput, token_rows: TokenRows) -> RouterOutput:
    """The routing of tokens and padding, from that of the tokens: padding has no expert, weights
    and logits of 0, and is in no count."""
    if token_rows.has_no_padding:
        return routed
    E = len(routed.rows_per_expert_E)
    if routed.dropped_TK is None:
        none_TK = torch.zeros_like(routed.expert_indices_TK, dtype=torch.bool)
        routed = routed._replace(dropped_TK=none_TK)
    padding = {"expert_indices_TK": E, "topk_indices_TK": E, "dropped_TK": True}
    rows: dict[str, Any] = {
        n: token_rows.back(getattr(routed, n), padding.get(n, 0)) for n in _OF_TOKENS
    }
    return routed._replace(places=_moved(routed.places, lambda x: token_rows.back(x, 0)), **rows)


def routed_tokens(routed: RouterOutput, token_rows: TokenRows) -> RouterOutput:
    """The routing of the tokens without that of padding."""
    return _of_tokens(routed, token_rows.of)._replace(places=_moved(routed.places, token_rows.of))


def _of_tokens(routed: RouterOutput, rows: Callable[[Tensor], Tensor]) -> RouterOutput:
    """``rows`` of each field with a row for each token."""
    fields = {name: getattr(routed, name) for name in _OF_TOKENS}
    chosen: dict[str, Any] = {n: None if x is None else rows(x) for n, x in fields.items()}
    return routed._replace(**chosen)


def _moved(places: Places | None, rows: Callable[[Tensor], Tensor]) -> Places | None:
    return None if places is None else places._replace(positions_T=rows(places.positions_T))
