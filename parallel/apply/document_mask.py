"""Documents packed into sequences: a token attends to tokens of its own document only.

Legend: B batch, W tokens of a full sequence, S queries, W' keys up to the last query's, H heads, G
key-value heads, C size of a head's key, V size of a head's value.

:func:`attend_within` chooses between two paths. The plain path is attention under one mask, which
computes all pairs of tokens, also across documents; accelerators take this path, and no GPU has run
it yet. The fast path calls attention's kernel for each document. Milliseconds on one core for
forward and backward of 8 heads of size 32 in float32, with 4 sequences of 512 tokens or 2 of 2,048,
by tokens of a document (150 is the median of lengths with a log-normal spread of 1):

                              512 tokens of a sequence        2,048
                                1    8   64  150  all      1    8   64  150  all
    one mask                   66   66   66   67   67    575  561  547  563  559
    one call a document        66   20   14   37   62    154   44   25   84  297
    small documents share      10   12   14   36   62     25   24   27   84  298

A call for a document of few tokens costs more than the pairs that the call saves, and adds nodes to
the backward: so small neighbouring documents share one call under a small mask. At no length was
sharing slower than one mask, beyond the noise of repeats; a CPU always takes this path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUP_TOKENS = 32
"""Most tokens of the documents that share one call. A sequence then has at most W / 16 + 1 calls.
16 and 64 are about as fast."""


class Calls(NamedTuple):
    """The calls of attention for one sequence: each has a run of queries and a run of keys."""

    queries: list[int]
    """Number of queries of each call, from the first query on."""
    keys: list[int]
    """Number of keys of each call, from the first key that any query sees on."""
    before: int
    """Number of keys before the first call's."""
    masks: list[Tensor | None]
    """[queries, keys] bool; None for plain causal attention of as many keys as queries."""


class Documents:
    """The document of each token of a micro-batch.

    Masks and calls are made when the first layer asks, and kept for the other layers. The class is
    neither a dataclass nor a tuple: FSDP copies those for each layer.

    Args:
        numbers_BW: [B, W] int64, the number of each token's document, not decreasing along a
            sequence.
    """

    def __init__(self, numbers_BW: Tensor) -> None:
        self.numbers_BW = numbers_BW
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._calls: dict[tuple[int, int], list[Calls]] = {}

    @classmethod
    def ended_by(cls, end_token: int, tokens_BW: Tensor) -> Documents:
        """The documents of [B, W] int64 token ids; a document includes the token that ends it."""
        ends_BW = (tokens_BW == end_token).long()
        return cls(ends_BW.cumsum(1) - ends_BW)

    def mask(self, first: int, length: int) -> Tensor:
        """[B, 1, S, W'] bool: the keys that each of ``length`` queries from ``first`` on sees."""
        if (first, length) not in self._masks:
            seen = _seen(self.numbers_BW[:, : first + length], first)
            self._masks[first, length] = seen.unsqueeze(1)
        return self._masks[first, length]

    def calls(self, first: int, length: int) -> list[Calls]:
        """The calls of attention for each sequence; the host waits for the tokens' device."""
        if (first, length) not in self._calls:
            rows = self.numbers_BW[:, : first + length]
            self._calls[first, length] = [_calls(row_W, first) for row_W in rows]
        return self._calls[first, length]


def _seen(numbers_XW: Tensor, first: int) -> Tensor:
    """[..., W] -> [..., W - first, W] bool: the keys of each query from ``first`` on."""
    same = numbers_XW[..., first:].unsqueeze(-1) == numbers_XW.unsqueeze(-2)
    return same.tril(first)


def _calls(numbers_W: Tensor, first: int) -> Calls:
    groups: list[tuple[int, int, bool]] = []  # start, stop, whether the call needs a mask
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


class AttentionCall(NamedTuple):
    """What one call of attention computes with: queries of some tokens, keys and values of all."""

    q_BHSC: Tensor
    k_BGWC: Tensor
    v_BGWV: Tensor
    scale: float
    """The factor of the logits."""
    documents: Documents | None = None
    """The documents of the full sequences; None where a sequence is one."""
    first: int = 0
    """The position of the first query; the others follow."""

    def computed(self, mask: Tensor | None = None) -> Tensor:
        """[B, H, S, V] by PyTorch's attention under ``mask``, or under a causal mask where None, of
        as many keys as queries. The documents are not looked at."""
        q, k, v = self.q_BHSC, self.k_BGWC, self.v_BGWV
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip


def attend_within(call: AttentionCall) -> Tensor:
    """Causal attention within documents: [B, H, S, V]."""
    # The fast path needs the documents' lengths on the host, which would wait for an accelerator.
    on_host = call.q_BHSC.device.type == "cpu" and len(call.q_BHSC) > 0
    return attend_by_document(call) if on_host else attend_masked(call)


def attend_masked(call: AttentionCall) -> Tensor:
    """The plain path of :func:`attend_within`, on any device."""
    assert call.documents is not None
    H, S = call.q_BHSC.shape[1:3]
    k, v = (x[:, :, : call.first + S] for x in (call.k_BGWC, call.v_BGWV))
    # CUDA's memory-efficient kernel takes a mask, but not fewer key-value heads than heads.
    if k.shape[1] != H:
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    mask = call.documents.mask(call.first, S)
    return call._replace(k_BGWC=k, v_BGWV=v).computed(mask)


def attend_by_document(call: AttentionCall) -> Tensor:
    """The fast path of :func:`attend_within`, for a CPU and at least one sequence."""
    assert call.documents is not None
    S, W = call.q_BHSC.shape[2], call.k_BGWC.shape[2]
    rows = []
    # split() and not slices: the backward of a slice fills a tensor of the full size.
    sequences = (x.split(1) for x in call[:3])
    for q, k, v, runs in zip(*sequences, call.documents.calls(call.first, S), strict=True):
        cuts = [runs.before, *runs.keys, W - call.first - S]
        pieces = zip(
            q.split(runs.queries, 2), k.split(cuts, 2)[1:-1], v.split(cuts, 2)[1:-1], runs.masks,
            strict=True,
        )  # fmt: skip
        parts = [
            call._replace(q_BHSC=q, k_BGWC=k, v_BGWV=v).computed(mask) for q, k, v, mask in pieces
        ]
        rows.append(torch.cat(parts, 2))
    return torch.cat(rows)
