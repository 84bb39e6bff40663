"""Training steps of a model that fills one accelerator, as a share of its peak.

    python -m bench.train_gpu [--quick] [--json FILE]

A decoder of 8 layers with 64 experts of which a token takes 8 (3.5 billion parameters, .7 of them
active; 4 layers where three quarters of the device's memory would not hold the parameters' state)
in bfloat16 with float32 parameters, gradients and moments: forward, loss, backward, gradient norm
and AdamW, of two micro-batches of sequences of 4,096 tokens. Cases differ in what is computed again
and in the sequences of a micro-batch: where few tokens are computed at a time, the host launches
kernels more slowly than the device runs them.
The limit is the device's data sheet; a row's share of it is the model FLOPs utilization.
``--quick``, and a machine without CUDA, take a model of 4 small layers, which tells nothing but
that the bench runs.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from bench.harness import Row, arguments, finish
from moe import MoEConfig
from parallel import ParallelConfig, ParallelDims, Topology, clip_grad_norm
from pretrain.model import (
    Decoder,
    ModelConfig,
    forward_flops,
    init_parameters,
    peak_flops_per_second,
)
from pretrain.optim import AdamWConfig, build_adamw
from pretrain.parallelize import LocalBatch, forward_backward, parallelize

LARGE = ModelConfig(vocab_size=50304, d_model=2048, num_layers=8, num_heads=16, num_kv_heads=4)
LARGE_MOE = MoEConfig(d_model=2048, d_ff=1024, num_experts=64, top_k=8)
SMALL = ModelConfig(vocab_size=512, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2)
SMALL_MOE = MoEConfig(d_model=64, d_ff=64, num_experts=8, top_k=2)


class Way(NamedTuple):
    """How a step is computed."""

    recompute: str
    sequences: int
    """Of a micro-batch."""
    compiled: bool = False


WAYS = (
    Way("full", 2), Way("full", 8), Way("selective", 2), Way("none", 2), Way("full", 2, True),
)  # fmt: skip
MICRO_BATCHES = 2
BYTES = 16
"""Of a parameter in float32 with its gradient and two moments."""
MOST = 0.75
"""The share of a device's memory for them; activations have the rest."""


def large(memory: int) -> ModelConfig:
    """The model with as many layers as ``memory`` bytes hold, of 8 and 4."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(LARGE, LARGE_MOE).parameters())
    fits = BYTES * parameters <= MOST * memory
    return LARGE if fits else LARGE.model_copy(update={"num_layers": 4})


def length(model: ModelConfig) -> int:
    """Tokens of a sequence."""
    return 64 if model is SMALL else 4096


def steps(
    way: Way, model: ModelConfig, device: torch.device, samples: int
) -> tuple[list[float], float]:
    """Seconds of every step after two that do not count, and the model FLOPs of one."""
    small = model is SMALL
    moe = SMALL_MOE if small else LARGE_MOE
    b, s = way.sequences, length(model)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    parallel = ParallelConfig.model_validate(
        {"dp_shard": 1, "memory": {"recompute": way.recompute}}
    )
    dims = ParallelDims.build(Topology(), device.type)
    parallel_model = parallelize(
        model, moe, parallel=parallel, dims=dims, seq_len=s, dtype=dtype, compiled=way.compiled
    )
    parallel_model.local_model.to_empty(device=device)
    init_parameters(parallel_model.local_model, parallel_model.layouts, 0, 0, model.num_layers)
    optimizer = build_adamw(parallel_model.local_model, AdamWConfig(lr=1e-9))
    batches = torch.randint(model.vocab_size, (MICRO_BATCHES * b, s + 1)).split(b)
    tokens, times = MICRO_BATCHES * b * s, []
    for turn in range(samples + 2):
        began = time.perf_counter()
        optimizer.zero_grad()
        forward_backward(
            parallel_model.local_model, batches, tokens, device=device, local_batch=LocalBatch(dims)
        )
        clip_grad_norm(parallel_model.local_model, dims, 1.0)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn > 1:
            times.append(time.perf_counter() - began)
    return times, forward_flops(model, moe, s).training * tokens


def main() -> int:
    args = arguments(__doc__)
    cuda = torch.cuda.is_available()
    small, device = args.quick or not cuda, torch.device("cuda" if cuda else "cpu")
    model = SMALL if small else large(torch.cuda.get_device_properties(0).total_memory)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=HashStore(), rank=0, world_size=1
    )
    peak = peak_flops_per_second(device, torch.bfloat16 if cuda else torch.float32)
    rows = []
    for way in WAYS:
        if args.quick and way.compiled:
            continue  # compiling takes a minute, and Triton
        name = f"{way.recompute}, {way.sequences} sequences{', compiled' if way.compiled else ''}"
        try:
            times, flops = steps(way, model, device, 3 if args.quick else args.samples)
        except torch.cuda.OutOfMemoryError:
            print(f"{name}: does not fit")
            continue
        finally:
            if cuda:
                torch.cuda.empty_cache()
        tokens = MICRO_BATCHES * way.sequences * length(model)
        rates = [tokens / seconds for seconds in times]
        mfu = flops / statistics.median(times) / peak
        case = f"{model.num_layers} layers, d_model {model.d_model}"
        rows.append(Row(case, name, "tokens_per_second", statistics.median(rates), "tokens/s",
                        mfu, rates))  # fmt: skip
        print(f"{case}  {name:<28} {rows[-1].value:12,.0f} tokens/s   MFU {mfu:.1%}", flush=True)
    dist.destroy_process_group()
    finish("train_gpu", rows, ["torch", "numpy"], args.json)
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
