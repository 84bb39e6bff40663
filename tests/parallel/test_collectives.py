"""Collectives on the host against sums and slices of what every rank gave."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import reduce_scatter
from parallel.comm.comm_watch import monitor_collectives
from tests.support.ranks import run_ranks

RANKS = 3
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def given(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(RANKS * 4, 5, generator=generator)).to(dtype)


def reduced(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Of each dtype this rank's block of the sum, and of the largest."""
    found = []
    for dtype in DTYPES:
        total, largest = torch.empty(4, 5, dtype=dtype), torch.empty(4, 5, dtype=dtype)
        assert dist.group.WORLD is not None
        work = reduce_scatter(total, given(rank, dtype), dist.group.WORLD, "dp")
        work.wait()
        work.wait()  # as a work of PyTorch's may be waited for twice
        with monitor_collectives() as watch:
            reduce_scatter(total, given(rank, dtype), dist.group.WORLD, "dp").wait()
            (one,) = watch.take().values()
        assert (one.count, one.bytes) == (1, given(rank, dtype).nbytes)
        reduce_scatter(
            largest, given(rank, dtype), dist.group.WORLD, "dp", dist.ReduceOp.MAX
        ).wait()
        found.append((total, largest))
    return found


def test_a_reduce_scatter_adds_up_in_rank_order_and_rounds_once():
    for rank, found in enumerate(run_ranks(reduced, RANKS)):
        block = slice(4 * rank, 4 * rank + 4)
        for dtype, (total, largest) in zip(DTYPES, found, strict=True):
            parts = [given(other, dtype)[block] for other in range(RANKS)]
            wide = [p.float() if dtype == torch.bfloat16 else p for p in parts]
            assert torch.equal(total, ((wide[0] + wide[1]) + wide[2]).to(dtype))
            assert torch.equal(largest, torch.stack(parts).amax(0))
