"""Dispatch and combine: moving tokens to the ranks of their experts and back.

Legend: T tokens, D d_model, E experts, K top_k, S rows on this rank, R assignments of these rows.

A row is sent to a rank once, with the numbers and weights of its experts, however many of its
experts the rank holds. The rank sums the outputs of its experts, and returns one row. T tokens
therefore cost at most T · min(K, ranks) rows in each direction, and not T · K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from moe.config import DISPATCHER, DispatcherTraits, MoEConfig
from moe.dispatch.transfer import Tokens
from moe.float8 import Float8Rows
from moe.rows import Rows, rows_of
from router import HoldsGroups, RouterOutput


class DispatchedRows(NamedTuple):
    """Rows on the rank of the experts that compute them, and state for ``combine``."""

    rows: Rows
    handle: Any


@dataclass(frozen=True)
class DispatchSetup:
    """What a dispatcher is made of."""

    config: MoEConfig
    group: dist.ProcessGroup
    """The ranks that share the experts, in equal blocks."""
    across_nodes: dist.ProcessGroup | None
    """The ranks of ``group`` at this rank's place in each node; None where nodes are not known."""
    within_node: dist.ProcessGroup | None
    """The ranks of ``group`` on this rank's node; None where nodes are not known."""
    max_assignments_per_expert: Callable[[int], list[int] | None]
    """From the tokens of a call to the most assignments of each expert that the capacity policy
    allows; None for no bound."""

    @property
    def wire(self) -> Float8Rows | None:
        """How rows are written on their way to experts; None for the dtype of compute."""
        return Float8Rows() if self.config.dispatch_dtype == "float8" else None


class Dispatcher(HoldsGroups, ABC):
    """How tokens reach experts. A dispatcher keeps no state between calls, for recomputation.

    Every rank of the group must call both methods, and take all parts of the iterator.
    ``moe.dispatcher`` names a dispatcher: by its line in :data:`moe.config.DISPATCHERS`, or as
    ``package.module:Class``. Each passes :class:`moe.testing.DispatcherContract`. Attributes that
    are process groups are named in ``GROUPS``; ``group`` is that of the layer's ranks.
    """

    traits: ClassVar[DispatcherTraits] = DispatcherTraits()
    GROUPS: ClassVar[tuple[str, ...]] = ("group",)

    def __init__(self, setup: DispatchSetup) -> None:
        self.group = setup.group

    @classmethod
    def of(cls, setup: DispatchSetup) -> Self:
        """A dispatcher for a layer, by default the class called with ``setup``. Raises ValueError,
        one line, where the ranks do not allow it."""
        return cls(setup)

    @classmethod
    def unavailable(cls, dtype: torch.dtype, device_type: str) -> str:
        """Why the dispatcher cannot run for rows of a dtype on a type of device, as the rest of a
        sentence that begins with its name and says what to do; empty where it can."""
        del dtype, device_type
        return ""

    @abstractmethod
    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """Send every routed row to the ranks of its experts.

        The transfer of the first part has begun when this method returns. The iterator waits for a
        part, begins the transfer of the next part, and then gives the part. Parts are consecutive.
        """

    @abstractmethod
    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """Return the experts' sums of a part to their ranks. The result, when called, waits for the
        transfer and gives [tokens, D]."""

    def by_unit(self) -> Dispatcher:
        """A dispatcher of the same ranks, or this one, that counts rows by unit, each rank's call,
        for exact sums; only for a dispatcher whose traits say that it is ``exact``."""
        raise NotImplementedError(f"{type(self).__name__} does not count rows by unit")


def dispatcher_of(setup: DispatchSetup) -> Dispatcher:
    """The dispatcher that ``config.dispatcher`` names."""
    dispatcher: Dispatcher = DISPATCHER.load(setup.config.dispatcher).of(setup)
    return dispatcher


class LocalDispatcher(Dispatcher):
    """For one rank that holds all experts: no row is sent. By unit, a call is one unit."""

    GROUPS = ()

    def __init__(self) -> None:
        self.counts_units = False

    def by_unit(self) -> LocalDispatcher:
        """See :class:`Dispatcher`."""
        self.counts_units = True
        return self

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """See :class:`Dispatcher`."""
        indices_TK, weights_TK = routed.expert_indices_TK, routed.expert_weights_TK
        experts = range(len(routed.rows_per_expert_E))
        length = indices_TK.numel() if routed.dropped_TK is None else None
        units = [len(x_TD)] if self.counts_units else None
        yield DispatchedRows(rows_of(x_TD, indices_TK, weights_TK, experts, length, units), None)

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        return lambda: y_SD


def check_num_tokens(x_TD: Tensor, max_tokens_per_call: int) -> None:
    """Raise ValueError for more tokens than a call may have."""
    if len(x_TD) > max_tokens_per_call:
        raise ValueError(
            f"a call has {len(x_TD)} tokens: max_tokens_per_call ({max_tokens_per_call}) must be "
            f"at least as many"
        )


def destinations(indices_TK: Tensor, experts: range, ranks: int) -> Tensor:
    """[T, K] the ranks that each token is sent to, each once; ``ranks`` in the other places."""
    block = len(experts) // ranks
    local_TK = indices_TK - experts.start
    to_TK = torch.where((local_TK >= 0) & (local_TK < len(experts)), local_TK // block, ranks)
    to_TK = to_TK.sort(1).values
    again_TK = torch.zeros_like(to_TK, dtype=torch.bool)
    again_TK[:, 1:] = to_TK[:, 1:] == to_TK[:, :-1]
    return to_TK.masked_fill(again_TK, ranks)


def block_of(experts: range, ranks: int, rank: int) -> range:
    """The experts of one of ``ranks`` ranks, which hold equal blocks in their order."""
    size = len(experts) // ranks
    return experts[rank * size : (rank + 1) * size]


def chunks_of(x_TD: Tensor, routed: RouterOutput, number: int) -> list[Tokens]:
    """Consecutive parts, of an equal number on every rank; the last parts may be empty."""
    size = -(-len(x_TD) // number)
    cuts = [slice(i * size, (i + 1) * size) for i in range(number)]
    positions_T = None if routed.places is None else routed.places.positions_T
    return [
        Tokens(
            x_TD[cut],
            routed.expert_indices_TK[cut],
            routed.expert_weights_TK[cut],
            None if positions_T is None else positions_T[cut],
        )
        for cut in cuts
    ]
