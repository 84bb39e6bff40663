"""A decoder as sizes: its parameters, its GEMMs and its floating-point operations.

Legend: T tokens, D d_model, H heads, G key-value heads, C size of a query's head, V of a value's,
F hidden size, E experts, K top_k. Arithmetic only; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from moe import MoEConfig
from moe.config import GATED
from pretrain.model import ModelConfig


class Gemm(NamedTuple):
    """``copies`` products [m, k] x [k, n] in one launch."""

    m: float
    n: float
    k: float
    copies: float = 1
    router: bool = False
    """Whether it is a router's, which has a dtype of its own."""


def flops(gemms: Iterable[Gemm]) -> float:
    """The operations of products together."""
    return sum(2 * g.m * g.n * g.k * g.copies for g in gemms)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. ``num_experts`` 0: every layer is dense."""

    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The size of a query's and a key's head."""
    v_head_dim: int
    vocab_size: int
    d_ff: int
    products: int = 3
    """Matrices of a feed-forward network: 3 with a gate, 2 without."""
    first_k_dense: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_d_ff: int = 0
    expert_products: int = 3
    num_shared_experts: int = 0
    shared_expert_gate: bool = False
    n_groups: int = 1
    topk_groups: int = 1
    """The experts of a token come from so many of ``n_groups`` blocks of experts."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    """With latent attention: the part of a head with rotary positions."""
    qk_norm: str = "none"
    attention_bias: str = "none"
    tie_embeddings: bool = False
    num_mtp_layers: int = 0
    """Layers of multi-token prediction; their numbers come after those of ``num_layers``."""

    @classmethod
    def of(cls, model: ModelConfig, moe: MoEConfig | None) -> ModelShape:
        """The sizes of a spec's model."""
        experts: dict[str, Any] = {} if moe is None else {
            "num_experts": moe.num_experts, "top_k": moe.top_k, "expert_d_ff": moe.d_ff,
            "expert_products": 3 if moe.activation in GATED else 2,
            "num_shared_experts": moe.num_shared_experts,
            "shared_expert_gate": moe.shared_expert_gate,
            "n_groups": moe.n_groups, "topk_groups": moe.topk_groups,
        }  # fmt: skip
        return cls(
            d_model=model.d_model,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.qk_head_dim,
            v_head_dim=model.v_head_dim if model.latent else model.qk_head_dim,
            vocab_size=model.vocab_size,
            d_ff=model.d_ff,
            first_k_dense=model.first_k_dense,
            q_lora_rank=model.q_lora_rank,
            kv_lora_rank=model.kv_lora_rank,
            rope_head_dim=model.qk_rope_head_dim if model.latent else 0,
            qk_norm=model.qk_norm,
            attention_bias=model.attention_bias,
            tie_embeddings=model.tie_embeddings,
            num_mtp_layers=model.num_mtp_layers,
            **experts,
        )

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts > 0 and layer >= self.first_k_dense

    @property
    def all_layers(self) -> range:
        """The numbers of all layers, with those of multi-token prediction."""
        return range(self.num_layers + self.num_mtp_layers)

    def nodes_of_token(self, nodes: int) -> float:
        """The mean number of nodes that have one of a token's experts, if all are chosen alike."""
        groups = nodes
        if self.n_groups > 1 and self.n_groups % nodes == 0:
            groups = min(nodes, self.topk_groups)
        return groups * (1 - (1 - 1 / groups) ** self.top_k)

    @cached_property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(self.is_moe(layer) for layer in self.all_layers)

    # Parameters.

    @cached_property
    def attention_parameters(self) -> int:
        """Matrices and norms of one layer's attention, its pre-norm not counted."""
        D, H, C = self.d_model, self.num_heads, self.head_dim
        if self.kv_lora_rank:
            q = self.q_lora_rank * (D + H * C + 1) if self.q_lora_rank else D * H * C
            kv = D * (self.kv_lora_rank + self.rope_head_dim) + self.kv_lora_rank
            kv += self.kv_lora_rank * H * (C - self.rope_head_dim + self.v_head_dim)
            return q + kv + H * self.v_head_dim * D
        heads = (H + self.num_kv_heads) * C
        norms = {"none": 0, "head": 2 * C, "all_heads": heads}[self.qk_norm]
        return 2 * D * heads + norms + self.projection_biases + self.output_bias

    @property
    def projection_biases(self) -> int:
        """The biases of one layer's queries, keys and values."""
        biased = self.attention_bias != "none"
        return biased * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def output_bias(self) -> int:
        """The bias of one layer's attention output."""
        return self.d_model if self.attention_bias == "all" else 0

    def attention_vectors(self, tp: int) -> float:
        """Of these, the weights of norms and the biases that one of ``tp`` ranks has."""
        matrices = sum(int(gemm.n * gemm.k) for gemm in self.attention_gemms(1, 1))
        vectors = self.attention_parameters - matrices
        norms: float = vectors - self.projection_biases - self.output_bias
        norms /= tp if self.qk_norm == "all_heads" else 1
        return norms + self.output_bias + self.projection_biases / tp

    @cached_property
    def attention_replicated(self) -> int:
        """Of these, the parameters that tensor parallelism does not divide."""
        if self.kv_lora_rank:
            q = self.q_lora_rank * (self.d_model + 1)
            return q + self.d_model * (self.kv_lora_rank + self.rope_head_dim) + self.kv_lora_rank
        return (2 * self.head_dim if self.qk_norm == "head" else 0) + self.output_bias

    @cached_property
    def dense_parameters(self) -> int:
        """The feed-forward network of a dense layer."""
        return self.products * self.d_model * self.d_ff

    @cached_property
    def expert_parameters(self) -> int:
        """One expert."""
        return self.expert_products * self.d_model * self.expert_d_ff

    @cached_property
    def beside_experts(self) -> int:
        """A MoE layer without its routed experts: the router and the shared experts."""
        shared = self.num_shared_experts * self.expert_parameters
        gate = self.d_model if self.shared_expert_gate else 0
        return self.d_model * self.num_experts + shared + gate

    def layer_parameters(self, layer: int) -> int:
        """All parameters of a layer, norms too."""
        rest = self.attention_parameters + 2 * self.d_model + self.mtp_parameters(layer)
        if not self.is_moe(layer):
            return rest + self.dense_parameters
        return rest + self.beside_experts + self.num_experts * self.expert_parameters

    def mtp_parameters(self, layer: int) -> int:
        """What a layer of multi-token prediction has besides: its projection and three norms."""
        return 0 if layer < self.num_layers else 2 * self.d_model**2 + 3 * self.d_model

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        matrices = 1 if self.tie_embeddings else 2
        layers = sum(self.layer_parameters(i) for i in self.all_layers)
        return layers + matrices * self.vocab_size * self.d_model + self.d_model

    @property
    def active_parameters(self) -> int:
        """The parameters that a token meets, embedding and head too."""
        idle = self.num_experts - self.top_k
        return self.parameters - self.num_moe_layers * max(idle, 0) * self.expert_parameters

    # Operations.

    def scores_flops(self, seq_len: float, causal: bool) -> float:
        """Operations of one token's attention in one layer's forward, projections not counted."""
        keys = (seq_len + 1) / 2 if causal else seq_len
        return 2 * self.num_heads * (self.head_dim + self.v_head_dim) * keys

    def token_flops(self, seq_len: int, causal: bool = True) -> float:
        """Model FLOPs of a token's forward and backward: every GEMM once and twice, and nothing
        that is recomputed. Equal to :func:`pretrain.model.forward_flops` times three."""
        forward = len(self.all_layers) * (
            flops(self.attention_gemms(1, 1)) + self.scores_flops(seq_len, causal)
        )
        forward += sum(flops(self.ffn_gemms(layer, 1, 1, 1)) for layer in self.all_layers)
        return 3 * (forward + flops(self.head_gemms(1, 1)))

    # GEMMs of one micro-batch on one rank.

    def attention_gemms(self, tokens: float, tp: int) -> list[Gemm]:
        """The forward's projections of ``tokens`` tokens, with heads divided by ``tp``."""
        D, T = self.d_model, tokens
        q, v = self.num_heads * self.head_dim / tp, self.num_heads * self.v_head_dim / tp
        if not self.kv_lora_rank:
            kv = self.num_kv_heads * self.head_dim / tp
            return [Gemm(T, q, D), Gemm(T, kv, D), Gemm(T, kv, D), Gemm(T, D, v)]
        R, P = self.kv_lora_rank, self.rope_head_dim
        wide = self.num_heads * (self.head_dim - P + self.v_head_dim) / tp
        gemms = [Gemm(T / tp, R + P, D), Gemm(T, wide, R), Gemm(T, D, v)]
        if self.q_lora_rank:
            return [Gemm(T / tp, self.q_lora_rank, D), Gemm(T, q, self.q_lora_rank), *gemms]
        return [Gemm(T, q, D), *gemms]

    def head_gemms(self, tokens: float, tp: int) -> list[Gemm]:
        """The forward's GEMMs of the head, and of multi-token prediction besides its layers."""
        head = Gemm(tokens, self.vocab_size / tp, self.d_model)
        more = [Gemm(tokens / tp, self.d_model, 2 * self.d_model), head]
        return [head, *more * self.num_mtp_layers]

    def ffn_gemms(
        self, layer: int, tokens: float, tp: int, ep: int, imbalance: float = 1.0
    ) -> list[Gemm]:
        """The forward's GEMMs of a layer's experts or of its dense network.

        Args:
            layer: its number.
            tokens: those of the tensor-parallel ranks together; each routes its part of them.
            tp: divides the hidden size of a dense layer; experts are not divided.
            ep: ranks that share the experts.
            imbalance: rows of the busiest rank, as a multiple of the mean.
        """
        D = self.d_model
        if not self.is_moe(layer):
            up = [Gemm(tokens, self.d_ff / tp, D)] * (self.products - 1)
            return [*up, Gemm(tokens, D, self.d_ff / tp)]
        T, F, E = tokens / tp, self.expert_d_ff, self.num_experts
        rows, here = T * self.top_k * ep / E * imbalance, E / ep
        gemms = [Gemm(T, E, D, router=True)]
        gemms += [Gemm(rows, F, D, here)] * (self.expert_products - 1) + [Gemm(rows, D, F, here)]
        if wide := self.num_shared_experts * F:
            gemms += [Gemm(T, wide, D)] * (self.expert_products - 1) + [Gemm(T, D, wide)]
        if self.shared_expert_gate:
            gemms.append(Gemm(T, 1, D))
        return gemms

    # Matrices that an optimizer may update as a whole.

    def hidden_matrices(self, layer: int) -> list[Gemm]:
        """The matrices of a layer as the products of one token, [k, n]; matrices of one row or
        column left out, as :func:`pretrain.model.is_hidden_matrix` leaves them out."""
        every = [*self.attention_gemms(1, 1), *self.ffn_gemms(layer, 1, 1, 1)]
        return [gemm for gemm in every if min(gemm.n, gemm.k) > 1]
