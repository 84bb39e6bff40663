"""Steps of the recipes at full size on one of up to 512 fake GPUs, with the exact peak of memory.

``python -m tests.fake_gpu.measure recipes NAME`` takes 30 to 90 s a case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from convoy.plan import load_cluster, unplanned
from convoy.plan.memory import memory_of_place
from convoy.plan.search import work_of
from parallel import ParallelDims, grad_square_sum
from pretrain.job.rank_model import _parallelize
from pretrain.optim import Surroundings, build_optimizer
from pretrain.parallelize import LocalBatch, forward_backward
from pretrain.spec import load_spec, resolve_spec
from tests.support.fake_gpu import shapes
from tests.support.fake_gpu.memory import Memory

RECIPES = Path(__file__).parents[2] / "tools" / "recipes"
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """A recipe on so many ranks."""

    recipe: str
    ranks: int
    layout: Mapping[str, int]
    recompute: str = "full"
    micro_batches: int = 2
    zero_stage: int = 3
    rank: int = 0
    more: list[str] = field(default_factory=list)


QWEN = "qwen3-30b-a3b"
CASES: dict[str, Case] = {
    "Qwen3-30B-A3B, 64 ranks, ep 8": Case(QWEN, 64, {"ep": 8}),
    "Qwen3-30B-A3B, 64 ranks, ep 8, no recomputation": Case(QWEN, 64, {"ep": 8}, "none"),
    "Qwen3-30B-A3B, 64 ranks, pp 2, ep 8, last stage": Case(QWEN, 64, {"pp": 2, "ep": 8}, rank=32),
    "Qwen3-30B-A3B, 16 ranks, tp 2, ep 8": Case(QWEN, 16, {"tp": 2, "ep": 8}),
    "Qwen3-30B-A3B, 64 ranks, ep 8, ZeRO-1": Case(QWEN, 64, {"ep": 8}, zero_stage=1),
    "DeepSeekMoE-16B, 32 ranks, ep 8": Case("deepseekmoe-16b", 32, {"ep": 8}, "none"),
    "OLMoE-1B-7B, 8 ranks, ep 8": Case("olmoe-1b-7b", 8, {"ep": 8}, "none"),
    "Mixtral-8x7B, 64 ranks, ep 8": Case("mixtral-8x7b", 64, {"ep": 8}),
    "DeepSeek-V3, 512 ranks, pp 8, ep 32, second stage": Case(
        "deepseek-v3", 512, {"pp": 8, "ep": 32}, rank=64, micro_batches=8
    ),
    "DeepSeek-V3, 512 ranks, pp 8, ep 32, last stage": Case(
        "deepseek-v3", 512, {"pp": 8, "ep": 32}, rank=448, micro_batches=8
    ),
    "Qwen3-235B-A22B, 1024 ranks, pp 4, ep 32": Case(
        "qwen3-235b-a22b", 1024, {"pp": 4, "ep": 32}, micro_batches=4
    ),
}


def measure(name: str) -> dict[str, Any]:
    """The counts of a case's second step, its exact peak, and the planned one."""
    case = CASES[name]
    spec = _spec(case)
    chip = load_cluster("h100").chip
    work = work_of(spec, case.ranks)
    place = case.rank // (case.ranks // work.topology.pp)
    planned = memory_of_place(work, place, chip)
    shapes.start(case.ranks, case.rank)
    topology = spec.parallel.topology(case.ranks)
    dims = ParallelDims.build(topology, "cuda", ranks_per_node=shapes.DEVICES)
    device = torch.device("cuda", 0)
    with shapes.machine() as tally, Memory(tally) as memory:
        model = _parallelize(spec, dims)
        for stage in model.stages.values():
            stage.to_empty(device="cuda")
        weights = memory.live
        around = Surroundings(
            device=device, compute=spec.precision.compute, layouts=model.layouts, dims=dims
        )
        optimizer = build_optimizer(model.local_model, spec.optimizer, around)
        moments = memory.live - weights
        shape = spec.batch.micro_batch_size, spec.data.seq_len + 1
        batches = [
            torch.empty(shape, dtype=torch.int64, device="cpu") for _ in range(case.micro_batches)
        ]
        options = {
            "device": device,
            "local_batch": LocalBatch(dims),
            "reduce_once": case.zero_stage == 1,
        }
        for _ in range(2):  # the first step makes what later steps keep
            memory.begin()
            tally.take()
            if model.pipeline is None:
                forward_backward(model.local_model, batches, 1e3, **options)
            else:
                model.pipeline.forward_backward(batches, 1e3, **options)
            counts = tally.take()
            float(grad_square_sum(model.local_model, dims))
            optimizer.step()
            optimizer.zero_grad()
        return {
            "forward and backward": counts,
            "update": tally.take(),
            "memory": {
                "weights": round(weights / GIB, 2),
                "moments": round(moments / GIB, 2),
                "peak": round(memory.peak / GIB, 2),
                "planned": round(planned.total / GIB, 2),
                "plan": {k: round(v / GIB, 2) for k, v in planned.as_dict().items()},
                "at the peak": {
                    where: round(held / GIB, 2) for where, held in memory.at_peak.most_common(12)
                },
            },
        }


def _spec(case: Case) -> Any:
    data = unplanned(load_spec(RECIPES / f"{case.recipe}.toml", case.more)).as_dict()
    data["parallel"] |= {"dp_shard": -1, **case.layout}
    data["parallel"]["memory"] |= {"recompute": case.recompute, "zero_stage": case.zero_stage}
    return resolve_spec(data, case.recipe)
