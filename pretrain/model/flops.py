"""Floating-point operations of a token, and the peak rate of a device.

Legend: B batch, S sequence, D d_model, F d_ff, E experts, K top_k, V vocab.

The GEMMs of the model are counted: two operations for a multiplication and an addition, once for
the forward and twice for the backward. Norms, activations, rotations and look-ups are not counted,
nor is recomputation, nor the extra work of a layout. In attention the query-key pairs of the causal
mask are counted, and in MoE layers the experts that a token is routed to. ``data.document_mask``
does not change the count: with it fewer pairs are computed than are counted, and the model FLOPs
are an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from moe.config import GATED, MoEConfig
from pretrain.model.config import AttentionConfig, ModelConfig


@dataclass(frozen=True)
class ForwardFlops:
    """Floating-point operations of the forward of one token, averaged over its positions."""

    attention_projections: float
    attention_scores: float
    """The GEMMs of queries with keys, and of attention weights with values."""
    dense_layers: float
    routers: float
    experts: float
    """The experts that a token is routed to, and the shared experts."""
    head: float
    """Of the decoder, and of each layer of multi-token prediction."""
    mtp_projections: float = 0
    """The GEMMs that combine hidden states and embeddings in multi-token prediction."""

    @property
    def total(self) -> float:
        """The sum of all fields."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def training(self) -> float:
        """Forward and backward: each GEMM of the forward has two GEMMs in the backward."""
        return 3 * self.total


def forward_flops(
    model: ModelConfig, moe: MoEConfig | None, seq_len: int, causal: bool = True
) -> ForwardFlops:
    """The operations of a token in a sequence of ``seq_len`` tokens, as training has them: with
    multi-token prediction.

    With ``causal`` a query counts (seq_len + 1) / 2 keys, the mean over positions. Otherwise it
    counts all ``seq_len`` keys, as some publications do.
    """
    layers = model.num_layers + model.num_mtp_layers
    num_moe = 0 if moe is None else len(model.moe_layers)
    num_dense = layers - num_moe
    keys = (seq_len + 1) / 2 if causal else seq_len
    value = model.v_head_dim if model.latent else model.qk_head_dim
    scores = 2 * model.num_heads * (model.qk_head_dim + value) * keys
    return ForwardFlops(
        attention_projections=2 * layers * _attention_weights(model),
        attention_scores=layers * scores,
        dense_layers=2 * num_dense * 3 * model.d_model * model.d_ff,
        routers=0 if moe is None else 2 * num_moe * model.d_model * moe.num_experts,
        experts=0 if moe is None else 2 * num_moe * _expert_weights(moe),
        head=2 * (1 + model.num_mtp_layers) * model.d_model * model.vocab_size,
        mtp_projections=2 * model.num_mtp_layers * 2 * model.d_model**2,
    )


def _attention_weights(c: AttentionConfig) -> int:
    """The number of attention weights of one layer."""
    D, H = c.d_model, c.num_heads
    if not c.latent:
        return D * c.qk_head_dim * (2 * H + 2 * c.num_kv_heads)
    queries = H * c.qk_head_dim
    q = c.q_lora_rank * (D + queries) if c.q_lora_rank else D * queries
    kv = D * (c.kv_lora_rank + c.qk_rope_head_dim)
    kv += c.kv_lora_rank * H * (c.qk_nope_head_dim + c.v_head_dim)
    return q + kv + H * c.v_head_dim * D


def _expert_weights(c: MoEConfig) -> int:
    """The number of expert weights of one layer that a token is multiplied with."""
    products = 3 if c.activation in GATED else 2
    weights = (c.top_k + c.num_shared_experts) * products * c.d_model * c.d_ff
    return weights + (c.d_model if c.shared_expert_gate else 0)
