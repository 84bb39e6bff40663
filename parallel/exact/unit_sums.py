"""Exact sums of the gradients of one layer's experts, which see rows of several units in one call.

A unit is a micro-batch; see :mod:`parallel.exact.sums`. This file loads neither DTensor nor FSDP.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from parallel.dtensor import local_shard
from parallel.exact.arithmetic import UnitLimit, add_unit


class UnitSums:
    """Exact sums of the gradients of one layer's experts, of the experts that are here.

    Args:
        experts: the module whose parameters have the expert as their first dim. Which of them are
            frozen is read here.
        limit: gets to see every gradient.
        by_fsdp: FSDP sums the gradients over ranks.
    """

    def __init__(self, experts: nn.Module, limit: UnitLimit, by_fsdp: bool) -> None:
        self.experts, self.limit, self.by_fsdp = experts, limit, by_fsdp
        self._trainable = [p.requires_grad for p in experts.parameters()]
        trainable = (p for p in experts.parameters() if p.requires_grad)
        self._shapes = [local_shard(p).shape for p in trainable]
        self._totals: list[Tensor] | None = None
        self._lock = threading.Lock()  # several threads compute experts

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_totals": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def add(self, expert: int, grads: Iterable[Tensor | None]) -> None:
        """Add a unit's gradients of one expert, in the order of the module's parameters; None for
        parameters that the module lacks. Those of frozen parameters are left out. Threads may call,
        each for other experts."""
        present = (grad for grad in grads if grad is not None)
        chosen = list(compress(present, self._trainable))
        if not chosen:
            return
        for total, grad in zip(self._begun(chosen[0].device), chosen, strict=True):
            add_unit(total[expert], grad, self.limit)

    def _begun(self, device: torch.device) -> list[Tensor]:
        with self._lock:
            if self._totals is None:
                self._totals = [
                    torch.zeros(shape, dtype=torch.int64, device=device) for shape in self._shapes
                ]
            return self._totals

    def for_copies(self, number: int) -> UnitSums:
        """Sums for copies of other ranks' experts, whose owners :meth:`add_totals`."""
        sums = copy.copy(self)
        sums._shapes = [torch.Size([number, *shape[1:]]) for shape in self._shapes]
        sums._totals, sums._lock = None, threading.Lock()
        return sums

    def totals(self, device: torch.device) -> list[Tensor]:
        """As :meth:`take`, with zeros where nothing was added."""
        self._begun(device)
        return self.take() or []

    def add_totals(self, expert: int, totals: Iterable[Tensor]) -> None:
        """Add the sums of a copy of one expert, int64, in the order of trainable parameters."""
        given = list(totals)
        for own, total in zip(self._begun(given[0].device), given, strict=True):
            own[expert].add_(total)

    def stand_in(self, parameter: Tensor) -> Tensor | None:
        """What autograd gets in the place of a gradient."""
        # FSDP reduces parameters that have a gradient.
        return parameter.new_zeros(()).expand_as(parameter) if self.by_fsdp else None

    def take(self) -> list[Tensor] | None:
        """The sums, of the local shapes of the trainable parameters, which begin anew; None where
        nothing was added."""
        totals, self._totals = self._totals, None
        return totals
