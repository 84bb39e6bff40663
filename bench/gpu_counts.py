"""What MoE layers launch and wait for on a CUDA device, beside what the fake GPU counts.

    python -m bench.gpu_counts [--quick] [--only TEXT] [--json FILE]

The cases are some of those of one rank in ``tests/fake_gpu/layers.py``, whose counts
``tests/fake_gpu/budgets.json`` has. A forward and a backward each run under torch's profiler, after
two that do not count. A row has what the device did, and the fake GPU's count as a share of it:
``kernels`` (with copies between places of the device, and fills), ``waits`` of the host for the
device, ``busy_seconds`` of kernels by the profiler, and ``seconds`` without the profiler, both with
the bytes that the fake GPU counts as a share of what the device's memory moves in that time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness import Row, arguments, finish
from moe import MoEConfig, MoELayer
from tests.fake_gpu.layers import ALONE, SIZES, TOKENS
from tests.fake_gpu.measure import budgets

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_WAITS_OF_PROFILER = 2
"""One behind what is counted, and one at the profiler's end."""
CASES = ("plain", "recompute_experts", "ffn_bias", "shared experts with a gate", "DeepSeek-V3")
QUICK = {"d_model": 128, "d_ff": 64, "num_experts": 16, "top_k": 4}


def layer_of(options: dict[str, Any], sizes: dict[str, int], tokens: int) -> tuple[MoELayer, Any]:
    """A layer of a case on the device, and its input."""
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(**(sizes | options))).to("cuda", torch.bfloat16)
    x = torch.randn(tokens, sizes["d_model"], device="cuda").bfloat16()
    return layer, x.requires_grad_()


def counted(act: Callable[[], Any]) -> tuple[Any, Counter[str], float]:
    """What ``act`` returns, its kernels and waits, and the seconds in which kernels ran."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        result = act()
        torch.cuda.synchronize()
    counts = Counter(waits=-_WAITS_OF_PROFILER)
    busy = 0.0
    for event in trace.events():
        if event.device_type.name == "CUDA":
            counts["kernels"] += 1
            busy += event.time_range.elapsed_us() / 1e6
        elif event.name in WAITS:
            counts["waits"] += 1
    return result, counts, busy


def timed(act: Callable[[], Any], samples: int) -> float:
    """The median of seconds."""
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes a second that the device's memory moves in a copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * len(source) / timed(lambda: target.copy_(source), 5)


def rows_of(name: str, rate: float, quick: bool, samples: int) -> list[Row]:
    """A case's rows."""
    layer, x = layer_of(ALONE[name], QUICK if quick else SIZES, 256 if quick else TOKENS)

    def loss_of(out: Any) -> torch.Tensor:
        total: torch.Tensor = out.hidden.float().sum() + out.aux.aux_loss
        return total

    def both() -> None:
        loss_of(layer(x)).backward()
        x.grad = None
        layer.zero_grad()

    both()
    both()
    out, ahead, busy_ahead = counted(lambda: layer(x))
    _, behind, busy_behind = counted(lambda: loss_of(out).backward())
    x.grad = None
    layer.zero_grad()
    seconds = {"forward": timed(lambda: layer(x), samples)}
    seconds["backward"] = timed(both, samples) - seconds["forward"]
    rows = []
    for half, counts, busy in (
        ("forward", ahead, busy_ahead), ("backward", behind, busy_behind)
    ):  # fmt: skip
        fake = budgets("layers")[f"1 rank: {name}"][half]
        waits = sum(fake["waits"].values())
        moved = fake["gigabytes"] * 1e9 / rate
        for metric, value, unit, ratio in (
            ("kernels", counts["kernels"], "kernels", fake["kernels"] / max(counts["kernels"], 1)),
            ("waits", counts["waits"], "waits", (waits + 1) / (counts["waits"] + 1)),
            ("busy_seconds", busy, "s", moved / max(busy, 1e-9)),
            ("seconds", seconds[half], "s", moved / max(seconds[half], 1e-9)),
        ):
            rows.append(Row(name, half, metric, float(value), unit, ratio, []))
        print(f"{name:<28} {half:<9} {counts['kernels']:5} kernels of {fake['kernels']:5}  "
              f"{counts['waits']:3} waits of {waits:3}  busy {busy * 1e3:7.2f} ms of "
              f"{seconds[half] * 1e3:7.2f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    args = arguments(__doc__ or "")
    rate = copy_rate()
    rows = [Row("copy", "device", "bytes_per_second", rate, "B/s", 1.0, [])]
    print(f"memory copies {rate / 1e12:.2f} TB/s")
    for name in CASES:
        if args.only in name:
            rows += rows_of(name, rate, args.quick, args.samples)
    finish("gpu_counts", rows, ["torch", "triton"], args.json)


if __name__ == "__main__":
    main()
