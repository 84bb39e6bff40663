"""Training steps of a model that fills one accelerator, as a share of its peak.

    python -m bench.train_gpu [--quick] [--json FILE]

A decoder of 16 layers with 64 experts of which a token takes 8 (6.8 billion parameters, 1.1 of them
active; 8 or 4 layers where the device's memory would not hold them) in bfloat16 with float32
parameters, gradients and moments: forward, loss, backward, gradient norm and AdamW, of
micro-batches of 2 x 4,096 tokens, under ways to compute activations again.
The limit is the device's data sheet; a row's share of it is the model FLOPs utilization.
``--quick``, and a machine without CUDA, take a model of 4 small layers, which tells nothing but
that the bench runs. Not yet run on an accelerator.
"""

from __future__ import annotations

import statistics
import time

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

LARGE = ModelConfig(vocab_size=50304, d_model=2048, num_layers=16, num_heads=16, num_kv_heads=4)
LARGE_MOE = MoEConfig(d_model=2048, d_ff=1024, num_experts=64, top_k=8)
SMALL = ModelConfig(vocab_size=512, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2)
SMALL_MOE = MoEConfig(d_model=64, d_ff=64, num_experts=8, top_k=2)
WAYS = ("full", "selective")
"""The one that needs least memory first: the other may not fit."""


BYTES = 16
"""Of a parameter in float32 with its gradient and two moments."""
MOST = 0.8
"""The share of a device's memory for them; activations have the rest."""


def large(memory: int) -> ModelConfig:
    """The model with as many layers as ``memory`` bytes hold, of 16, 8 and 4."""
    for layers in (16, 8):
        model = LARGE.model_copy(update={"num_layers": layers})
        with torch.device("meta"):
            parameters = sum(p.numel() for p in Decoder(model, LARGE_MOE).parameters())
        if BYTES * parameters <= MOST * memory:
            return model
    return LARGE.model_copy(update={"num_layers": 4})


def steps(
    way: str, model: ModelConfig, device: torch.device, samples: int
) -> tuple[list[float], float]:
    """Seconds of every step after two that do not count, and the model FLOPs of one."""
    small = model is SMALL
    moe = SMALL_MOE if small else LARGE_MOE
    b, s = (2, 64) if small else (2, 4096)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    parallel = ParallelConfig.model_validate({"dp_shard": 1, "memory": {"recompute": way}})
    dims = ParallelDims.build(Topology(), device.type)
    parallel_model = parallelize(model, moe, parallel=parallel, dims=dims, seq_len=s, dtype=dtype)
    parallel_model.local_model.to_empty(device=device)
    init_parameters(parallel_model.local_model, parallel_model.layouts, 0, 0, model.num_layers)
    optimizer = build_adamw(parallel_model.local_model, AdamWConfig(lr=1e-9))
    batches = torch.randint(model.vocab_size, (2 * b, s + 1)).split(b)
    tokens, times = 2 * b * s, []
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
        try:
            times, flops = steps(way, model, device, 3 if args.quick else args.samples)
        except torch.cuda.OutOfMemoryError:
            print(f"{way}: does not fit")
            continue
        finally:
            if cuda:
                torch.cuda.empty_cache()
        tokens = 4 * (64 if small else 4096)
        rates = [tokens / seconds for seconds in times]
        mfu = flops / statistics.median(times) / peak
        case = f"{model.num_layers} layers, d_model {model.d_model}"
        rows.append(Row(case, f"convoy {way}", "tokens_per_second", statistics.median(rates),
                        "tokens/s", mfu, rates))  # fmt: skip
        print(f"{case}  {way:<10} {rows[-1].value:12,.0f} tokens/s   MFU {mfu:.1%}")
    dist.destroy_process_group()
    finish("train_gpu", rows, ["torch", "numpy"], args.json)
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
