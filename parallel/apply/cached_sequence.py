"""Keys and values of earlier tokens, kept while a model generates text token by token.

Legend: B batch, S tokens of this forward, W tokens so far with these, H heads, G key-value heads, C
size of a head's key, V size of a head's value.

A cache is one more kind of :class:`parallel.apply.context_parallel.SequenceContext`: attention
gathers keys and values (with latent attention: latents) from the tokens before, as it gathers them
from other ranks in context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from parallel.apply.context_parallel import FullSequence, sequence_contexts
from parallel.apply.document_mask import AttentionCall

KEYS_OF_A_BLOCK = 512
"""``kvSplitSize`` of FlashAttention for CPUs in PyTorch 2.13, aten/src/ATen/native/cpu."""


class SequenceCache:
    """How many tokens the attention modules of a model keep.

    A forward computes on tokens that follow the first ``length`` ones, and stores theirs behind
    these. The caller says with :meth:`keep` how many tokens stay; the next forward writes over the
    others, as over padding.

    Args:
        max_tokens: for which there is room.
        like_whole: compute with as many keys as a forward of a whole sequence of ``max_tokens``
            tokens does: see :meth:`num_keys`.
    """

    def __init__(self, max_tokens: int, like_whole: bool = False) -> None:
        self.max_tokens, self.like_whole = max_tokens, like_whole
        self.length = 0

    def num_keys(self, tokens: int) -> int:
        """How many keys attention computes with, of which the first ``tokens`` are those so far.

        How a sum over keys rounds depends on their number. PyTorch's kernel for CPUs takes blocks
        of :data:`KEYS_OF_A_BLOCK` keys, the last one shorter, and a masked key adds zero. So a
        query has the bits of a whole sequence's forward where its last block is whole.
        """
        if not self.like_whole:
            return tokens
        blocks = -(-tokens // KEYS_OF_A_BLOCK)
        return max(tokens, min(blocks * KEYS_OF_A_BLOCK, self.max_tokens))

    def keep(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens of those so far; with 0 the next forward begins a
        sequence."""
        assert 0 <= tokens <= self.max_tokens, (tokens, self.max_tokens)
        self.length = tokens


class CachedSequence:
    """This rank has every token of the sequences; an attention module keeps its part of them.

    Args:
        cache: which tokens are kept; of all attention modules of a model.
    """

    def __init__(self, cache: SequenceCache) -> None:
        self.cache = cache
        self._kept: list[Tensor] = []

    def positions(self, length: int, device: torch.device) -> Tensor:
        """[S] int64: positions in the sequence of the ``length`` tokens of this forward."""
        start = self.cache.length
        return torch.arange(start, start + length, device=device)

    def gather(self, *tensors_BSX: Tensor) -> tuple[Tensor, ...]:
        """[B, S, ...] of this forward -> [B, W, ...] of all tokens so far, for each tensor."""
        start, count = self.cache.length, tensors_BSX[0].shape[1]
        num_keys = self.cache.num_keys(start + count)
        size = max(self.cache.max_tokens, num_keys)  # padding needs room too
        if not self._kept or self._kept[0].shape[1] < size:
            before, self._kept = self._kept, []
            for x in tensors_BSX:
                self._kept.append(x.new_zeros(x.shape[0], size, *x.shape[2:]))
            for kept, old in zip(self._kept, before, strict=False):
                kept[:, : old.shape[1]] = old
        for kept, x in zip(self._kept, tensors_BSX, strict=True):
            kept[:, start : start + count] = x
        return tuple(kept[:, :num_keys] for kept in self._kept)

    def attend(self, call: AttentionCall) -> Tensor:
        """Causal attention of this forward's queries to all tokens so far: [B, H, S, V]. All tokens
        are of one document."""
        assert call.documents is None
        S, W = call.q_BHSC.shape[2], call.k_BGWC.shape[2]
        seen_SW = torch.ones(S, W, dtype=torch.bool, device=call.q_BHSC.device)
        return call.computed(seen_SW.tril(self.cache.length))


@contextmanager
def full_sequences(
    model: nn.Module, kept_tokens: int = 0, *, like_whole: bool = False
) -> Iterator[SequenceCache]:
    """Inside the ``with`` block every rank computes on full sequences, of any length.

    For forwards without gradients.

    Args:
        model: whose attention modules take part.
        kept_tokens: of so many tokens keys and values are kept, for forwards of the tokens that
            follow, of a constant number of sequences. With 0 each forward has whole sequences.
        like_whole: give each token the bits that it has in a forward of a whole sequence of
            ``kept_tokens`` tokens, on a CPU. Each forward must then have at least 32 tokens.

    Returns:
        What says which tokens are kept; nothing is kept until its ``keep`` is called.
    """
    cache = SequenceCache(kept_tokens, like_whole)
    with sequence_contexts(model, lambda: CachedSequence(cache) if kept_tokens else FullSequence()):
        yield cache
