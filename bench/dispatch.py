"""Dispatch and combine over ranks against raw all-to-alls of the same bytes.

    python -m bench.dispatch [--quick] [--json FILE]

On 2 and 4 gloo ranks, and where there are several CUDA devices on 2 to 8 of them over NCCL in
bfloat16, each brings T tokens with K experts chosen at random. A row crosses to a rank
once, however many of its experts are there. ``limit`` is two raw all_to_all_single (there and back)
of the rows that ``all_to_all`` moves, from memory that is there already; ``plain limit`` is the
same for a dispatcher that moves each of the T·K assignments. Subjects are the dispatchers' dispatch
and combine, forward alone, with the identity for experts (a row's assignments are summed where they
are computed, as the experts do).

Legend: T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import Row, arguments, finish
from moe import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatcher,
    DispatchSetup,
    MoEConfig,
    MoELayer,
    PaddedAllToAllDispatcher,
)
from parallel.comm.collectives import exchange_counts


@dataclass(frozen=True)
class Size:
    """What each rank brings, and where."""

    T: int
    D: int
    E: int
    K: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


CPU = Size(T=4096, D=512, E=32, K=4)
CUDA = Size(T=16384, D=2048, E=64, K=6, device="cuda", dtype=torch.bfloat16)
CUDA_QUICK = Size(T=256, D=64, E=8, K=2, device="cuda", dtype=torch.bfloat16)


def raw(size: Size, rows: int, splits: tuple[list[int], list[int]]) -> Callable[[], None]:
    """Two all-to-alls of ``rows`` rows."""
    there = torch.randn(rows, size.D).to(size.device, size.dtype)
    back, received = torch.empty_like(there), there.new_empty(sum(splits[1]), size.D)

    def act() -> None:
        dist.all_to_all_single(received, there, splits[1], splits[0])
        dist.all_to_all_single(back, received, splits[0], splits[1])

    return act


def subjects_of(size: Size, rank: int, world: int) -> dict[str, Callable[[], None]]:
    torch.manual_seed(rank)
    T, D, E, K = size.T, size.D, size.E, size.K
    layer = MoELayer(MoEConfig(d_model=D, d_ff=8, num_experts=E, top_k=K))
    layer = layer.to(size.device, size.dtype)
    x_TD = torch.randn(T, D).to(size.device, size.dtype)
    with torch.no_grad():
        routed = layer.router(x_TD)
    group = dist.group.WORLD
    assert group is not None
    to_TK = routed.expert_indices_TK // (E // world)
    crossing = torch.stack([(to_TK == r).any(1).sum() for r in range(world)])
    every = torch.stack([(to_TK == r).sum() for r in range(world)])
    subjects = {}
    for name, counts in (("limit", crossing), ("plain limit", every)):
        received = exchange_counts(counts, group)
        splits = counts.tolist(), received.tolist()
        subjects[name] = raw(size, sum(splits[0]), splits)

    def setup(**options: Any) -> DispatchSetup:
        config = MoEConfig(d_model=D, d_ff=8, num_experts=E, top_k=K, **options)
        return DispatchSetup(config, group, None, None, lambda _: None)

    dispatchers: dict[str, Dispatcher] = {
        "convoy": AllToAllDispatcher(setup()),
        "convoy in 4 chunks": AllToAllDispatcher(setup(overlap_chunks=4)),
        "convoy padded_all_to_all": PaddedAllToAllDispatcher(
            setup(dispatcher="padded_all_to_all", max_tokens_per_call=T)
        ),
        "convoy all_gather": AllGatherDispatcher(setup()),
    }

    def run(dispatcher: Dispatcher) -> Callable[[], None]:
        def act() -> None:
            with torch.no_grad():
                parts = [
                    dispatcher.combine(arrived.rows.x_SD, arrived)
                    for arrived in dispatcher.dispatch(x_TD, routed)
                ]
                for part in parts:
                    part()

        return act

    return subjects | {name: run(dispatcher) for name, dispatcher in dispatchers.items()}


def on_rank(size: Size, rank: int, world: int, port: int, samples: int, out: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(world))  # fmt: skip
    torch.set_num_threads(1)
    cuda = size.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=120))
    subjects = subjects_of(size, rank, world)
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order = random.Random(0)
    for turn in range(samples + 1):
        names = list(subjects)
        order.shuffle(names)  # alike on every rank
        for name in names:
            dist.barrier()
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            subjects[name]()
            dist.barrier()
            if cuda:
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - began)
    if rank == 0:
        out.put(times)
    dist.destroy_process_group()


def bench(size: Size, world: int, samples: int) -> list[Row]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    ranks = [
        context.Process(target=on_rank, args=(size, r, world, port, samples, out), daemon=True)
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    times: dict[str, list[float]] = out.get(timeout=600)
    for process in ranks:
        process.join(timeout=60)
    medians = {name: statistics.median(values) for name, values in times.items()}
    case = f"T={size.T} D={size.D} E={size.E} K={size.K} {world} ranks"
    return [
        Row(case, name, "dispatch_combine_seconds", value, "s", medians["limit"] / value,
            times[name])
        for name, value in medians.items()
    ]  # fmt: skip


def main() -> None:
    args = arguments(__doc__ or "")
    if args.quick:
        args.samples = 7
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    size, counts = CPU, [2, 4]
    if devices > 1:
        size = CUDA_QUICK if args.quick else CUDA
        counts = [world for world in (2, 4, 8) if world <= (2 if args.quick else devices)]
    worlds = [world for world in counts if args.only in f"{world} ranks"]
    rows = [row for world in worlds for row in bench(size, world, args.samples)]
    finish("dispatch", rows, ["torch"], args.json)


if __name__ == "__main__":
    main()
