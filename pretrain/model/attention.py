"""Attention of the reference decoder, grouped-query and multi-head latent, with rotary positions.

Legend: B batch, S tokens of a sequence that are here, W those of the whole sequence, D d_model,
H heads, G key-value heads; sizes of a head: C of a query or key, P of its rotary part, N of the
rest, V of a value; R kv_lora_rank.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import Documents
from parallel.apply import AttentionCall, FullSequence, SequenceContext, ShardedSequence
from pretrain.model.config import AttentionConfig, YarnConfig
from pretrain.model.norm import RMSNorm

_LATENT_NORM_EPS = 1e-6
"""The epsilon of the norms of latents, from DeepSeek-V3; ``norm_eps`` is for the other norms."""


def rope_frequencies(
    size: int, theta: float, yarn: YarnConfig | None, device: torch.device
) -> Tensor:
    """Radians per position of every pair of a rotary part, [size / 2] float32.

    Pair i has theta ** (-2i / size) (Su et al., arXiv 2104.09864, section 3.2.2). With ``yarn`` the
    frequencies of slow pairs are divided by ``yarn.factor``, those of fast pairs are kept, and a
    linear ramp blends both for the pairs between (arXiv 2309.00071, section 3.2). The ends of the
    ramp are integers, as in the authors' code.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequencies = 1.0 / theta**exponents
    if yarn is None:
        return frequencies
    low: float = max(math.floor(yarn.turns_dim(yarn.beta_fast, size, theta)), 0)
    high: float = min(math.ceil(yarn.turns_dim(yarn.beta_slow, size, theta)), size - 1)
    if low == high:
        high += 0.001
    dims = torch.arange(size // 2, dtype=torch.float32, device=device)
    slowed = ((dims - low) / (high - low)).clamp(0, 1)
    return frequencies / yarn.factor * slowed + frequencies * (1 - slowed)


def rotate(
    x_BHSP: Tensor,
    frequencies: Tensor,
    scale: float = 1.0,
    interleaved: bool = False,
    positions_S: Tensor | None = None,
) -> Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864, eq. 34), times ``scale``.

    Pairs are (i, i + P/2), or with ``interleaved`` (2i, 2i + 1). In both cases the first half of
    the result has the first members of the pairs. Queries and keys are permuted in the same way,
    and their inner products do not change. Positions are 0 to S - 1 where ``positions_S`` is None.
    """
    if positions_S is None:
        positions_S = torch.arange(x_BHSP.shape[-2], device=x_BHSP.device)
    angles_SP = torch.outer(positions_S.float(), frequencies)
    angles_S1P = angles_SP.unsqueeze(1)
    cos, sin = angles_S1P.cos() * scale, angles_S1P.sin() * scale
    # In memory a token's heads stay together, as in projections: attention's output has the layout
    # of its queries, and needs no copy before the output's projection.
    x = x_BHSP.transpose(-3, -2).float()
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BHSP.dtype)
    return rotated.transpose(-3, -2)


def rotate_as(config: AttentionConfig, x_BHSP: Tensor, positions_S: Tensor | None = None) -> Tensor:
    """Rotary position embedding with a config's frequencies, magnitude and pairs; of all numbers of
    a head."""
    frequencies = rope_frequencies(x_BHSP.shape[-1], config.rope_theta, config.yarn, x_BHSP.device)
    scale = 1.0 if config.yarn is None else config.yarn.rotary_scale
    return rotate(x_BHSP, frequencies, scale, config.rope_interleaved, positions_S)


def rotate_head(config: AttentionConfig, x_BHSC: Tensor, positions_S: Tensor) -> Tensor:
    """The same of a head's first ``qk_rope_head_dim`` numbers; of all where that is 0."""
    rotary = config.qk_rope_head_dim or x_BHSC.shape[-1]
    if rotary == x_BHSC.shape[-1]:
        return rotate_as(config, x_BHSC, positions_S)
    x_BHSP, rest = x_BHSC.tensor_split((rotary,), dim=-1)
    # In memory a token's heads stay together, as in `rotate`.
    parts = rotate_as(config, x_BHSP, positions_S).transpose(-3, -2), rest.transpose(-3, -2)
    return torch.cat(parts, dim=-1).transpose(-3, -2)


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
        at = self.context.positions(S, x_BSD.device)
        q_BHSC = rotate_head(c, self._normed(self.wq(x_BSD), self.q_norm), at)
        k_BGSC = rotate_head(c, self._normed(self.wk(x_BSD), self.k_norm), at)
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
        at_S = self.context.positions(S, x_BSD.device)
        # Where nothing was gathered, keys are of this rank's tokens.
        at_W = at_S if W == S else None
        k_BHWP = rotate_as(c, k_BWP.unsqueeze(1), at_W).expand(B, H, W, P)
        q_BHSP = rotate_as(c, q_BHSP, at_S)
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
