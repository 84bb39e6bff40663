"""Rates of this machine, measured, in the place of a cluster file's published ones.

Under torchrun all ranks measure at once, as they compute at once in a run, and the slowest rank's
rate counts: a step waits for it. Each figure is the median of several repetitions, which the ranks
begin together: a run has no better than ordinary moments, and shares memory and caches among its
ranks. Operands of GEMMs come from memory, as the weights and activations of a step do. The machine
must do nothing else.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from convoy.plan.hardware import BYTES, Chip, Cluster, DtypeName
from parallel.comm import all_gather, reduce_scatter

_GEMM_SHAPES = (
    (4096, 1024, 1024), (1024, 1024, 1024), (512, 512, 512), (2048, 256, 256), (512, 1024, 256),
    (512, 256, 64), (256, 256, 1024), (128, 512, 512), (64, 512, 256), (200, 300, 100),
    (72, 1000, 200),
)  # fmt: skip
"""(rows, columns, length of the sum) on a CPU; an accelerator's are eight times as large each."""
_LENGTHS = (128, 256, 512, 1024, 2048)
_REPEATS = 7
_HALF_DEPTHS = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
_CPU_TILES = (4, 8, 16, 32, 64)
_LIMITS = tuple(1 + 0.02 * i for i in range(31))
"""The rate of an endless product over the fastest measured one."""
_STREAM_NUMBERS = 1 << 24
_COLLECTIVE_BYTES = 1 << 23
"""Of a collective on a CPU, about as large as a layer of a small model; 8 times as many on an
accelerator."""
_CHAIN = 200
_COLD_BYTES = 1 << 27
"""Operands of one GEMM shape together, more than the caches of a rank have."""
_MOST_SETS = 256


def calibrate(base: Cluster, device: torch.device) -> Cluster:
    """``base`` with the measured rates of this machine; collective where there are several ranks.

    Measured are GEMMs of eleven shapes in float32, and on accelerators in bfloat16; attention,
    forward and backward, at five lengths; the memory's bandwidth, the share of it that a decoder's
    element-wise kernels reach, and the time from one kernel to the next; and of the link
    within the node the gathers and reduce-scatters that :mod:`parallel` starts, an all-to-all, and
    the latency of an all-reduce. What cannot be measured stays as in ``base``: prices, power,
    memory size, the link between nodes, and with one rank all links.

    Args:
        base: the cluster file to begin with.
        device: this rank's.
    """
    chip = base.chip
    bandwidth = _slowest(_stream_rate(device)) / 1e9
    if device.type == "cuda":
        bandwidth = max(chip.memory_gigabytes_per_second, bandwidth)  # of the data sheet
    kernels = _slowest(_elementwise_rate(device)) / 1e9
    launch = _slowest_seconds(_launch_seconds(device)) * 1e6
    chip = chip.model_copy(update={
        "memory_gigabytes_per_second": bandwidth,
        "memory_efficiency": min(1.0, kernels / bandwidth),
        "gemm": chip.gemm.model_copy(update={"launch_microseconds": launch}),
    })  # fmt: skip
    dtypes: tuple[DtypeName, ...] = ("float32",)
    if device.type == "cuda":
        dtypes = ("float32", "bfloat16")
    for dtype in dtypes:
        chip = _with_gemms(chip, dtype, device)
    chip = _with_attention(chip, dtypes[-1], device)
    link = base.intra_node
    if dist.is_initialized() and dist.get_world_size() > 1:
        gather, exchange, latency = _link_rates(device)
        peak = max(link.gigabytes_per_second, gather / 1e9, exchange / 1e9)
        link = link.model_copy(update={
            "gigabytes_per_second": peak,
            "efficiency": gather / 1e9 / peak,
            "all_to_all_efficiency": exchange / 1e9 / peak,
            "latency_microseconds": latency * 1e6,
        })  # fmt: skip
    measured = base.model_copy(update={"chip": chip, "intra_node": link})
    return Cluster.model_validate(measured.model_dump())


def _slowest(rate: float) -> float:
    """The lowest rate of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rate
    value = torch.tensor(rate, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return float(value)


def _seconds(act: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """The median time of ``act``; each time several calls, about 20 ms together."""
    act()
    calls = 1
    while True:
        _wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            act()
        _wait(device)
        if time.perf_counter() - began > 0.02 or calls >= 1 << 16:
            break
        calls *= 2
    return _median_seconds(act, device, repeats, calls)


def _median_seconds(
    act: Callable[[], object], device: torch.device, repeats: int, calls: int = 1
) -> float:
    """The median time of one of ``calls`` calls; all ranks begin each repetition together."""
    times = []
    for _ in range(repeats):
        if dist.is_initialized():
            dist.barrier()
        _wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            act()
        _wait(device)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _factor(device: torch.device) -> int:
    """What is measured on an accelerator is so many times as large in a dim."""
    return 8 if device.type == "cuda" else 1


def _stream_rate(device: torch.device) -> float:
    """Bytes per second that an addition of two large tensors reads and writes."""
    a, b = (torch.ones(_STREAM_NUMBERS, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 3 * 4 * _STREAM_NUMBERS / _seconds(lambda: torch.add(a, b, out=out), device)


def _elementwise_rate(device: torch.device) -> float:
    """Bytes per second of norms, sums, a gated activation and a loss, forward and backward.

    The bytes are those that :mod:`convoy.plan.step_time` counts for such kernels. A CPU computes
    exponentials more slowly than its memory reads, and so reaches a small share of the bandwidth.
    """
    tokens, width, hidden, vocab = 1024, 512, 1024, 4096
    factor = _factor(device)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    x, weight = drawn(factor * tokens, width), drawn(width)
    gate, up = drawn(factor * tokens, hidden), drawn(factor * tokens, hidden)
    logits = drawn(factor * tokens, vocab)
    targets = torch.zeros(factor * tokens, dtype=torch.long, device=device)

    def both() -> None:
        y = x + F.rms_norm(x, (width,), weight)
        y = y + F.rms_norm(y, (width,), weight)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        (y.sum() + (F.silu(gate) * up).sum() + loss).backward()
        for tensor in (x, weight, gate, up, logits):
            tensor.grad = None

    elements = 3 * (10 * width + 5 * hidden) + 6 * vocab
    return 4 * factor * tokens * elements / _seconds(both, device, 3)


def _launch_seconds(device: torch.device) -> float:
    """Seconds from one kernel without work to the next."""
    x = torch.zeros(16, device=device)

    def chain() -> None:
        y = x
        for _ in range(_CHAIN):
            y = y + x

    return _seconds(chain, device, 3) / _CHAIN


def _with_gemms(chip: Chip, dtype: DtypeName, device: torch.device) -> Chip:
    """The curve whose times are nearest to the measured ones, by the mean of relative errors."""
    factor = _factor(device)
    shapes = [(m * factor, n * factor, k * factor) for m, n, k in _GEMM_SHAPES]
    taken = [_slowest_seconds(_gemm_seconds(shape, dtype, device)) for shape in shapes]
    rates = [2 * m * n * k / s for (m, n, k), s in zip(shapes, taken, strict=True)]
    fastest = max(rates) / 1e12
    tiles = (chip.gemm.tile,) if device.type == "cuda" else _CPU_TILES
    choices: list[tuple[float, int, Chip]] = []
    for tile, half, above in itertools.product(tiles, _HALF_DEPTHS, _LIMITS):
        tried = _with_curve(chip, dtype, device, fastest * above, tile, half)
        errors = [
            abs(math.log(tried.gemm_seconds(m, n, k, dtype) / seconds))
            for (m, n, k), seconds in zip(shapes, taken, strict=True)
        ]
        choices.append((statistics.fmean(errors), len(choices), tried))
    return min(choices)[2]


def _with_curve(
    chip: Chip, dtype: DtypeName, device: torch.device, limit: float, tile: int, half_depth: float
) -> Chip:
    """A chip whose large products reach ``limit`` TFLOP/s."""
    # A CPU has no data sheet for one process: the limit of its products is the peak.
    peak = max(chip.peak_teraflops.get(dtype, 0.0) if device.type == "cuda" else 0.0, limit)
    shares = chip.gemm.best | {dtype: limit / peak}
    curve = {"tile": tile, "half_depth": half_depth, "best": shares}
    return chip.model_copy(update={
        "gemm": chip.gemm.model_copy(update=curve),
        "peak_teraflops": chip.peak_teraflops | {dtype: peak},
        "sustained": 1.0,
    })  # fmt: skip


def _slowest_seconds(seconds: float) -> float:
    return 1 / _slowest(1 / seconds)


def _gemm_seconds(shape: tuple[int, ...], dtype: DtypeName, device: torch.device) -> float:
    m, n, k = shape
    kind = getattr(torch, dtype)
    size = (m * k + k * n + m * n) * BYTES[dtype]
    sets = []
    for _ in range(min(-(-_COLD_BYTES // size), _MOST_SETS)):
        a = torch.ones(m, k, dtype=kind, device=device)
        b = torch.ones(k, n, dtype=kind, device=device)
        sets.append((a, b, torch.empty(m, n, dtype=kind, device=device)))
    turns = itertools.cycle(sets)

    def multiply() -> None:
        a, b, out = next(turns)
        torch.mm(a, b, out=out)

    return _seconds(multiply, device)


def _with_attention(chip: Chip, dtype: DtypeName, device: torch.device) -> Chip:
    """seconds / FLOPs = (1 + half_length / keys) / (peak x best): a line in 1 / keys, fitted by
    least squares."""
    heads, width = 8, 64
    keys, costs = [], []
    for length in _LENGTHS:
        q = torch.randn(
            1, heads, length, width, dtype=getattr(torch, dtype), device=device, requires_grad=True
        )

        def both(q: Tensor = q) -> None:
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

        # Two products of half of the pairs forward, and 2.5 times as much backward.
        flops = 3.5 * 2 * 2 * heads * width * length * length / 2
        keys.append(1 / length)
        costs.append(_slowest_seconds(_seconds(both, device, 3)) / flops)
    slope, level = np.polyfit(keys, costs, 1)
    level = max(level, min(costs) / 2)
    best = min(1.0, 1 / (level * chip.peak(dtype)))
    curve = chip.attention.model_copy(
        update={"best": float(best), "half_length": float(min(max(slope / level, 0.0), 65_536))}
    )
    return chip.model_copy(update={"attention": curve})


def _link_rates(device: torch.device) -> tuple[float, float, float]:
    """Bytes per second of one rank's link in gathers and reduce-scatters together and in an
    all-to-all, and the seconds of one step of a small collective."""
    group, world = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    steps = world - 1
    full = torch.ones(_COLLECTIVE_BYTES * _factor(device) // 4 // world * world, device=device)
    shard, out = torch.empty(full.numel() // world, device=device), torch.empty_like(full)
    sent = full.numel() * 4 * steps / world
    gather = _collective_seconds(lambda: all_gather(out, shard, group, "world").wait(), device)
    reduce = _collective_seconds(lambda: reduce_scatter(shard, full, group, "world").wait(), device)
    exchange = _collective_seconds(lambda: dist.all_to_all_single(out, full), device)
    word = torch.ones(world, device=device)
    small = _collective_seconds(lambda: dist.all_reduce(word), device)
    return 2 * sent / (gather + reduce), sent / exchange, small / (2 * steps)


def _collective_seconds(act: Callable[[], object], device: torch.device) -> float:
    """The median over repetitions of equal number on all ranks, of the slowest rank."""
    return _slowest_seconds(_median_seconds(act, device, 2 * _REPEATS))
