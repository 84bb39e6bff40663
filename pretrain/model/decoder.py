"""The reference decoder: pre-norm attention and a MoE or dense feed-forward in every layer.

Legend: B batch, S sequence, D d_model, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe import FeedForward, MoEAux, MoEConfig, MoELayer
from parallel import Documents
from pretrain.model.attention import AttentionConfig, build_attention


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


class DecoderOutput(NamedTuple):
    """Logits and what every MoE layer reports; a NamedTuple, so that FSDP sees the tensors."""

    logits: Tensor
    """[B, S, V]; from a stage without the last layer, the hidden states [B, S, D]."""
    aux: tuple[MoEAux, ...]
    """The report of each MoE layer, in order."""


class DecoderLayer(nn.Module):
    """y = x + attention(norm(x)), then y + ffn(norm(y)), where ffn is a MoE or a dense MLP."""

    def __init__(self, config: ModelConfig, moe: MoEConfig | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.attention = build_attention(config)
        self.ffn_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.moe = MoELayer(moe) if moe is not None else None
        self.ffn = FeedForward(config.d_model, config.d_ff) if moe is None else None

    def forward(
        self,
        x_BSD: Tensor,
        prior_expert_counts_E: Tensor | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, MoEAux | None]:
        """[B, S, D] -> [B, S, D], and the MoE layer's report where there is one."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), documents)
        h_BSD = self.ffn_norm(x_BSD)
        if self.moe is not None:
            hidden, aux = self.moe(h_BSD, prior_expert_counts_E=prior_expert_counts_E)
            return x_BSD + hidden, aux
        assert self.ffn is not None
        return x_BSD + self.ffn(h_BSD), None


class Decoder(nn.Module):
    """A causal language model, or some of its layers, such as a pipeline stage.

    The embedding belongs to the first layer; the last norm and the head belong to the last layer.
    A parameter has the same name in a stage as in the whole model. The constructor leaves
    parameters as torch initializes them; :func:`pretrain.model.init_parameters` sets initial
    weights that do not depend on the number of ranks.

    Args:
        config: of the whole model.
        moe: of its MoE layers; None for a dense model.
        layers: the numbers of the layers to build, in order; None builds all.
    """

    def __init__(
        self, config: ModelConfig, moe: MoEConfig | None, layers: Iterable[int] | None = None
    ) -> None:
        super().__init__()
        self.config = config
        here = list(range(config.num_layers) if layers is None else layers)
        self.embed = nn.Embedding(config.vocab_size, config.d_model) if 0 in here else None
        self.layers = nn.ModuleDict(
            {str(i): DecoderLayer(config, moe if i >= config.first_k_dense else None) for i in here}
        )
        last = config.num_layers - 1 in here
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps) if last else None
        tied = config.tie_embeddings or not last
        self.head = None if tied else nn.Linear(config.d_model, config.vocab_size, bias=False)

    @property
    def blocks(self) -> dict[int, DecoderLayer]:
        """The layers of this module, by number."""
        return {int(i): cast(DecoderLayer, layer) for i, layer in self.layers.items()}

    def part(self, layers: Iterable[int]) -> Decoder:
        """A decoder of some of these layers. It shares their modules and does not copy them."""
        part = Decoder(self.config, None, ())
        for i in layers:
            part.layers[str(i)] = self.layers[str(i)]
            if i == 0:
                part.embed = self.embed
            if i == self.config.num_layers - 1:
                part.norm, part.head = self.norm, self.head
        return part

    def forward(
        self,
        tokens_BS: Tensor,
        counts_before: Sequence[Tensor] | None = None,
        documents: Documents | None = None,
    ) -> DecoderOutput:
        """[B, S] int64 token ids -> logits [B, S, V]; B may be 0.

        A stage without the first layer takes the hidden states of the layer before, [B, S, D].
        ``counts_before`` has, for each MoE layer, the ``expert_counts_E`` of the step's forwards
        before this one: load balancing over a global batch needs the counts. With ``documents``
        tokens attend only to tokens of their own document. ``documents`` describes whole sequences,
        also where ranks share a sequence. Positions are counted from the beginning of a sequence
        and not of a document: attention depends on differences of positions alone.
        """
        x_BSD = tokens_BS if self.embed is None else self.embed(tokens_BS)
        reports: list[MoEAux] = []
        for layer in self.blocks.values():
            before = (
                counts_before[len(reports)] if counts_before and layer.moe is not None else None
            )
            x_BSD, aux = layer(x_BSD, before, documents)
            if aux is not None:
                reports.append(aux)
        if self.norm is None:
            return DecoderOutput(x_BSD, tuple(reports))
        x_BSD = self.norm(x_BSD)
        if self.head is not None:
            return DecoderOutput(self.head(x_BSD), tuple(reports))
        assert self.embed is not None, "tied matrices are on one rank"
        return DecoderOutput(F.linear(x_BSD, self.embed.weight), tuple(reports))


def meta_decoder(model: ModelConfig, moe: MoEConfig | None) -> Decoder:
    """The decoder on the meta device: names, shapes and dtypes without storage."""
    with torch.device("meta"):
        return Decoder(model, moe)
