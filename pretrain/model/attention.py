"""Attention of the reference decoder, grouped-query and multi-head latent, with rotary positions.

Legend: B batch, S tokens of a sequence that are here, W those of the whole sequence, D d_model,
H heads, G key-value heads; sizes of a head: C of a query or key, P of its rotary part, N of the
rest, V of a value; R kv_lora_rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import Documents
from parallel.apply import AttentionCall, FullSequence, SequenceContext, ShardedSequence
from pretrain.model.config import AttentionConfig
from pretrain.model.norm import RMSNorm
from pretrain.model.rotary import rotate, rotate_head, turns_of

_LATENT_NORM_EPS = 1e-6
"""The epsilon of the norms of latents, from DeepSeek-V3; ``norm_eps`` is for the other norms."""


class _CausalAttention(nn.Module):
    """The part that both kinds of attention share: which ranks have the rest of each sequence."""

    context: SequenceContext

    def __init__(self) -> None:
        super().__init__()
        self.context = FullSequence()

    def use_sequence_group(self, group: dist.ProcessGroup) -> None:
        """Tell the module that each sequence is cut over the ranks of ``group``.

        ``parallel.apply_context_parallel`` calls this method.
        """
        self.context = ShardedSequence(group)


class GroupedQueryAttention(_CausalAttention):
    """Causal grouped-query attention (Ainslie et al., arXiv 2305.13245) with rotary positions."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = c = config
        q, kv = c.num_heads * c.qk_head_dim, c.num_kv_heads * c.qk_head_dim
        bias = c.attention_bias != "none"
        self.wq = nn.Linear(c.d_model, q, bias=bias)
        self.wk = nn.Linear(c.d_model, kv, bias=bias)
        self.wv = nn.Linear(c.d_model, kv, bias=bias)
        self.wo = nn.Linear(q, c.d_model, bias=c.attention_bias == "all")
        sizes = {"none": None, "head": (c.qk_head_dim,) * 2, "all_heads": (q, kv)}[c.qk_norm]
        self.q_norm = RMSNorm(sizes[0], c.norm_eps) if sizes else None
        self.k_norm = RMSNorm(sizes[1], c.norm_eps) if sizes else None

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D].

        A token attends to itself and to earlier tokens: of its sequence, or with ``documents`` of
        its document.
        """
        S, c = x_BSD.shape[1], self.config
        by, pairs = turns_of(c, self.context.positions(S, x_BSD.device)), c.rope_interleaved
        q_BHSC = rotate_head(self._normed(self.wq(x_BSD), self.q_norm), by, pairs)
        k_BGSC = rotate_head(self._normed(self.wk(x_BSD), self.k_norm), by, pairs)
        v_BSGC = self._normed(self.wv(x_BSD), None).transpose(1, 2)
        k_BWGC, v_BWGC = self.context.gather(k_BGSC.transpose(1, 2), v_BSGC)
        k_BGWC, v_BGWC = k_BWGC.transpose(1, 2), v_BWGC.transpose(1, 2)
        y_BHSC = self.context.attend(
            AttentionCall(q_BHSC, k_BGWC, v_BGWC, c.softmax_scale, documents)
        )
        # y has the heads of this rank: tensor parallelism may have cut the projections.
        out: Tensor = self.wo(y_BHSC.transpose(1, 2).flatten(2))
        return out

    def _normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """[B, S, heads · C] -> [B, heads, S, C]."""
        if norm is not None and self.config.qk_norm == "all_heads":
            x = norm(x)
        x = x.view(*x.shape[:2], x.shape[2] // self.config.qk_head_dim, self.config.qk_head_dim)
        if norm is not None and self.config.qk_norm == "head":
            x = norm(x)
        return x.transpose(1, 2)


class LatentAttention(_CausalAttention):
    """Causal multi-head latent attention (DeepSeek-V3, arXiv 2412.19437, section 2.1.1).

    The keys and values of all heads are computed from one small vector for each token, the latent.
    All heads share the rotary part of the keys.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = c = config
        q = c.num_heads * c.qk_head_dim
        rank = c.q_lora_rank
        self.wq = None if rank else nn.Linear(c.d_model, q, bias=False)
        self.wq_a = nn.Linear(c.d_model, rank, bias=False) if rank else None
        self.q_a_norm = RMSNorm(rank, _LATENT_NORM_EPS) if rank else None
        self.wq_b = nn.Linear(rank, q, bias=False) if rank else None
        self.wkv_a = nn.Linear(c.d_model, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_norm = RMSNorm(c.kv_lora_rank, _LATENT_NORM_EPS)
        kv = c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.wkv_b = nn.Linear(c.kv_lora_rank, kv, bias=False)
        self.wo = nn.Linear(c.num_heads * c.v_head_dim, c.d_model, bias=False)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D].

        A token attends to itself and to earlier tokens: of its sequence, or with ``documents`` of
        its document.
        """
        B, S, _ = x_BSD.shape
        c = self.config
        N, P, V = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        q = self._queries(x_BSD)
        # H counts the heads of this rank: tensor parallelism may have cut the projections.
        H = q.shape[-1] // (N + P)
        q_BHSN, q_BHSP = q.view(B, S, H, N + P).transpose(1, 2).split((N, P), dim=-1)
        # Ranks exchange latents, which have about a hundredth of the bytes of keys and values.
        (gathered,) = self.context.gather(self.wkv_a(x_BSD))
        latent_BWR, k_BWP = gathered.split((c.kv_lora_rank, P), -1)
        W = latent_BWR.shape[1]
        kv = self.wkv_b(self.kv_a_norm(latent_BWR)).view(B, W, H, N + V).transpose(1, 2)
        k_BHWN, v_BHWV = kv.split((N, V), dim=-1)
        by_S = by_W = turns_of(c, self.context.positions(S, x_BSD.device))
        if W != S:  # where nothing was gathered, keys are of this rank's tokens
            by_W = turns_of(c, torch.arange(W, device=x_BSD.device))
        k_BHWP = rotate(k_BWP.unsqueeze(1), by_W, c.rope_interleaved).expand(B, H, W, P)
        q_BHSP = rotate(q_BHSP, by_S, c.rope_interleaved)
        q_BHSC, k_BHWC = torch.cat((q_BHSN, q_BHSP), -1), torch.cat((k_BHWN, k_BHWP), -1)
        y_BHSV = self.context.attend(
            AttentionCall(q_BHSC, k_BHWC, v_BHWV, c.softmax_scale, documents)
        )
        out: Tensor = self.wo(y_BHSV.transpose(1, 2).reshape(B, S, H * V))
        return out

    def _queries(self, x_BSD: Tensor) -> Tensor:
        # One projection; or a projection to the latent, its norm, and a projection to the heads.
        q = x_BSD
        for module in (self.wq, self.wq_a, self.q_a_norm, self.wq_b):
            q = q if module is None else module(q)
        return q


def build_attention(config: AttentionConfig) -> nn.Module:
    """The attention module that a config asks for."""
    return LatentAttention(config) if config.latent else GroupedQueryAttention(config)
