"""The reference decoder: pre-norm attention and a MoE or dense feed-forward in every layer.

Legend: B batch, S sequence, D d_model, H heads, G key-value heads, C head_dim, V vocab, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from moe import FeedForward, MoEAux, MoEConfig, MoELayer


class ModelConfig(BaseModel):
    """The ``[model]`` section: everything of the decoder but its MoE layers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocab_size: int = Field(ge=257)
    """At least 257: every byte, and the end of a document."""
    d_model: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    d_ff: int = Field(default=0, ge=0)
    """Hidden size of a dense feed-forward layer; 0 where there is none."""
    first_k_dense: int = Field(default=0, ge=0)
    """The first layers that are dense although there is a ``[moe]`` section."""
    qk_norm: bool = True
    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-6, gt=0)

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.d_model % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"model.d_model ({self.d_model}) must be an even multiple of model.num_heads "
                f"({self.num_heads}): rotary embedding turns pairs within a head"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads ({self.num_heads}) must be a multiple of model.num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.first_k_dense > self.num_layers:
            raise ValueError(
                f"model.first_k_dense ({self.first_k_dense}) must be at most model.num_layers "
                f"({self.num_layers})"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.d_model // self.num_heads


class DecoderOutput(NamedTuple):
    """Logits and what every MoE layer reports; a NamedTuple, so that FSDP sees the tensors."""

    logits: Tensor
    """[B, S, V]."""
    aux: tuple[MoEAux, ...]
    """One for each MoE layer, in order."""


def rotate(x_BHSC: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864, eq. 34), pairs (i, i + C/2)."""
    S, C = x_BHSC.shape[-2:]
    device = x_BHSC.device
    frequencies = theta ** (-torch.arange(0, C, 2, dtype=torch.float32, device=device) / C)
    angles_SC = torch.outer(torch.arange(S, dtype=torch.float32, device=device), frequencies)
    cos, sin = angles_SC.cos(), angles_SC.sin()
    a, b = x_BHSC.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BHSC.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and, optionally, normed q and k."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kv = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.d_model, config.d_model, bias=False)
        self.wk = nn.Linear(config.d_model, kv, bias=False)
        self.wv = nn.Linear(config.d_model, kv, bias=False)
        self.wo = nn.Linear(config.d_model, config.d_model, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]; tokens attend to themselves and those before them."""
        B, S, D = x_BSD.shape
        c = self.config
        q = self.wq(x_BSD).view(B, S, c.num_heads, c.head_dim)
        k = self.wk(x_BSD).view(B, S, c.num_kv_heads, c.head_dim)
        v = self.wv(x_BSD).view(B, S, c.num_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BHSC = rotate(q.transpose(1, 2), c.rope_theta)
        k_BGSC = rotate(k.transpose(1, 2), c.rope_theta)
        y_BHSC = F.scaled_dot_product_attention(
            q_BHSC,
            k_BGSC,
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=c.num_heads != c.num_kv_heads,
        )
        out: Tensor = self.wo(y_BHSC.transpose(1, 2).reshape(B, S, D))
        return out


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then the same with a MoE or a dense feed-forward layer."""

    def __init__(self, config: ModelConfig, moe: MoEConfig | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.moe = MoELayer(moe) if moe is not None else None
        self.ffn = FeedForward(config.d_model, config.d_ff) if moe is None else None

    def forward(
        self, x_BSD: Tensor, counts_before_E: Tensor | None = None
    ) -> tuple[Tensor, MoEAux | None]:
        """[B, S, D] -> [B, S, D], and the MoE layer's report where there is one."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        h_BSD = self.ffn_norm(x_BSD)
        if self.moe is not None:
            hidden, aux = self.moe(h_BSD, counts_before_E=counts_before_E)
            return x_BSD + hidden, aux
        assert self.ffn is not None
        return x_BSD + self.ffn(h_BSD), None


class Decoder(nn.Module):
    """A causal language model.

    Parameters are left as torch's constructors made them: :func:`pretrain.init.init_parameters`
    gives them values that do not depend on the number of ranks.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig | None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(
            DecoderLayer(config, moe if i >= config.first_k_dense else None)
            for i in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(
        self, tokens_BS: Tensor, counts_before: Sequence[Tensor] | None = None
    ) -> DecoderOutput:
        """[B, S] int64 token ids -> logits [B, S, V]; B may be 0.

        ``counts_before`` are the ``batch_counts_E`` of the step's forward before this one, one for
        each MoE layer, for load balancing over a global batch.
        """
        x_BSD = self.embed(tokens_BS)
        reports: list[MoEAux] = []
        for layer in self.layers:
            before = (
                counts_before[len(reports)] if counts_before and layer.moe is not None else None
            )
            x_BSD, aux = layer(x_BSD, before)
            if aux is not None:
                reports.append(aux)
        return DecoderOutput(self.head(self.norm(x_BSD)), tuple(reports))
