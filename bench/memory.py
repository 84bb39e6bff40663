"""What activations and training state take, and what it costs to have less of them.

    OMP_NUM_THREADS=1 python -m bench.memory [--quick] [--json FILE]

Activations: what the tiny Qwen3-MoE of bench/train_step.py holds between its forward and its
backward, as resident memory, under every way to compute it again, with the time of both; the limit
of both is keeping everything. State: the peak of a rank's resident
memory, above what it has before the model is made, over steps of two micro-batches of a model with
wide experts on 2 ranks, under ZeRO 1, 2 and 3; the limit is its slices of parameters, gradients and
moments alone.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.harness import Row, arguments, finish, interleave
from bench.scaling import on_ranks
from bench.train_step import MODEL, MOE, B, S
from moe import MoEConfig
from parallel import ParallelConfig, ParallelDims, Topology, apply_recompute, local_shard
from parallel.comm.host_buffers import HOST_BUFFERS
from parallel.config import Recompute
from pretrain.model import Decoder, ModelConfig, init_parameters
from pretrain.optim import AdamWConfig, build_adamw
from pretrain.parallelize import LocalBatch, forward_backward, parallelize

WAYS: dict[str, tuple[Recompute, int]] = {
    "none": ("none", 1), "selective": ("selective", 1), "full, every 2nd": ("full", 2),
    "full": ("full", 1),
}  # fmt: skip
WIDE = ModelConfig(vocab_size=512, d_model=512, num_layers=8, num_heads=8, num_kv_heads=8)
WIDE_MOE = MoEConfig(d_model=512, d_ff=512, num_experts=16, top_k=2)


def decoder(way: str) -> Decoder:
    """One that recomputes in some way."""
    torch.manual_seed(0)
    model = Decoder(MODEL, MOE)
    apply_recompute(list(model.blocks.values()), *WAYS[way])
    return model


def held_on_rank(way: str, rank: int) -> int:
    """By how much resident memory grows from before a forward to after it, its output held."""
    model = decoder(way)
    tokens = torch.randint(MODEL.vocab_size, (B, S))
    model(tokens).logits.sum().backward()
    HOST_BUFFERS.release()  # what no tensor holds is not counted
    before = resident("VmRSS")
    out = model(tokens)
    HOST_BUFFERS.release()
    return resident("VmRSS") - before if out.logits.requires_grad else 0


def activations(samples: int) -> list[Row]:
    """Bytes and seconds of every way."""
    tokens = torch.randint(MODEL.vocab_size, (B, S + 1))
    models = {way: decoder(way) for way in WAYS}
    # Every tensor of a page or more by itself, and given back as soon as it is freed.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    kept = {way: on_ranks(partial(held_on_rank, way), 1)[0] for way in WAYS}
    device = torch.device("cpu")

    def step(model: Decoder) -> None:
        model.zero_grad()
        forward_backward(model, [tokens], B * S, device=device)

    runs: dict[str, Callable[[], None]] = {w: partial(step, model) for w, model in models.items()}
    timed = interleave("activations", "step_seconds", runs | {"limit": runs["none"]}, samples)
    rows = [row for row in timed if row.subject != "limit"]
    for way, count in kept.items():
        ratio = count / kept["none"]
        rows.append(Row("activations", way, "held_bytes", count, "bytes", ratio, []))
        print(f"activations  {way:<16} {count / 2**20:8.1f} MiB held, {ratio:.2f} of everything")
    return rows


def state_on_rank(zero: int, steps: int, rank: int) -> tuple[float, float]:
    """Peak and slices, in bytes."""
    parallel = ParallelConfig.model_validate({"dp_shard": 2, "memory": {"zero_stage": zero}})
    dims = ParallelDims.build(Topology(dp_shard=2), "cpu")
    batches = torch.randint(512, (4, 65)).split(2)
    before = resident("VmRSS")
    parallel_model = parallelize(WIDE, WIDE_MOE, parallel=parallel, dims=dims, seq_len=64)
    model = parallel_model.local_model
    model.to_empty(device="cpu")
    init_parameters(model, parallel_model.layouts, rank, 0, WIDE.num_layers)
    optimizer = build_adamw(model, AdamWConfig(lr=1e-9))
    # So that its pages are there: a step's peak is to be of what comes on top.
    for parameter in model.parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            local_shard(optimizer.state[parameter][moment]).fill_(0.0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(steps):
        optimizer.zero_grad()
        forward_backward(
            model, batches, 256, device=torch.device("cpu"), local_batch=LocalBatch(dims),
            reduce_once=zero == 1,
        )  # fmt: skip
        optimizer.step()
    slices = sum(4 * 4 * local_shard(p).numel() for p in model.parameters())
    return resident("VmHWM") - before, slices


def resident(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def state(samples: int) -> list[Row]:
    """The peak of a rank, under every ZeRO."""
    rows = []
    for zero in (3, 2, 1):
        found = [on_ranks(partial(state_on_rank, zero, 2), 2) for _ in range(samples)]
        peaks = [max(peak for peak, _ in ranks) for ranks in found]
        slices, peak = found[0][0][1], statistics.median(peaks)
        subject = f"zero {zero}"
        rows.append(Row("state", subject, "peak_bytes", peak, "bytes", slices / peak, peaks))
        print(f"state        {subject:<16} {peak / 2**20:8.1f} MiB at most, of which slices "
              f"{slices / 2**20:.1f} MiB")  # fmt: skip
    return rows


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    rows = [*activations(2 if args.quick else args.samples), *state(1 if args.quick else 3)]
    finish("memory", rows, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    main()
