"""Collectives over all ranks: what they deliver, and how fast."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from cluster.burnin.compute import synchronize

_TRIPS = 3


def all_to_all(device: torch.device, rows: int, row_bytes: int) -> tuple[float, str | None]:
    """Bytes per second that this rank sends to other ranks in an all-to-all, and what is wrong.

    Args:
        device: on which the tensors are.
        rows: of each rank, shared out evenly.
        row_bytes: of each row.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    each = max(1, rows // world) * row_bytes
    # What rank a sends to rank b is full of a value that both know.
    sent = torch.empty(world, each, dtype=torch.uint8, device=device)
    for peer in range(world):
        sent[peer] = _value(rank, peer)
    got = torch.empty_like(sent)
    seconds = _best(lambda: dist.all_to_all_single(got, sent), device)
    for peer in range(world):
        if not bool((got[peer] == _value(peer, rank)).all()):
            return 0.0, f"other bytes than rank {peer} sent in an all-to-all"
    return (world - 1) * each / seconds, None


def _value(sender: int, receiver: int) -> int:
    return (7 * sender + 31 * receiver) % 251


def all_reduce(device: torch.device, size: int) -> tuple[float, str | None]:
    """Bytes per second of an all-reduce of ``size`` bytes of float32, and what is wrong.

    The rate is size x 2 (world - 1) / world over the time, as in NCCL's tests ("bus bandwidth").
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.empty(size // 4, device=device)

    def reduce() -> None:
        mine.fill_(float(rank + 1))
        dist.all_reduce(mine)

    seconds = _best(reduce, device)
    expected = world * (world + 1) // 2  # exact in float32 up to 5,000 ranks and beyond
    if not bool((mine == expected).all()):
        return 0.0, f"sums of an all-reduce that are not {expected}"
    return mine.numel() * 4 * 2 * (world - 1) / world / seconds, None


def _best(act: object, device: torch.device) -> float:
    assert callable(act)
    best = float("inf")
    for _ in range(_TRIPS):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        act()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
