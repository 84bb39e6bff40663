"""The ranks that have parts of the same sequences, where numbers have the bits of one rank.

Legend: B batch, S tokens of a sequence on this rank, W tokens of the full sequence, n ranks, P
tokens of a piece, X sizes of a token, F size of a row, H heads, C size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.apply.context_parallel import ShardedSequence
from parallel.apply.document_mask import AttentionCall, attend_within
from parallel.comm import CollectiveWork, all_gather, exchange_rows, new_empty


@dataclass
class _Gathered:
    """The last rows that were gathered, for the next module with this input."""

    key: tuple[Any, ...]
    """Of the input's place in memory and its version."""
    input: Tensor
    """While it is referred to no other tensor has its place."""
    received: Tensor | None
    work: CollectiveWork
    ordered: Tensor | None = None


class ExactSequence(ShardedSequence):
    """This rank has two pieces of each sequence, as under :class:`ShardedSequence`, and every
    number has the bits of one rank.

    Numbers of heads and of key-value heads are multiples of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._gathered: _Gathered | None = None

    @property
    def ranks(self) -> int:
        """n."""
        return self.group.size()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that gives what is computed once for all."""
        return self.group.rank() == 0

    def gather(self, *tensors_BSX: Tensor) -> tuple[Tensor, ...]:
        """This rank's own tokens: :meth:`attend` exchanges heads instead."""
        return tensors_BSX

    def attend(self, call: AttentionCall) -> Tensor:
        """As in :class:`SequenceContext`; keys and values are of this rank's tokens."""
        q, k, v = _SomeHeads.apply(self, *call[:3])
        call = call._replace(q_BHSC=q, k_BGWC=k, v_BGWV=v)
        y_BHWV = call.computed() if call.documents is None else attend_within(call)
        out: Tensor = _OwnTokens.apply(self, y_BHWV)
        return out

    def some_heads(self, tensors_BHSC: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[B, H, S, C] of all heads of this rank's tokens -> [B, H / n, W, C] of this rank's heads
        of all tokens, for each tensor. A token's heads stay together in memory, as they are where
        one rank has all tokens. No gradient is recorded."""
        by_rank = [x.transpose(1, 2).unflatten(2, (self.ranks, -1)) for x in tensors_BHSC]
        sent_BSnX = torch.cat([x.flatten(3) for x in by_rank], 3)
        received_BWX = self._start_exchange(sent_BSnX.permute(2, 0, 1, 3))()
        shapes = [x.shape[3:] for x in by_rank]
        heads = zip(received_BWX.split(list(map(math.prod, shapes)), 2), shapes, strict=True)
        return tuple(x.unflatten(2, shape).contiguous().transpose(1, 2) for x, shape in heads)

    def own_tokens(self, tensors_BHWC: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The opposite of :meth:`some_heads`."""
        n, shapes = self.ranks, [(x.shape[1], x.shape[3]) for x in tensors_BHWC]
        x_BWX = torch.cat([x.transpose(1, 2).flatten(2) for x in tensors_BHWC], 2)
        pieces_B2nPX = x_BWX.unflatten(1, (2 * n, -1))
        sent = new_empty(x_BWX, n, len(x_BWX), 2, *pieces_B2nPX.shape[2:])
        for rank in range(n):
            sent[rank, :, 0], sent[rank, :, 1] = (
                pieces_B2nPX[:, rank], pieces_B2nPX[:, 2 * n - 1 - rank],
            )  # fmt: skip
        received_nBSX = new_empty(sent, *sent.shape).flatten(2, 3)
        exchange_rows(received_nBSX, sent.flatten(2, 3), self.group, "cp").wait()
        heads = zip(received_nBSX.split(list(map(math.prod, shapes)), 3), shapes, strict=True)
        return tuple(
            x.unflatten(3, shape).permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)
            for x, shape in heads
        )

    def start_gather_tokens(self, x_BSX: Tensor) -> Callable[[], Tensor]:
        """Begin to gather [B, S, ...] of each rank; the result waits, and gives [B, W, ...]. No
        gradient is recorded. Modules that have one input, as an attention's projections, gather
        the input once."""
        key = x_BSX.data_ptr(), x_BSX._version, x_BSX.shape, x_BSX.stride(), x_BSX.dtype
        if self._gathered is None or self._gathered.key != key:
            sent = x_BSX.detach().contiguous()
            received = new_empty(sent, self.ranks, *sent.shape)
            work = all_gather(received.flatten(0, 1), sent, self.group, "cp")
            self._gathered = _Gathered(key, x_BSX.detach(), received, work)
        return partial(self._end_gather, self._gathered)

    def _end_gather(self, gathered: _Gathered) -> Tensor:
        if gathered.ordered is None:
            gathered.work.wait()
            assert gathered.received is not None
            gathered.ordered, gathered.received = self._ordered(gathered.received), None
        return gathered.ordered

    def gather_tokens(self, x_BSX: Tensor) -> Tensor:
        """[B, S, ...] of each rank -> [B, W, ...], without a gradient."""
        return self.start_gather_tokens(x_BSX)()

    def start_exchange_columns(self, x_BSF: Tensor) -> Callable[[], Tensor]:
        """Begin to exchange columns for tokens, [B, S, F] of each rank; the result waits, and gives
        [B, W, ceil(F / n)] of this rank's columns. The last ranks' may end in columns of zeros. No
        gradient is recorded."""
        columns = -(-x_BSF.shape[2] // self.ranks)
        x_BSF = F.pad(x_BSF.detach(), (0, self.ranks * columns - x_BSF.shape[2]))
        return self._start_exchange(x_BSF.unflatten(2, (self.ranks, columns)).permute(2, 0, 1, 3))

    def _start_exchange(self, x_nBSX: Tensor) -> Callable[[], Tensor]:
        """Begin to send block r to rank r; the result waits, and gives [B, W, ...]."""
        sent = x_nBSX.contiguous()
        received = new_empty(sent, *sent.shape)
        work = exchange_rows(received, sent, self.group, "cp")
        return partial(self._end_exchange, work, sent, received)

    def _end_exchange(self, work: CollectiveWork, sent: Tensor, received: Tensor) -> Tensor:
        work.wait()
        del sent  # which the exchange has read until here
        return self._ordered(received)

    def _ordered(self, x_nBSX: Tensor) -> Tensor:
        """[n, B, S, ...] of each rank -> [B, W, ...] in the order of the full sequence."""
        n, B, S = x_nBSX.shape[:3]
        out = new_empty(x_nBSX, B, 2 * n, S // 2, *x_nBSX.shape[3:])
        for rank, x_BSX in enumerate(x_nBSX):
            out[:, rank], out[:, 2 * n - 1 - rank] = x_BSX.chunk(2, 1)
        return out.flatten(1, 2)

    def own(self, x_BWX: Tensor) -> Tensor:
        """[B, W, ...] -> [B, S, ...]: this rank's tokens."""
        return x_BWX.index_select(1, self.positions(x_BWX.shape[1] // self.ranks, x_BWX.device))


class _SomeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sequence: ExactSequence, *tensors_BHSC: Tensor) -> tuple[Tensor, ...]:
        ctx.sequence = sequence
        # As in other exchanges: a recomputation then begins and ends between equal collectives.
        ctx.save_for_backward(tensors_BHSC[0].new_empty(0))
        return sequence.some_heads(tensors_BHSC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, *ctx.sequence.own_tokens(grads)


class _OwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sequence: ExactSequence, x_BHWC: Tensor) -> Tensor:
        ctx.sequence = sequence
        ctx.save_for_backward(x_BHWC.new_empty(0))
        return sequence.own_tokens([x_BHWC])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor]:
        _ = ctx.saved_tensors
        return None, ctx.sequence.some_heads(grads)[0]
