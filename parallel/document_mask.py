"""Documents packed into sequences: tokens attend to their own document alone.

Legend: B batch, W tokens of a whole sequence, S queries, W' keys up to the last query's, H heads, G
key-value heads, C size of a head, V of a value's.

Two paths, chosen in :func:`attend_within`. The plain one is a product under a mask, which computes
all pairs, those across documents too; accelerators take it, but none has run it yet. The fast one
calls attention's kernel for each document. Milliseconds of one core for forward and backward of 8
heads of 32 in float32, 4 sequences of 512 tokens and 2 of 2,048, by tokens of a document (150 is
the median of lengths with a log-normal spread of 1):

                              512 tokens of a sequence        2,048
                                1    8   64  150  all      1    8   64  150  all
    under a mask               66   66   66   67   67    575  561  547  563  559
    document by document       66   20   14   37   62    154   44   25   84  297
    the same, small together   10   12   14   36   62     25   24   27   84  298

Calls for documents of few tokens cost more than their pairs, and make many nodes for the backward:
so those that follow each other share one, under a small mask. At no length was that slower than one
mask for all beyond what repeats differ by, and so a CPU always takes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUP_TOKENS = 32
"""Documents share a call up to here, so that a sequence has at most W / 16 + 1; 16 and 64 are about
as fast."""


class Calls(NamedTuple):
    """How one sequence's queries and keys are cut, each piece of queries with one of keys."""

    queries: list[int]
    """Lengths, from the first query on."""
    keys: list[int]
    """Lengths, from the first key that any query sees on."""
    before: int
    """Keys in front of those."""
    masks: list[Tensor | None]
    """[queries, keys] bool; None for plain causal attention of as many keys as queries."""


class Documents:
    """Which tokens of a micro-batch's sequences belong together.

    What attention needs of it is made when the first layer asks, and kept for the others. Not a
    dataclass and no tuple: FSDP would hand each layer a copy.

    Args:
        numbers_BW: int64, the number of each token's document, which never falls along a sequence.
    """

    def __init__(self, numbers_BW: Tensor) -> None:
        self.numbers_BW = numbers_BW
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._calls: dict[tuple[int, int], list[Calls]] = {}

    @classmethod
    def ended_by(cls, end_token: int, tokens_BW: Tensor) -> Documents:
        """Those of int64 token ids, each with the end token that ends it."""
        ends_BW = (tokens_BW == end_token).long()
        return cls(ends_BW.cumsum(1) - ends_BW)

    def mask(self, first: int, length: int) -> Tensor:
        """[B, 1, S, W'] bool: what ``length`` queries see, the first of them at ``first``."""
        if (first, length) not in self._masks:
            seen = _seen(self.numbers_BW[:, : first + length], first)
            self._masks[first, length] = seen.unsqueeze(1)
        return self._masks[first, length]

    def calls(self, first: int, length: int) -> list[Calls]:
        """The same as calls of attention, for each sequence; waits for an accelerator."""
        if (first, length) not in self._calls:
            rows = self.numbers_BW[:, : first + length]
            self._calls[first, length] = [_calls(row_W, first) for row_W in rows]
        return self._calls[first, length]


def _seen(numbers_XW: Tensor, first: int) -> Tensor:
    """[..., W] -> [..., W - first, W] bool: the keys of each query from ``first`` on."""
    same = numbers_XW[..., first:].unsqueeze(-1) == numbers_XW.unsqueeze(-2)
    return same.tril(first)


def _calls(numbers_W: Tensor, first: int) -> Calls:
    groups: list[tuple[int, int, bool]] = []  # start, stop, and whether a mask is needed
    stop = 0
    for length in numbers_W.unique_consecutive(return_counts=True)[1].tolist():
        start, stop = stop, stop + length
        if stop <= first:
            continue
        if groups and stop - groups[-1][0] <= _GROUP_TOKENS:
            groups[-1] = groups[-1][0], stop, True
        else:
            groups.append((start, stop, start < first))
    return Calls(
        [stop - max(start, first) for start, stop, _ in groups],
        [stop - start for start, stop, _ in groups],
        groups[0][0],
        [
            _seen(numbers_W[start:stop], max(first - start, 0)) if masked else None
            for start, stop, masked in groups
        ],
    )


def attend_within(
    q_BHSC: Tensor,
    k_BGWC: Tensor,
    v_BGWV: Tensor,
    scale: float,
    documents: Documents,
    first: int = 0,
) -> Tensor:
    """Causal attention within documents: [B, H, S, V].

    Args:
        q_BHSC: queries of the positions from ``first`` on.
        k_BGWC: keys of the whole sequence.
        v_BGWV: values of the whole sequence.
        scale: of the logits.
        documents: of the whole sequences.
        first: the position of the first query.
    """
    # An accelerator would be waited for to know where documents end.
    on_host = q_BHSC.device.type == "cpu" and len(q_BHSC) > 0
    how = attend_by_document if on_host else attend_masked
    return how(q_BHSC, k_BGWC, v_BGWV, scale, documents, first)


def attend_masked(
    q_BHSC: Tensor,
    k_BGWC: Tensor,
    v_BGWV: Tensor,
    scale: float,
    documents: Documents,
    first: int = 0,
) -> Tensor:
    """See :func:`attend_within`: the plain path, on any device."""
    H, S = q_BHSC.shape[1:3]
    k, v = k_BGWC[:, :, : first + S], v_BGWV[:, :, : first + S]
    # CUDA's memory-efficient kernel takes a mask, but no grouped heads.
    if k.shape[1] != H:
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q_BHSC, k, v, attn_mask=documents.mask(first, S), scale=scale
    )


def attend_by_document(
    q_BHSC: Tensor,
    k_BGWC: Tensor,
    v_BGWV: Tensor,
    scale: float,
    documents: Documents,
    first: int = 0,
) -> Tensor:
    """See :func:`attend_within`: the fast path, on a CPU, of at least one sequence."""
    S, W = q_BHSC.shape[2], k_BGWC.shape[2]
    gqa = q_BHSC.shape[1] != k_BGWC.shape[1]
    rows = []
    # Splits and not slices: the backward of a slice fills a tensor of the whole's size.
    for q, k, v, calls in zip(
        q_BHSC.split(1), k_BGWC.split(1), v_BGWV.split(1), documents.calls(first, S), strict=True
    ):
        cuts = [calls.before, *calls.keys, W - first - S]
        pieces = zip(
            q.split(calls.queries, 2), k.split(cuts, 2)[1:-1], v.split(cuts, 2)[1:-1], calls.masks,
            strict=True,
        )  # fmt: skip
        parts = [
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
            )
            for q, k, v, mask in pieces
        ]
        rows.append(torch.cat(parts, 2))
    return torch.cat(rows)
