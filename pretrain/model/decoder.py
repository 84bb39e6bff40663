"""The reference decoder: attention and a MoE or dense feed-forward in every layer.

Legend: B batch, S sequence, D d_model, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe import FeedForward, MoEAux, MoEConfig, MoELayer
from parallel import Documents
from pretrain.model.attention import build_attention
from pretrain.model.config import ModelConfig
from pretrain.model.norm import RMSNorm


class DecoderOutput(NamedTuple):
    """Logits and what every MoE layer reports; a NamedTuple, so that FSDP sees the tensors."""

    logits: Tensor
    """[B, S, V]; from a stage without the last layer, the hidden states [B, S, D]."""
    aux: tuple[MoEAux, ...]
    """The report of each MoE layer, in order."""
    mtp_logits: tuple[Tensor, ...] = ()
    """[B, S, V] of each layer of multi-token prediction that was computed."""


class Block(nn.Module):
    """One layer: y = x + attention(norm(x)), then y + ffn(norm(y)), where ffn is a MoE or a dense
    MLP. With ``norm_after`` y = x + norm(attention(x)), then y + norm(ffn(y))."""

    def __init__(self, config: ModelConfig, moe: MoEConfig | None) -> None:
        super().__init__()
        self.norm_after = config.norm_after
        self.residual = 1.0 if config.multipliers is None else config.multipliers.residual
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = build_attention(config)
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.moe = MoELayer(moe) if moe is not None else None
        self.ffn = FeedForward(config.d_model, config.d_ff) if moe is None else None

    def forward(
        self,
        x_BSD: Tensor,
        prior_expert_counts_E: Tensor | None = None,
        documents: Documents | None = None,
        token_mask: Tensor | None = None,
    ) -> tuple[Tensor, MoEAux | None]:
        """[B, S, D] -> [B, S, D], and the MoE layer's report where there is one.

        ``token_mask`` is [B, S] bool for the MoE layer, false for padding.
        """
        aux: MoEAux | None = None
        h_BSD = x_BSD if self.norm_after else self.attention_norm(x_BSD)
        x_BSD = self._add(x_BSD, self.attention(h_BSD, documents), self.attention_norm)
        h_BSD = x_BSD if self.norm_after else self.ffn_norm(x_BSD)
        if self.moe is not None:
            h_BSD, aux = self.moe(h_BSD, None, prior_expert_counts_E, token_mask)
        else:
            assert self.ffn is not None
            h_BSD = self.ffn(h_BSD)
        return self._add(x_BSD, h_BSD, self.ffn_norm), aux

    def _add(self, x_BSD: Tensor, y_BSD: Tensor, norm: nn.Module) -> Tensor:
        """The residual stream with a sublayer's output."""
        y_BSD = norm(y_BSD) if self.norm_after else y_BSD
        return x_BSD + (y_BSD if self.residual == 1 else y_BSD * self.residual)


class MTPLayer(Block):
    """One layer of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    The k-th such layer (k = 1, 2, ...) combines, for a token i, the hidden state of the layer
    before with the embedding of token i + k (equation 21), and its output predicts token i + k + 1
    (equations 22 and 23). Embedding and head are those of the decoder. As in the released weights,
    the embedding comes first in the combination, and each layer has a norm before the head.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig | None) -> None:
        super().__init__(config, moe)
        self.embed_norm = RMSNorm(config.d_model, config.norm_eps)
        self.hidden_norm = RMSNorm(config.d_model, config.norm_eps)
        self.projection = nn.Linear(2 * config.d_model, config.d_model, bias=False)
        self.norm = RMSNorm(config.d_model, config.norm_eps)

    def forward(  # type: ignore[override]
        self,
        hidden_BSD: Tensor,
        embedded_BSD: Tensor,
        prior_expert_counts_E: Tensor | None = None,
        documents: Documents | None = None,
        token_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, MoEAux | None]:
        """Hidden states of the layer before, and embeddings of later tokens, [B, S, D] each ->
        hidden states for the next such layer, normed hidden states for the head, and the MoE
        layer's report where there is one."""
        both = self.embed_norm(embedded_BSD), self.hidden_norm(hidden_BSD)
        x_BSD = self.projection(torch.cat(both, dim=-1))
        x_BSD, aux = super().forward(x_BSD, prior_expert_counts_E, documents, token_mask)
        return x_BSD, self.norm(x_BSD), aux


class Decoder(nn.Module):
    """A causal language model, or some of its layers, such as a pipeline stage.

    The embedding is on the first stage; the last norm, the head and the layers of multi-token
    prediction are on the last stage. Either stage may have no other layer.
    A parameter has the same name in a stage as in the whole model. The constructor leaves
    parameters as torch initializes them; :func:`pretrain.model.init_parameters` sets initial
    weights that do not depend on the number of ranks.

    Args:
        config: of the whole model.
        moe: of its MoE layers; None for a dense model.
        layers: the numbers of the layers to build, in order; None builds all.
        first: build the embedding; None builds it with layer 0.
        last: build what comes after the last layer; None builds it with that layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig | None,
        layers: Iterable[int] | None = None,
        *,
        first: bool | None = None,
        last: bool | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        here = list(range(config.num_layers) if layers is None else layers)
        first = 0 in here if first is None else first
        last = config.num_layers - 1 in here if last is None else last
        self.embed = nn.Embedding(config.vocab_size, config.d_model) if first else None
        self.layers = nn.ModuleDict(
            {str(i): Block(config, moe if i >= config.first_k_dense else None) for i in here}
        )
        self.norm = RMSNorm(config.d_model, config.norm_eps) if last else None
        tied = config.tie_embeddings or not last
        self.head = None if tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.mtp: nn.ModuleDict | None = None
        if last and config.num_mtp_layers:
            numbers = map(str, range(config.num_mtp_layers))
            layers_of_mtp = nn.ModuleDict({i: MTPLayer(config, moe) for i in numbers})
            self.mtp = nn.ModuleDict({"layers": layers_of_mtp})

    @property
    def blocks(self) -> dict[int, Block]:
        """The layers of this module, by number; those of multi-token prediction have the numbers
        after the last layer's."""
        layers = {int(i): cast(Block, layer) for i, layer in self.layers.items()}
        after = enumerate(self.mtp_layers, start=self.config.num_layers)
        return {**layers, **dict(after)}

    @property
    def mtp_layers(self) -> list[MTPLayer]:
        """The layers of multi-token prediction, where they are here."""
        if self.mtp is None:
            return []
        return [cast(MTPLayer, layer) for layer in cast(nn.ModuleDict, self.mtp["layers"]).values()]

    def part(self, layers: Iterable[int], *, first: bool, last: bool) -> Decoder:
        """A decoder of some of these layers, with the embedding where it is the ``first`` part and
        with what comes after the last layer where it is the ``last``. It shares their modules and
        does not copy them."""
        part = Decoder(self.config, None, ())
        for i in layers:
            part.layers[str(i)] = self.layers[str(i)]
        if first:
            part.embed = self.embed
        if last:
            part.norm, part.head, part.mtp = self.norm, self.head, self.mtp
        return part

    def forward(
        self,
        tokens_BS: Tensor,
        counts_before: Sequence[Tensor] | None = None,
        documents: Documents | None = None,
        depth: int = 0,
        token_mask: Tensor | None = None,
    ) -> DecoderOutput:
        """[B, S] int64 token ids -> logits [B, S, V]; B may be 0.

        A stage without the first layer takes the hidden states of the layer before, [B, S, D].
        ``counts_before`` has, for each MoE layer, the ``expert_counts_E`` of the step's forwards
        before this one: load balancing over a global batch needs the counts. With ``documents``
        tokens attend only to tokens of their own document. ``documents`` describes whole sequences,
        also where ranks share a sequence. Positions are counted from the beginning of a sequence
        and not of a document: attention depends on differences of positions alone.

        With ``depth`` > 0 so many layers of multi-token prediction are computed. The input is then
        [(1 + depth) · B, S]: after the sequences come the sequences shifted by one token, by two,
        and so on. A stage passes the embeddings of those on, after its hidden states,
        [(1 + depth) · B, S, D]: the last stage needs them and has no embedding.

        ``token_mask`` is bool, of the shape of a layer's hidden states without their last dim, and
        false for padding, which MoE layers leave out; None where all inputs are tokens.
        """
        x_BSD = tokens_BS if self.embed is None else self._embedded(tokens_BS)
        # tensor_split, because split() and chunk() give one piece of an empty micro-batch.
        x_BSD, *later = x_BSD.tensor_split(1 + depth) if depth else (x_BSD,)
        reports: list[MoEAux] = []

        def before(block: Block) -> Tensor | None:
            return counts_before[len(reports)] if counts_before and block.moe is not None else None

        for layer in self.layers.values():
            block = cast(Block, layer)
            x_BSD, aux = block(x_BSD, before(block), documents, token_mask)
            reports += [] if aux is None else [aux]
        if self.norm is None:
            return DecoderOutput(torch.cat((x_BSD, *later)) if depth else x_BSD, tuple(reports))
        x_BSD = self.norm(x_BSD)
        logits, mtp_logits = self._logits(x_BSD), []
        for mtp_layer, embedded_BSD in zip(self.mtp_layers, later, strict=False):
            x_BSD, normed_BSD, aux = mtp_layer(
                x_BSD, embedded_BSD, before(mtp_layer), documents, token_mask
            )
            reports += [] if aux is None else [aux]
            mtp_logits.append(self._logits(normed_BSD))
        return DecoderOutput(logits, tuple(reports), tuple(mtp_logits))

    def _embedded(self, tokens_BS: Tensor) -> Tensor:
        assert self.embed is not None
        x_BSD: Tensor = self.embed(tokens_BS)
        factors = self.config.multipliers
        return x_BSD if factors is None else x_BSD * factors.embedding

    def _logits(self, x_BSD: Tensor) -> Tensor:
        if self.config.multipliers is not None:
            # There are fewer hidden states than logits.
            x_BSD = x_BSD / self.config.multipliers.logits
        if self.head is not None:
            logits: Tensor = self.head(x_BSD)
            return logits
        assert self.embed is not None, "tied matrices are on one rank"
        project: Callable[..., Tensor] = getattr(self.embed, "project", F.linear)
        return project(x_BSD, self.embed.weight)


def meta_decoder(model: ModelConfig, moe: MoEConfig | None) -> Decoder:
    """The decoder on the meta device: names, shapes and dtypes without storage."""
    with torch.device("meta"):
        return Decoder(model, moe)
