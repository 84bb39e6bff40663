"""Weak scaling: the same work for each rank, on 1, 2 and 4 ranks of one thread each.

    OMP_NUM_THREADS=1 python -m bench.scaling [--quick] [--json FILE]

A step of the tiny Qwen3-MoE of bench/train_step.py with 2,048 tokens a rank, under layouts of
every axis; loss, backward, gradient norm, barrier and AdamW included. A micro-batch has 2 sequences
of 512 tokens, and so 1,024 tokens of a rank; with ``tp=2`` and ``cp=2`` 512, unless the case says
that a micro-batch has 4. The limit is as many processes that
know nothing of each other, at the same time: what the machine itself loses when more of its cores
are busy is in both. ``efficiency`` is the tokens per second of a rank over those of a rank alone;
with more ranks than cores it cannot reach 1. ``waits`` is the share of the step in collectives that
nothing hid.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from bench.harness import Row, arguments, finish
from bench.train_step import MODEL, MOE, S
from parallel import (
    ParallelConfig,
    ParallelDims,
    all_gather_rows,
    by_parallelism,
    grad_square_sum,
    monitor_collectives,
    parse_topology,
    scale_gradients,
)
from pretrain.model import init_parameters
from pretrain.optim import AdamWConfig, build_adamw
from pretrain.parallelize import LocalBatch, forward_backward, parallelize
from pretrain.runtime import keep_freed_memory

SEQUENCES = 4
"""Of a rank."""


@dataclass(frozen=True)
class Case:
    """A layout of so many ranks; None for ranks that know nothing of each other."""

    ranks: int
    layout: str | None
    zero: int = 3
    sequences: int = 2
    """Of a micro-batch."""
    schedule: str = "1f1b"

    @property
    def name(self) -> str:
        """For the table."""
        zero = "" if self.zero == 3 else f", zero_stage={self.zero}"
        batch = "" if self.sequences == 2 else f", {self.sequences} sequences a micro-batch"
        how = "" if self.schedule == "1f1b" else f", {self.schedule}"
        name = f"{self.ranks} ranks {self.layout or 'apart'}{zero}{batch}{how}"
        return name if self.ranks > 1 else "1 rank"


CASES = [
    Case(1, None),
    Case(2, None), Case(2, "dp_shard=2"), Case(2, "dp_shard=2,ep=2"), Case(2, "dp_replicate=2"),
    Case(2, "pp=2"), Case(2, "pp=2", schedule="zbv"), Case(2, "tp=2"), Case(2, "cp=2"),
    Case(2, "dp_shard=2", 1), Case(2, "dp_shard=2,ep=2", 1),
    Case(2, "tp=2", 3, 4), Case(2, "cp=2", 3, 4), Case(2, "tp=2", 1, 4), Case(2, "cp=2", 1, 4),
    Case(4, None), Case(4, "dp_shard=4"), Case(4, "dp_shard=4,ep=4"),
    Case(4, "pp=2,dp_shard=2,ep=2"),
]  # fmt: skip


def _join(rank: int, world: int, port: int | None) -> None:
    """Be a rank of one thread, of the group that meets at a port, or of none."""
    torch.set_num_threads(1)
    if port is None:
        dist.init_process_group("gloo", rank=rank, world_size=world, store=HashStore())
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip
    dist.init_process_group("gloo", rank=rank, world_size=world)


def rank_main(case: Case, rank: int, port: int, orders: Connection) -> None:
    """Build, and then run a step for every order; answers with the share of it that was waited."""
    keep_freed_memory()
    if case.layout is None:
        _join(0, 1, None)
    else:
        _join(rank, case.ranks, port)
    topology = parse_topology(case.layout or "dp_shard=1")
    options: dict[str, object] = {"memory": {"zero_stage": case.zero}}
    if case.schedule != "1f1b":
        options["pipeline"] = {"schedule": case.schedule, "stages_per_rank": 2}
    parallel = ParallelConfig.model_validate(topology.as_dict() | options)
    dims = ParallelDims.build(topology, "cpu")
    parallel_model = parallelize(MODEL, MOE, parallel=parallel, dims=dims, seq_len=S)
    model = parallel_model.local_model
    for stage in parallel_model.stages.values():
        stage.to_empty(device="cpu")
    init_parameters(model, parallel_model.layouts, dist.get_rank(), 0, MODEL.num_layers)
    optimizer = build_adamw(model, AdamWConfig(lr=1e-9))
    # Ranks that share sequences all have those of all of them.
    shared = dist.get_world_size() // dims.dp_size
    generator = torch.Generator().manual_seed(dims.dp_rank)
    shape = SEQUENCES * shared, S + 1
    batches = torch.randint(MODEL.vocab_size, shape, generator=generator).split(case.sequences)
    planned, device, mine = SEQUENCES * S * case.ranks, torch.device("cpu"), LocalBatch(dims)
    once = case.zero == 1

    def step() -> None:
        optimizer.zero_grad()
        if parallel_model.pipeline is not None:
            parallel_model.pipeline.forward_backward(
                batches, planned, device=device, local_batch=mine, reduce_once=once
            )
        else:
            forward_backward(
                model, batches, planned, device=device, local_batch=mine, reduce_once=once
            )
        square = grad_square_sum(model, dims)
        all_gather_rows(square.reshape(1))
        scale_gradients(model, 0.5)
        optimizer.step()

    with monitor_collectives() as watch:
        while orders.recv():
            began = time.perf_counter()
            watch.take()
            step()
            seconds = time.perf_counter() - began
            traffic = by_parallelism(watch.take())
            orders.send(sum(t.exposed_seconds for t in traffic.values()) / seconds)
    dist.destroy_process_group()


def on_ranks(act: Callable[[int], Any], world: int) -> list[Any]:
    """What ``act`` returns on each of so many ranks that form a group of one thread each."""
    context = mp.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe() for _ in range(world)]
    for rank, (_, its) in enumerate(pipes):
        given = act, rank, world, store.port, its
        context.Process(target=_act_on_rank, args=given, daemon=True).start()
    return [mine.recv() for mine, _ in pipes]


def _act_on_rank(
    act: Callable[[int], Any], rank: int, world: int, port: int, answer: Connection
) -> None:
    _join(rank, world, port)
    answer.send(act(rank))
    dist.barrier()
    dist.destroy_process_group()


class Ranks:
    """The processes of a case."""

    def __init__(self, case: Case) -> None:
        context = mp.get_context("spawn")
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store, self.pipes = store, []
        self.processes: list[Any] = []
        for rank in range(case.ranks):
            mine, its = context.Pipe()
            process = context.Process(
                target=rank_main, args=(case, rank, store.port, its), daemon=True
            )
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def step(self) -> tuple[float, float]:
        """Seconds, until the last of them is done, and the mean share that was waited."""
        began = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(True)
        shares = [pipe.recv() for pipe in self.pipes]
        return time.perf_counter() - began, statistics.mean(shares)

    def end(self) -> None:
        """Let them go."""
        for pipe in self.pipes:
            pipe.send(False)
        for process in self.processes:
            process.join()


def rows(samples: int, world: int) -> list[Row]:
    """Time all cases of so many ranks, and one rank alone, in turn, over and over; the first two
    rounds do not count. Cases of other numbers wait until these have given their memory back."""
    quick = samples < 3
    known = ("dp_shard=2,ep=2", "pp=2", None)
    cases = [c for c in CASES if c.ranks in (1, world) and (not quick or c.layout in known)]
    ranks = {case: Ranks(case) for case in cases if case.layout is None}
    ranks |= {case: Ranks(case) for case in cases if case.layout is not None}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    shares: dict[Case, list[float]] = {case: [] for case in cases}
    for turn in range(samples + 2):
        for case in random.Random(turn).sample(cases, len(cases)):
            seconds, share = ranks[case].step()
            if turn > 1:
                times[case].append(seconds)
                shares[case].append(share)
    for case in cases:
        ranks[case].end()
    medians = {case: statistics.median(values) for case, values in times.items()}
    alone = medians[Case(1, None)]
    found = []
    for case in cases[world > 2 :]:
        limit, mine = medians[Case(case.ranks, None)], medians[case]
        subject = "limit" if case.layout is None else "convoy"
        rate = [case.ranks * SEQUENCES * S / s for s in times[case]]
        found += [
            Row(case.name, subject, "tokens_per_second", statistics.median(rate), "tokens/s",
                limit / mine, rate),
            Row(case.name, subject, "efficiency", alone / mine, "ratio", limit / mine, []),
            Row(case.name, subject, "waits", statistics.median(shares[case]), "ratio",
                limit / mine, shares[case]),
        ]  # fmt: skip
        print(f"{case.name:<50} {subject:<8} {found[-3].value:8,.0f} tokens/s   efficiency "
              f"{alone / mine:5.2f}   {limit / mine:5.2f} of as many alone   waits "
              f"{found[-1].value:4.0%}")  # fmt: skip
    return found


def main() -> None:
    args = arguments(__doc__)
    found = rows(2 if args.quick else args.samples, 2)
    if not args.quick:
        found += rows(args.samples, 4)
    finish("scaling", found, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    # Every rank is one thread.
    torch.set_num_threads(1)
    main()
