"""The ``[model]`` section of the spec, all of the decoder but its MoE layers, and ``[mtp]``."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from pretrain.section import OnResume, Section, check_order

QKNorm = Literal["none", "head", "all_heads"]
AttentionBias = Literal["none", "qkv", "all"]


class YarnConfig(Section):
    """The ``[model.yarn]`` section: rotary frequencies for longer sequences than were trained on.

    YaRN (Peng et al., arXiv 2309.00071, section 3), with the magnitudes of DeepSeek-V3's code.
    """

    on_resume = OnResume.FIXED

    factor: float = Field(ge=1)
    """The new sequence length as a multiple of ``original_seq_len``."""
    original_seq_len: int = Field(ge=1)
    """Tokens of a sequence in the training before."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Pairs with more rotations than this over the original length keep their frequency."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Pairs with fewer rotations than this are slowed down by the whole factor."""
    mscale: float = Field(default=0.0, ge=0)
    """With latent attention: the weight of log(factor) in the magnitude of the rotary part."""
    mscale_all_dim: float = Field(default=0.0, ge=0)
    """With latent attention: the weight of log(factor) in the magnitude of all logits; above 0
    together with ``mscale``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"model.yarn.beta_fast ({self.beta_fast}) must be above model.yarn.beta_slow "
                f"({self.beta_slow})"
            )
        if (self.mscale > 0) != (self.mscale_all_dim > 0):
            raise ValueError(
                f"model.yarn.mscale ({self.mscale}) and model.yarn.mscale_all_dim "
                f"({self.mscale_all_dim}) must both be above 0, or both 0"
            )
        return self

    @property
    def rotary_scale(self) -> float:
        """The factor of the rotary part of queries, and of the rotary part of keys."""
        if self.mscale == 0:
            return self._magnitude(1.0)
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def logit_scale(self) -> float:
        """A further factor of attention logits."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def turns_dim(self, turns: float, size: int, theta: float) -> float:
        """The index of the pair that makes ``turns`` turns over ``original_seq_len`` positions.

        The index is a real number: arXiv 2309.00071, equation 17.
        """
        wavelength = self.original_seq_len / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(theta))


class MultipliersConfig(Section):
    """The ``[model.multipliers]`` section: constant factors in the decoder, as Granite has them.

    They are the four of maximal update parametrization with a depth factor (Yang et al., arXiv
    2203.03466, table 3; Granite's names end in ``_multiplier`` and ``_scaling``).
    """

    on_resume = OnResume.FIXED

    embedding: float = Field(default=1.0, gt=0)
    """What embeddings are multiplied by before the first layer."""
    attention: float = Field(default=0.0, ge=0)
    """What inner products of queries and keys are multiplied by; 0 takes 1 / sqrt(head size)."""
    residual: float = Field(default=1.0, gt=0)
    """What the output of attention, and that of a feed-forward, is multiplied by before it is added
    to the residual stream."""
    logits: float = Field(default=1.0, gt=0)
    """What logits are divided by."""


class AttentionConfig(Section):
    """The attention fields of the ``[model]`` section."""

    on_resume = OnResume.FIXED

    d_model: int = Field(ge=1)
    """The size of the residual stream."""
    num_heads: int = Field(ge=1)
    """The number of query heads."""
    num_kv_heads: int = Field(ge=1)
    """The number of key-value heads (grouped-query attention, Ainslie et al., arXiv 2305.13245)."""
    head_dim: int | None = Field(default=None, ge=1)
    """The size of one head; d_model / num_heads by default."""
    qk_norm: QKNorm = "head"
    """RMSNorm of queries and keys: of each head, or of all heads as one vector."""
    attention_bias: AttentionBias = "none"
    """Biases of attention's projections: of those of queries, keys and values, or of the output's
    too."""
    kv_lora_rank: int = Field(default=0, ge=0)
    """Above 0: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), whose keys
    and values come from a latent vector of this size. 0: grouped-query attention."""
    q_lora_rank: int = Field(default=0, ge=0)
    """With latent attention: queries come from a latent vector of this size; 0 takes the input."""
    qk_nope_head_dim: int = Field(default=0, ge=0)
    """With latent attention: the part of a query and key head without rotary positions."""
    qk_rope_head_dim: int = Field(default=0, ge=0)
    """The part of a query and key head with rotary positions. With latent attention the last
    numbers of a head; otherwise the first ones, and 0 rotates the whole head."""
    v_head_dim: int = Field(default=0, ge=0)
    """With latent attention: the size of a value head."""
    rope_theta: float = Field(default=10000.0, gt=1)
    """The base of the rotary frequencies (Su et al., arXiv 2104.09864)."""
    rope_interleaved: bool = False
    """Rotary pairs are neighbours (2i, 2i + 1), and not (i, i + half)."""
    yarn: YarnConfig | None = None
    """Scaling of the rotary frequencies for long sequences; none without this table."""
    multipliers: MultipliersConfig | None = None
    """Constant factors; none without this table."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square in every RMSNorm of the decoder's layers."""

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        if self.latent:
            self._check_latent()
        else:
            self._check_grouped()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads ({self.num_heads}) must be a multiple of model.num_kv_heads "
                f"({self.num_kv_heads})"
            )
        return self

    def _check_grouped(self) -> None:
        if self.head_dim is None and (self.d_model % self.num_heads or self.qk_head_dim % 2):
            raise ValueError(
                f"model.d_model ({self.d_model}) must be an even multiple of model.num_heads "
                f"({self.num_heads}): rotary embedding turns pairs within a head"
            )
        if self.qk_head_dim % 2:
            raise ValueError(
                f"model.head_dim ({self.head_dim}) must be even: rotary embedding turns pairs "
                f"within a head"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.qk_head_dim:
            raise ValueError(
                f"model.qk_rope_head_dim ({self.qk_rope_head_dim}) must be even and at most the "
                f"size of a head ({self.qk_head_dim}): rotary embedding turns pairs within a head"
            )
        for field in ("q_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            if getattr(self, field):
                raise ValueError(
                    f"model.{field} ({getattr(self, field)}) must be 0 where model.kv_lora_rank "
                    f"is 0: it is of latent attention"
                )
        if self.yarn is not None and self.yarn.mscale:
            raise ValueError(
                f"model.yarn.mscale ({self.yarn.mscale}) must be 0 where model.kv_lora_rank is 0: "
                f"it is of latent attention"
            )

    def _check_latent(self) -> None:
        latent = f"with model.kv_lora_rank ({self.kv_lora_rank})"
        for field in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, field) == 0:
                raise ValueError(f"model.{field} (0) must be at least 1 {latent}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"model.qk_rope_head_dim ({self.qk_rope_head_dim}) must be even: rotary embedding "
                f"turns pairs"
            )
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"model.num_kv_heads ({self.num_kv_heads}) must be model.num_heads "
                f"({self.num_heads}) {latent}"
            )
        if self.head_dim is not None:
            raise ValueError(f"model.head_dim ({self.head_dim}) must be left out {latent}")
        for field, why in (
            ("qk_norm", "the latents are normed"),
            ("attention_bias", "its projections have no biases"),
        ):
            if getattr(self, field) != "none":
                raise ValueError(
                    f"model.{field} ({getattr(self, field)}) must be none {latent}: {why}"
                )

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def qk_head_dim(self) -> int:
        """Size of a query's or key's head."""
        if self.latent:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor of attention logits."""
        scale = 1 / math.sqrt(self.qk_head_dim)
        if self.multipliers is not None and self.multipliers.attention:
            scale = self.multipliers.attention
        return scale if self.yarn is None else scale * self.yarn.logit_scale


class ModelConfig(AttentionConfig):
    """The ``[model]`` section: everything of the decoder but its MoE layers."""

    vocab_size: int = Field(ge=257)
    """Tokens of the vocabulary; at least every byte and the end of a document."""
    num_layers: int = Field(ge=1)
    """Layers of the decoder."""
    d_ff: int = Field(default=0, ge=0)
    """The hidden size of a dense feed-forward layer; 0 where no layer is dense."""
    first_k_dense: int = Field(default=0, ge=0)
    """The number of first layers that are dense although there is a ``[moe]`` section."""
    num_mtp_layers: int = Field(default=0, ge=0, le=8)
    """Layers of multi-token prediction after the last layer: each predicts one token further than
    the one before (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    norm_after: bool = False
    """Norm the outputs of attention and of the feed-forward, and not their inputs (OLMo 2, arXiv
    2501.00656, section 3.2)."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output matrix too."""
    max_seq_len: int = Field(default=0, ge=0)
    """The longest sequence that the model is meant for, an upper bound of ``data.seq_len``; 0 sets
    no bound."""

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.first_k_dense > self.num_layers:
            raise ValueError(
                f"model.first_k_dense ({self.first_k_dense}) must be at most model.num_layers "
                f"({self.num_layers})"
            )
        return self

    @property
    def moe_layers(self) -> list[int]:
        """The numbers of the layers that are MoE layers where there is a ``[moe]`` section; layers
        of multi-token prediction come after the last layer."""
        return list(range(self.first_k_dense, self.num_layers + self.num_mtp_layers))


class MTPStage(Section):
    """The ``[[mtp.stages]]`` tables: another weight from some tokens on."""

    on_resume = OnResume.FREE

    from_tokens: int = Field(ge=1)
    """The stage begins with the first step after this many target tokens of the run."""
    loss_weight: float = Field(ge=0)
    """The weight in the stage."""


class MTPConfig(Section):
    """The ``[mtp]`` section: the loss of multi-token prediction, where ``model.num_mtp_layers`` is
    above 0."""

    on_resume = OnResume.FREE

    loss_weight: float = Field(default=0.3, ge=0)
    """What the mean of the layers' losses is multiplied by before it is added to the loss
    (lambda in DeepSeek-V3, arXiv 2412.19437, equation 25)."""
    stages: list[MTPStage] = Field(default_factory=list)
    """Changes of the weight. DeepSeek-V3 had 0.3, and 0.1 after the first 10 T tokens (section
    4.2)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_order("mtp.stages", [stage.from_tokens for stage in self.stages])
        return self

    def weight_at(self, tokens: int) -> float:
        """The weight of the step before which the run has had so many target tokens."""
        begun = [stage.loss_weight for stage in self.stages if stage.from_tokens <= tokens]
        return begun[-1] if begun else self.loss_weight
