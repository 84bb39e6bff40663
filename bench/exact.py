"""``train.exact``: what a step costs with it, and the layouts that have the bits of one process.

    OMP_NUM_THREADS=1 python -m bench.exact [--quick] [--json FILE] [--only table|step]

``step``: a training step of the model of tools/recipes/stdlib-tiny.toml on 1 and 2 ranks of one
thread, in turn with float32 sums and with exact sums in the same processes; loss, backward,
gradient norm, barrier, AdamW and the digests included. The limit is the ordinary step. ``table``:
each variant of a tiny model on each layout for two steps, beside one process; 1 where losses,
norms, gradients, parameters and moments have equal bits, and 0 where they differ.
"""

from __future__ import annotations

import multiprocessing as mp
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from bench.harness import Row, arguments, finish
from bench.scaling import _join
from parallel import (
    ParallelConfig,
    ParallelDims,
    all_gather_rows,
    grad_square_sum,
    parse_topology,
    scale_gradients,
)
from pretrain.job import Job
from pretrain.model import init_parameters
from pretrain.observe import Events
from pretrain.optim import AdamWConfig, build_adamw
from pretrain.parallelize import LocalBatch, forward_backward, parallelize
from pretrain.runtime import keep_freed_memory
from pretrain.spec import load_spec
from pretrain.train.digests import StepDigests
from tests.support.exact import CELLS, exact_spec, sections_of
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import Trained, bits_that_differ, train

RECIPE = Path(__file__).resolve().parent.parent / "tools" / "recipes" / "stdlib-tiny.toml"
CASES = {"1 rank": "dp_shard=1", "2 ranks dp_shard=2,ep=2": "dp_shard=2,ep=2",
         "2 ranks dp_replicate=2": "dp_replicate=2", "2 ranks cp=2,ep=2": "cp=2,ep=2",
         "2 ranks tp=2,ep=2": "tp=2,ep=2"}  # fmt: skip
SUBJECTS = {"limit": False, "exact": True}
QUICK = [("top_k 4", "dp_shard=2,ep=2"), ("top_k 2", "pp=2 zbv")]


class Step:
    """Training steps of the recipe's model on this rank."""

    def __init__(self, layout: str, exact: bool) -> None:
        spec, topology = load_spec(RECIPE), parse_topology(layout)
        size, micro, self.seq_len = (
            spec.batch.global_batch_size, spec.batch.micro_batch_size, spec.data.seq_len,
        )  # fmt: skip
        # Rank 0 has two micro-batches alone, and two ranks have one each, as in the recipe.
        self.dims = ParallelDims.build(topology, "cpu")
        parallel = ParallelConfig.model_validate(topology.as_dict())
        units = size // micro
        self.built = parallelize(
            spec.model, spec.moe, parallel=parallel, dims=self.dims, seq_len=self.seq_len,
            exact_units=units if exact else None,
        )  # fmt: skip
        self.model = self.built.local_model
        self.model.to_empty(device="cpu")
        init_parameters(self.model, self.built.layouts, dist.get_rank(), 0, spec.model.num_layers)
        self.optimizer = build_adamw(self.model, AdamWConfig(lr=1e-9), exact=exact)
        generator = torch.Generator().manual_seed(0)
        shape = size, self.seq_len + 1
        every = torch.randint(spec.model.vocab_size, shape, generator=generator).split(micro)
        self.batches = every[self.dims.dp_rank :: self.dims.dp_size]
        self.planned = size * self.seq_len
        # What the trainer's digests need of a job.
        job = SimpleNamespace(
            parallel_model=self.built, model=self.model, layouts=self.built.layouts,
            runtime=SimpleNamespace(rank=dist.get_rank(), device=torch.device("cpu")),
            topology=topology, events=Events(),
        )  # fmt: skip
        self.digests = StepDigests(cast(Job, job))

    def __call__(self) -> None:
        """One step."""
        exact = self.built.exact
        self.optimizer.zero_grad()
        if exact is not None:
            exact.begin()
        forward_backward(
            self.model, self.batches, self.planned, device=torch.device("cpu"),
            local_batch=LocalBatch(self.dims, exact=exact is not None),
        )  # fmt: skip
        if exact is None:
            square = grad_square_sum(self.model, self.dims)
        else:
            exact.finish()
            square = exact.square_sum(self.model, self.dims)
        self.digests.see_gradients()
        all_gather_rows(square.reshape(1))
        scale_gradients(self.model, 0.5)
        self.optimizer.step()
        self.digests.see_parameters()
        self.digests.publish(1)


def rank_main(layout: str, rank: int, world: int, port: int, orders: Connection) -> None:
    """Run a step of the subject that each order names."""
    keep_freed_memory()
    _join(rank, world, port)
    steps = {name: Step(layout, exact) for name, exact in SUBJECTS.items()}
    while name := orders.recv():
        steps[name]()
        orders.send(True)
    dist.destroy_process_group()


def step_rows(case: str, layout: str, samples: int) -> list[Row]:
    """Time both subjects on a layout in turn; the first two rounds do not count."""
    world, context = parse_topology(layout).world, mp.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes: list[Any] = []
    for rank in range(world):
        mine, its = context.Pipe()
        given = layout, rank, world, store.port, its
        context.Process(target=rank_main, args=given, daemon=True).start()
        pipes.append(mine)
    times: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for turn in range(samples + 2):
        for name in random.Random(turn).sample(list(SUBJECTS), len(SUBJECTS)):
            began = time.perf_counter()
            for pipe in pipes:
                pipe.send(name)
            for pipe in pipes:
                pipe.recv()
            if turn > 1:
                times[name].append(time.perf_counter() - began)
    for pipe in pipes:
        pipe.send("")
    medians = {name: statistics.median(found) for name, found in times.items()}
    return [
        Row(case, name, "step", medians[name], "s", medians["limit"] / medians[name], times[name])
        for name in SUBJECTS
    ]


def table_rows(cells: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """A row for each variant and layout, as soon as it is known."""
    alone: dict[str, Trained] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        data = data_of(prepare_job(folder))
        for number, (variant, layout) in enumerate(cells):
            whole, sections = sections_of(variant, layout)
            if whole not in alone:
                spec = exact_spec(folder / f"alone {number}", data, "", **sections)
                alone[whole] = train(spec, 2)
            trained = train(exact_spec(folder / str(number), data, layout, **sections), 2)
            differ = bits_that_differ(trained, alone[whole])
            equal = float(not differ)
            print(f"{variant:<28} {layout:<34} {'equal' if equal else 'DIFFERS'}", flush=True)
            yield Row(layout, variant, "equal_bits", equal, "bool", equal, [])


def main() -> None:
    args = arguments(__doc__)
    rows: list[Row] = []
    if args.only != "table":
        for case, layout in CASES.items():
            rows += step_rows(case, layout, 3 if args.quick else args.samples)
    if args.only != "step":
        for row in table_rows(QUICK if args.quick else CELLS):
            rows.append(row)
            finish("exact", rows, ["torch", "numpy"], args.json)
    finish("exact", rows, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    main()
