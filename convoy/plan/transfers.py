"""Seconds for which calls wait because experts travel to copies, and gradients back.

The links of a rank are what bounds transfers: an owner of a hot expert sends the expert to each of
its copies. A rank's transfers within the node share one link, and those to other nodes another one.

Legend: N calls, G ranks of the expert group, C copies of all calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convoy.plan.loads import Floats, GroupLoads


@dataclass(frozen=True, eq=False)
class Transfers:
    """The transfers of experts in each call, in seconds from their beginning."""

    busy_NG: Floats
    """[N, G] until a rank's links have sent and received all that the rank sends and receives."""
    arrived_NG: Floats
    """[N, G] until all copies of a rank are there; 0 for a rank without copies."""

    @property
    def there_NG(self) -> Floats:
        """[N, G] until a rank need wait for nothing more."""
        return np.maximum(self.busy_NG, self.arrived_NG)


def transfers_of(group: GroupLoads, near: float, far: float) -> Transfers:
    """Every owner sends its experts to all of their copies, all at once: a copy is there when the
    links of both ranks have done all of their transfers.

    Args:
        group: the copies.
        near: seconds of one expert within a node.
        far: seconds of one expert between nodes.
    """
    near_C: Floats = near * group.is_near_C.astype(np.float64)
    far_C: Floats = far * (~group.is_near_C).astype(np.float64)
    sent_NG, received_NG = (
        np.maximum(group.per_rank(rank_C, near_C), group.per_rank(rank_C, far_C))
        for rank_C in (group.owner_C, group.taker_C)
    )
    arrived_NG = received_NG.copy()
    np.maximum.at(arrived_NG, (group.call_C, group.taker_C), sent_NG[group.call_C, group.owner_C])
    return Transfers(np.maximum(sent_NG, received_NG), arrived_NG)


def forward_wait(group: GroupLoads, transfers: Transfers, seconds: float) -> float:
    """Seconds by which a call's forward is longer because of transfers, in the mean over calls.

    Parameters travel while a rank computes its own experts; the copies come after that. A rank
    that sends goes on when it has sent all.

    Args:
        group: the rows.
        transfers: of the parameters.
        seconds: of the experts of a rank with the mean rows.
    """
    began_NG = np.maximum(seconds * group.own_NG, transfers.there_NG)
    ended_N = (began_NG + seconds * group.copied_NG).max(axis=1)
    return float((ended_N - seconds * group.rows_NG.max(axis=1)).mean())


def backward_wait(
    group: GroupLoads, transfers: Transfers, seconds: float, ahead: float = 0.0
) -> float:
    """Seconds by which a call's backward is longer because of transfers, in the mean over calls.

    A rank waits for its transfers of parameters. Copies come first: their gradients travel while
    the rank computes its own experts. An owner waits for the gradients of all of its copies.

    Args:
        group: the rows.
        transfers: of the parameters; gradients take as long on the way back.
        seconds: of the experts' backward on a rank with the mean rows.
        ahead: seconds before the experts' backward at which the parameters began to travel.
    """
    began_NG = np.maximum(transfers.there_NG - ahead, 0.0)
    returning_NG = began_NG + seconds * group.copied_NG
    ended_NG = returning_NG + seconds * group.own_NG
    back_NG = np.zeros_like(ended_NG)
    calls, owners, takers = group.call_C, group.owner_C, group.taker_C
    np.maximum.at(back_NG, (calls, owners), returning_NG[calls, takers])
    back_NG += transfers.busy_NG * (back_NG > 0)
    ended_N = np.maximum(ended_NG, back_NG).max(axis=1)
    return float((ended_N - seconds * group.rows_NG.max(axis=1)).mean())
