"""Seconds of a collective by algorithm, size of its group and link.

A group is ``size`` ranks that are ``stride`` apart. Bandwidths are of one rank in one direction.
"""

from __future__ import annotations

import math

from convoy.plan.hardware import Cluster, group_shape


def gather_seconds(
    bytes_whole: float, size: int, stride: int, cluster: Cluster, pieces: int = 1
) -> float:
    """An all-gather to, or a reduce-scatter from, ``bytes_whole`` on every rank, in ``pieces``.

    By rings: every rank sends (g - 1) / g of the bytes. A ring over several nodes is as fast as
    the slower of a rank's link within the node and the links of the group's ranks of a node to
    another. Latency is that of a ring or of a tree, the shorter.
    """
    if size == 1 or bytes_whole <= 0:
        return 0.0
    here, nodes = group_shape(size, stride, cluster.gpus_per_node)
    inner, outer = cluster.intra_node, cluster.inter_node
    rate = inner.gigabytes_per_second * inner.efficiency if here > 1 else math.inf
    if nodes > 1:
        rate = min(rate, here * outer.gigabytes_per_second * outer.efficiency)
    hops = pieces * _latency(here, nodes, cluster)
    return bytes_whole * (size - 1) / size / (rate * 1e9) + hops


def reduce_seconds(bytes_whole: float, size: int, stride: int, cluster: Cluster) -> float:
    """An all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(bytes_whole, size, stride, cluster)


def exchange_seconds(
    bytes_sent: float, size: int, stride: int, cluster: Cluster, far_share: float = 1.0
) -> float:
    """An all-to-all in which every rank sends ``bytes_sent`` in equal parts, one to itself.

    Parts for the own node and for other nodes travel at the same time. Of those for other nodes
    ``far_share`` crosses to them, and the receiving node spreads it over its own links.
    """
    if size == 1 or bytes_sent <= 0:
        return 0.0
    here, nodes = group_shape(size, stride, cluster.gpus_per_node)
    inner, outer = cluster.intra_node, cluster.inter_node
    near = bytes_sent * (here - 1) / size
    far = bytes_sent * (size - here) / size
    seconds = near / (inner.gigabytes_per_second * inner.all_to_all_efficiency * 1e9)
    if nodes > 1:
        seconds += (
            far / (inner.gigabytes_per_second * inner.all_to_all_efficiency * 1e9) * (far_share < 1)
        )
        far *= far_share
        far_seconds = far / (outer.gigabytes_per_second * outer.all_to_all_efficiency * 1e9)
        seconds = max(seconds, far_seconds)
    return seconds + _latency(here, nodes, cluster)


def send_seconds(bytes_sent: float, stride: int, cluster: Cluster) -> float:
    """From one rank to the rank ``stride`` further."""
    link = cluster.intra_node if stride < cluster.gpus_per_node else cluster.inter_node
    rate = link.gigabytes_per_second * link.efficiency * 1e9
    return bytes_sent / rate + link.latency_microseconds * 1e-6


def _latency(here: int, nodes: int, cluster: Cluster) -> float:
    inner = cluster.intra_node.latency_microseconds * 1e-6
    outer = cluster.inter_node.latency_microseconds * 1e-6
    ring = (here - 1) * inner + (nodes - 1) * outer
    tree = math.ceil(math.log2(here)) * inner + math.ceil(math.log2(nodes)) * outer
    return min(ring, 2 * tree)
