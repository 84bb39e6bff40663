"""The dispatcher ``hierarchical``: a row crosses to a node once, and goes on within the node."""

from __future__ import annotations

from typing import Self

from moe.config import DISPATCHERS
from moe.dispatch.all_to_all import AllToAllDispatcher
from moe.dispatch.dispatchers import DispatchSetup


class HierarchicalDispatcher(AllToAllDispatcher):
    """An all-to-all over the ranks at this rank's place in each node, and one within the node."""

    traits = DISPATCHERS["hierarchical"]

    @classmethod
    def of(cls, setup: DispatchSetup) -> Self:
        """See :class:`moe.dispatch.dispatchers.Dispatcher`. Raises ValueError without groups of
        nodes."""
        if setup.across_nodes is None or setup.within_node is None:
            raise ValueError(
                "dispatcher (hierarchical) must have expert ranks on more than one node, and "
                "more than one on each, in equal numbers, and be given ParallelDims.ep_node_meshes "
                "of meshes built with ranks_per_node; or use all_to_all"
            )
        chunks = setup.config.overlap_chunks
        return cls(setup.across_nodes, setup.within_node, chunks, wire=setup.wire)
