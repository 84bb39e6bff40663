"""What each rank decides in a step from the reports of all ranks, on one core.

    OMP_NUM_THREADS=1 python -m bench.decisions [--quick] [--json FILE] [--samples N]

``decision``: commit or skip, loss and gradient norm. ``losses``: ranks with odd losses, on rank 0
alone. ``stragglers``: slow ranks. ``capacity``: speeds and plans of straggler-aware capacity. Ranks
are healthy, with 2 % of noise; windows of speeds are full. The limit of a step is 5 ms for up to
16,384 ranks, and 20 ms for 131,072.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from bench.harness import Row, arguments, finish
from parallel import Topology
from pretrain.parts.capacity.rule import CapacityBalance
from pretrain.parts.rank_watch.rule import LossOutliers
from pretrain.parts.step import Report, Reports
from pretrain.parts.stragglers.config import StragglersConfig
from pretrain.parts.stragglers.rule import Stragglers
from pretrain.train.barrier import decide
from router import StragglerAwareConfig

RANKS = {1024: 0.005, 16_384: 0.005, 131_072: 0.02}
"""The ranks of a run, and the seconds that a step's decisions may take."""
WARM_STEPS = 64
"""Windows of speeds are full after so many."""


def some_reports(world: int, generator: torch.Generator) -> Reports:
    """Of healthy ranks with a noise of 2 %."""
    noise = torch.rand(world, generator=generator, dtype=torch.float64) / 50
    values: dict[str, Any] = {
        "loss_sum": 4096 * (2 + noise), "target_tokens": 4096, "grad_square_sum": noise,
        "step_seconds": 1 + noise, "exposed_seconds": 0.1, "expert_rows": 1000,
        "expert_seconds": 0.2 + noise / 4, "bad_layer": -1,
    }  # fmt: skip
    rows = torch.zeros(world, len(fields(Report)), dtype=torch.float64)
    for column, entry in enumerate(fields(Report)):
        rows[:, column] = values.get(entry.name, 0)
    return Reports(rows.numpy())


def rows_of(world: int, goal: float, samples: int) -> Iterator[Row]:
    """The times of each rule, and of all of them."""
    generator = torch.Generator().manual_seed(0)
    topology = Topology(pp=8, dp_shard=world // 8, ep=64)
    speeds = Stragglers(StragglersConfig(), topology, token_flops=1e9, row_flops=1e7)
    capacity, losses = CapacityBalance(StragglerAwareConfig(), topology), LossOutliers(range(world))
    times: dict[str, list[float]] = {}
    for step in range(1, WARM_STEPS + samples + 1):
        reports = some_reports(world, generator)
        column = reports.column
        tokens, rows = column("target_tokens"), column("expert_rows")
        acts: dict[str, Callable[[], object]] = {
            "decision": partial(decide, reports, 4096 * world),
            "losses": partial(losses.after, column("loss_sum"), tokens),
            "stragglers": partial(speeds.after, step, tokens, rows, column("step_seconds") - 0.1),
            "capacity": partial(
                capacity.after, step, *map(torch.from_numpy, (rows, column("expert_seconds")))
            ),
        }
        for name, act in acts.items():
            began = time.perf_counter()
            act()
            times.setdefault(name, []).append(time.perf_counter() - began)
    together = [sum(parts) for parts in zip(*times.values(), strict=True)]
    for name, seconds in {**times, "all": together}.items():
        measured = seconds[WARM_STEPS:]
        median = statistics.median(measured)
        yield Row(f"{world} ranks", name, "seconds", median, "s", goal / median, measured)


def main() -> None:
    args = arguments(__doc__ or "")
    samples = 3 if args.quick else args.samples
    rows = [row for world, goal in RANKS.items() for row in rows_of(world, goal, samples)]
    finish("decisions", rows, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    main()
