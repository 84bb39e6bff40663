"""What a rank measures: products of its device, memory, storage, and collectives of all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

_WINDOWS = 5
"""The best window counts: another process of the machine may disturb some of them."""
_WINDOW_SECONDS = 0.2
"""Longer than the time slices of a scheduler, so that a rank that often stands still is slow."""


def product_shape(device: torch.device) -> tuple[int, torch.dtype]:
    """Rows, and columns, of each matrix of the product, and their dtype."""
    return (512, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)


def product_rate(device: torch.device) -> float:
    """FLOP/s of C = A B: bfloat16 [8192, 8192] on an accelerator, float32 [512, 512] on a CPU."""
    size, dtype = product_shape(device)
    a = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    best = 0.0
    for _ in range(_WINDOWS):
        synchronize(device)
        began, products = time.perf_counter(), 0
        while time.perf_counter() - began < _WINDOW_SECONDS:
            for _ in range(2 if device.type == "cpu" else 10):
                torch.mm(a, a, out=out)
                products += 1
            synchronize(device)
        best = max(best, products * 2 * size**3 / (time.perf_counter() - began))
    return best


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def turns(local_ranks: int, device: torch.device) -> int:
    """In how many turns the ranks of a node measure: ranks on a CPU must not share its cores."""
    if device.type != "cpu":
        return 1
    at_once = max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())
    return -(-local_ranks // at_once)


_BLOCK = 1 << 28
"""Bytes of one tensor."""
_SHARE_OF_DEVICE = 0.9
"""Of an accelerator's free memory."""
_PATTERNS = (0x5555555555555555, -0x5555555555555556)
"""Every bit is 0 once and 1 once, at every address."""


def memory_fault(device: torch.device, cpu_bytes: int) -> str | None:
    """What is wrong with the memory of a device; None where every byte kept its value.

    Args:
        device: an accelerator, nearly all of whose free memory is written, or the CPU.
        cpu_bytes: to write on a CPU.
    """
    amount = cpu_bytes
    if device.type == "cuda":
        amount = int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_DEVICE)
    words = torch.arange(_BLOCK // 8, device=device)  # another value at each address
    blocks: list[torch.Tensor] = []
    try:
        for _ in range(max(1, amount // _BLOCK)):
            blocks.append(torch.empty_like(words))
    except torch.OutOfMemoryError as error:
        if not blocks:
            return str(error).splitlines()[0]
    for pattern in _PATTERNS:
        for number, block in enumerate(blocks):
            torch.bitwise_xor(words, pattern ^ number, out=block)
        for number, block in enumerate(blocks):
            wrong = block.bitwise_xor_(words) != pattern ^ number
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                count = int(wrong.sum())
                return (
                    f"{count} words of {_BLOCK >> 20} MiB did not keep their value; the first is "
                    f"word {first} of block {number}"
                )
    return None


_CHUNK = 1 << 22


def storage_rates(folder: Path, rank: int, size: int) -> tuple[float, float]:
    """Bytes per second of a write with fsync, and of a read after it.

    The file is removed. The system is asked to drop the file from its cache before the read.

    Raises OSError where the folder cannot be used, and ValueError where other bytes come back.
    """
    path = folder / f".burn-in-{rank}-{os.getpid()}"
    noise = os.urandom(_CHUNK - 8)
    chunks = max(1, size // _CHUNK)
    try:
        began = time.perf_counter()
        with path.open("wb") as file:
            for number in range(chunks):
                file.write(number.to_bytes(8, "little"))
                file.write(noise)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        wrote = time.perf_counter()
        with path.open("rb") as file:
            for number in range(chunks):
                if file.read(8) != number.to_bytes(8, "little") or file.read(_CHUNK - 8) != noise:
                    raise ValueError(
                        f"{path} came back with other bytes at offset {number * _CHUNK}"
                    )
        read = time.perf_counter()
    finally:
        path.unlink(missing_ok=True)
    return chunks * _CHUNK / (wrote - began), chunks * _CHUNK / (read - wrote)


_TRIPS = 3


def all_to_all(device: torch.device, rows: int, row_bytes: int) -> tuple[float, str | None]:
    """Bytes per second that this rank sends to other ranks in an all-to-all, and what is wrong.

    Args:
        device: on which the tensors are.
        rows: of each rank, shared out evenly.
        row_bytes: of each row.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    size = max(1, rows // world) * row_bytes
    # What rank a sends to rank b is full of a value that both know.
    sent = torch.empty(world, size, dtype=torch.uint8, device=device)
    for peer in range(world):
        sent[peer] = _value(rank, peer)
    got = torch.empty_like(sent)
    seconds = _best(lambda: dist.all_to_all_single(got, sent), device)
    for peer in range(world):
        if not bool((got[peer] == _value(peer, rank)).all()):
            return 0.0, f"other bytes than rank {peer} sent in an all-to-all"
    return (world - 1) * size / seconds, None


def _value(sender: int, receiver: int) -> int:
    return (7 * sender + 31 * receiver) % 251


def all_reduce(device: torch.device, size: int) -> tuple[float, str | None]:
    """Bytes per second of an all-reduce of ``size`` bytes of float32, and what is wrong.

    The rate is size x 2 (world - 1) / world over the time, as in NCCL's tests ("bus bandwidth").
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.empty(size // 4, device=device)

    def reduce() -> None:
        mine.fill_(float(rank + 1))
        dist.all_reduce(mine)

    seconds = _best(reduce, device)
    expected = world * (world + 1) // 2  # exact in float32 up to 5,000 ranks and beyond
    if not bool((mine == expected).all()):
        return 0.0, f"sums of an all-reduce that are not {expected}"
    return mine.numel() * 4 * 2 * (world - 1) / world / seconds, None


def _best(act: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_TRIPS):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        act()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
