"""The transfers of one call's copies: parameters from owners to copies, gradients back.

Parameters travel while ranks compute their own experts. After the forward their memory is free, and
in the backward they travel again. Optimizer state never moves.

Legend: B own experts of a rank, C copies on a rank, P parameters of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.copies.plan import CopyPlan
from parallel.comm import exchange_rows


@dataclass(frozen=True)
class Lending:
    """What a rank lends and borrows in one call."""

    group: dist.ProcessGroup
    own_experts: int
    """B; this rank's places beyond them are copies."""
    own_rows: int
    """The rows that come for own experts, before those that come for copies."""
    lent: tuple[tuple[int, ...], ...]
    """For each rank the own experts, from 0 to B - 1, of which that rank has copies."""
    borrowed: tuple[int, ...]
    """From each rank the number of copies here. They are in the order of their owners."""
    copied: int
    """The rows that this rank sends to copies."""

    @staticmethod
    def of(plan: CopyPlan, rows_E: Sequence[int], copied: int, group: dist.ProcessGroup) -> Lending:
        """The part of a plan that the calling rank has; ``copied`` as the field."""
        rank, block = group.rank(), plan.block
        own = range(rank * block, (rank + 1) * block)
        rows = sum(plan.rows[e][rank] if e in plan.rows else rows_E[e] for e in own)
        lent = tuple(tuple(e - own.start for e in experts if e in own) for experts in plan.copies)
        owners = [e // block for e in plan.copies[rank]]
        borrowed = tuple(owners.count(owner) for owner in range(group.size()))
        return Lending(group, block, rows, lent, borrowed, copied)

    @property
    def num_copies(self) -> int:
        """C."""
        return sum(self.borrowed)


class Loan:
    """The transfers of one call. Every rank of the group must make the same ones.

    Args:
        lending: who lends what.
        parameters: [B, ...] the parameters of the own experts, of one dtype.
        buffer: of an earlier loan with equal arguments, whose memory is filled again.
    """

    def __init__(
        self, lending: Lending, parameters: Sequence[Tensor], buffer: Tensor | None = None
    ) -> None:
        self.lending = lending
        self.own = [p.detach() for p in parameters]
        """The parameters without a graph, until :meth:`release`."""
        if buffer is None:
            # Memory of its own: it is given back and taken again under tensors that refer to it.
            first, numbers = self.own[0], lending.num_copies * self._per_expert
            buffer = torch.empty(numbers, dtype=first.dtype, device=first.device)
        self.buffer = buffer
        """The parameters of copies, flat."""
        self._work: Any = None
        self._sent: Tensor | None = None
        self._back: Tensor | None = None
        self._shapes: list[torch.Size] = []

    @property
    def _per_expert(self) -> int:
        return sum(p[0].numel() for p in self.own)

    def start(self) -> None:
        """Begin the transfer of parameters."""
        pieces = [p[e].flatten() for lent in self.lending.lent for e in lent for p in self.own]
        self._sent = torch.cat(pieces) if pieces else self.own[0].new_empty(0)
        self.buffer.untyped_storage().resize_(self.buffer.numel() * self.buffer.itemsize)
        self._exchange(self.buffer, self._per_expert, there=True)

    def borrowed(self) -> list[Tensor]:
        """[C, ...] of each parameter; views of memory that :meth:`wait` fills."""
        flat_CP = self.buffer.view(self.lending.num_copies, self._per_expert)
        return _fields(flat_CP, [p.shape[1:] for p in self.own])

    def wait(self) -> None:
        """Wait for the transfer that was begun last."""
        if self._work is not None:
            self._work.wait()
        self._work = self._sent = None

    def release(self) -> None:
        """Free the memory of borrowed parameters, and refer to no parameter any more: who refers to
        the buffer may fill it again by another loan. Gradients can still be sent back."""
        self.buffer.untyped_storage().resize_(0)
        self.buffer, self.own = self.buffer.new_empty(0), []

    def start_back(self, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> None:
        """Begin to send gradients to the owners.

        Args:
            grads: [C, ...] the gradient of each parameter that has one; None for zeros.
            like: for each of ``grads`` a tensor [B or C, ...] of the gradient's dtype.
        """
        C = self.lending.num_copies
        self._shapes = [tensor.shape[1:] for tensor in like]
        flat = [
            tensor.new_zeros(C, shape.numel()) if grad is None else grad.reshape(C, shape.numel())
            for grad, tensor, shape in zip(grads, like, self._shapes, strict=True)
        ]
        self._sent = torch.cat(flat, 1).flatten()
        per_expert = sum(shape.numel() for shape in self._shapes)
        self._back = self._sent.new_empty(sum(map(len, self.lending.lent)) * per_expert)
        self._exchange(self._back, per_expert, there=False)

    @property
    def is_returning(self) -> bool:
        """Whether gradients are on their way to the owners."""
        return self._back is not None

    def returned(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Wait for the gradients of copies: each with the own expert's number, in rank order."""
        self.wait()
        assert self._back is not None, "no gradients are on their way"
        experts = [e for lent in self.lending.lent for e in lent]
        flat = self._back.view(len(experts), -1) if experts else self._back
        self._back = None
        for i, expert in enumerate(experts):
            yield expert, [field[0] for field in _fields(flat[i : i + 1], self._shapes)]

    def _exchange(self, out: Tensor, per_expert: int, there: bool) -> None:
        assert self._sent is not None
        lent = [len(experts) * per_expert for experts in self.lending.lent]
        borrowed = [number * per_expert for number in self.lending.borrowed]
        to, by = (lent, borrowed) if there else (borrowed, lent)
        self._work = exchange_rows(out, self._sent, self.lending.group, "ep", by, to)


def _fields(flat_CP: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """[C, P] -> for each shape a view [C, *shape]."""
    pieces = flat_CP.split([shape.numel() for shape in shapes], 1)
    return [piece.unflatten(1, shape) for piece, shape in zip(pieces, shapes, strict=True)]
