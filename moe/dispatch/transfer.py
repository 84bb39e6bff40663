"""One all-to-all of rows with the numbers and weights of their experts, and the sums' way back.

Legend: T tokens, D d_model, K top_k, N rows that are sent, S rows that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe.rows import RowMap, sum_rows, take_rows
from parallel.comm import PendingRows, Wire, start_all_to_all


class Tokens(NamedTuple):
    """Rows with the numbers and weights of their experts; a number past all is no expert."""

    x_TD: Tensor
    expert_indices_TK: Tensor
    expert_weights_TK: Tensor
    positions_T: Tensor | None = None
    """[T] int64: of each row's token in a micro-batch that ranks share; see
    :class:`router.Places`."""

    def at_least_one(self, no_expert: int) -> Tokens:
        """These, or one row that no expert takes where there are none."""
        x_TD, indices_TK, weights_TK, positions_T = self
        assert positions_T is None, "a row that no expert takes has no position"
        if len(x_TD):
            return self
        return Tokens(
            torch.cat([x_TD, x_TD.new_zeros(1, x_TD.shape[1])]),
            indices_TK.new_full((1, indices_TK.shape[1]), no_expert),
            torch.cat([weights_TK, weights_TK.new_zeros(1, weights_TK.shape[1])]),
        )


class _WithExperts:
    """A :class:`parallel.comm.collectives.Wire` for the weights of rows' experts, [N, K]: the
    experts'
    numbers travel in one collective with the weights, behind them in each row."""

    def __init__(self, indices_NK: Tensor) -> None:
        self.indices_NK = indices_NK
        """[N, K] those that are sent; once the transfer is complete [S, K] those that arrived."""

    def pack(self, x_ND: Tensor) -> Tensor:
        """[N, K] -> [N, K · (bytes of a weight + 4)] bytes."""
        numbers = self.indices_NK.int().view(torch.uint8)
        return torch.cat([x_ND.view(torch.uint8), numbers], 1)

    def unpack(self, packed: Tensor, out_ND: Tensor) -> None:
        """Write the weights into ``out_ND``, and keep the numbers."""
        of_weights = out_ND.shape[1] * out_ND.element_size()
        out_ND.view(torch.uint8).copy_(packed[:, :of_weights])
        numbers = packed[:, of_weights:].clone(memory_format=torch.contiguous_format)
        self.indices_NK = numbers.view(torch.int32).long()


@dataclass(frozen=True)
class Transfer:
    """An all-to-all of tokens over one group, begun and not yet waited for."""

    index: RowMap
    """From the rows that were sent to their tokens."""
    input_splits: list[int] | None
    output_splits: list[int] | None
    group: dist.ProcessGroup
    rows: PendingRows
    weights: PendingRows
    experts: _WithExperts
    num_assignments: int | None
    """The assignments of the rows that arrive to this rank's experts; None where the number is
    unknown."""
    has_positions: bool = False
    """Whether the tokens' positions travel behind the experts' numbers."""

    def wait(self) -> Tokens:
        """The tokens that arrive, once the transfer is complete."""
        x_SD, weights_SK = self.rows.wait(), self.weights.wait()
        numbers = self.experts.indices_NK
        if not self.has_positions:
            return Tokens(x_SD, numbers, weights_SK)
        return Tokens(x_SD, numbers[:, :-1], weights_SK, numbers[:, -1])

    def start_return(self, y_SD: Tensor) -> Callable[[], Tensor]:
        """Begin to return sums; the result, when called, waits and adds up each token's sums."""
        back = start_all_to_all(y_SD, self.output_splits, self.input_splits, self.group)
        return lambda: sum_rows(back.wait(), self.index)


def begun_ahead(first: Transfer, later: Iterable[Callable[[], Transfer]]) -> Iterator[Transfer]:
    """Transfers in order, of which the first is begun: each one of ``later`` is begun before the
    one before it is given."""
    transfer = first
    for start in later:
        following = start()
        yield transfer
        transfer = following
    yield transfer


def start_transfer(
    tokens: Tokens,
    index: RowMap,
    splits: tuple[list[int], list[int]] | None,
    group: dist.ProcessGroup,
    num_assignments: int | None,
    empty_R: Tensor | None = None,
    no_expert: int = 0,
    wire: Wire | None = None,
) -> Transfer:
    """Begin to send the rows of an index.

    Args:
        tokens: the rows' sources.
        index: from the rows to send, those for rank 0 first, to their tokens.
        splits: the numbers of rows to each rank and from each rank; None where all are equal.
        group: the ranks; every rank of the group must call.
        num_assignments: see :class:`Transfer`.
        empty_R: [R] which rows are empty places; None where no row is.
        no_expert: the number of the experts of an empty place.
        wire: how rows are written on their way.
    """
    indices_RK = tokens.expert_indices_TK.index_select(0, index.source_R)
    if empty_R is not None:
        indices_RK = indices_RK.masked_fill(empty_R.unsqueeze(1), no_expert)
    sent, received = splits or (None, None)
    has_positions = tokens.positions_T is not None
    if tokens.positions_T is not None:
        positions_R = tokens.positions_T.index_select(0, index.source_R)
        indices_RK = torch.cat([indices_RK, positions_R.unsqueeze(1)], 1)
    experts, weights_RK = _WithExperts(indices_RK), take_rows(tokens.expert_weights_TK, index)
    rows = start_all_to_all(take_rows(tokens.x_TD, index), sent, received, group, wire)
    weights = start_all_to_all(weights_RK, sent, received, group, experts)
    return Transfer(
        index, sent, received, group, rows, weights, experts, num_assignments, has_positions
    )
