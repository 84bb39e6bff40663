"""Work of one call side by side on the host's threads, each with whole operations of its own.

Workers run on the threads that OpenMP has for PyTorch's operations. Threads of Python beside them
would wait for a core: after an operation OpenMP's threads spin for some milliseconds, so that the
next operation finds them awake. On two cores a layer took 1.13 times the time with threads of
Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

_MOST_WORKERS = 32  # each has a [S, D] of its own
_WORTH_A_WORKER = 1 << 26  # multiplications in a product, below which a thread costs more
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def num_workers(rows: int, d_model: int, d_ff: int) -> int:
    """Into how many runs of blocks the work is cut; 1 where it is small."""
    if rows * d_model * d_ff < _WORTH_A_WORKER:
        return 1
    return min(torch.get_num_threads(), _MOST_WORKERS)


def run_workers(work: Callable[[int], None], workers: int, one_thread: bool = False) -> None:
    """``work(w)`` for every worker, side by side, without gradients.

    Operations of one worker have all threads, or with ``one_thread`` one; those of several workers
    have one each, without OpenMP a part of the threads. An error of a worker is raised when all
    workers have ended.
    """
    threads = torch.get_num_threads()
    if _get_current_dispatch_mode() is not None and not one_thread:
        # A mode, such as FlopCounterMode, sees the operations of the thread that has entered it.
        # With one_thread the bits come first: they follow from the threads of an operation.
        for worker in range(workers):
            work(worker)
        return
    if workers == 1 and (threads == 1 or not one_thread):
        work(0)
        return
    inference = torch.is_inference_mode_enabled()

    def in_mode(worker: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(worker)

    region = _openmp_region()
    if region is not None:
        _run_in_region(region, in_mode, workers)
    else:
        _run_in_threads(in_mode, workers, 1 if one_thread else max(threads // workers, 1))


@cache
def _openmp_region() -> Callable[..., Any] | None:
    """OpenMP's entry for a parallel region, as GCC's code calls it and LLVM's library has it too;
    None without one."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        region: Any = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    region.argtypes = (_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    region.restype = None
    return region  # type: ignore[no-any-return]


def _run_in_region(region: Callable[..., Any], work: Callable[[int], None], workers: int) -> None:
    """One parallel region; operations inside have one thread each, as regions do not nest.

    ``torch.set_num_threads`` would do for other threads too: those that have not computed yet take
    the last number that any thread has set.
    """
    numbers, errors = iter(range(workers)), []

    def take_turns(_: object) -> None:
        # OpenMP may have fewer threads than were asked for: then one takes several numbers.
        try:
            for number in numbers:
                work(number)
        except BaseException as error:  # ctypes would print and forget it
            errors.append(error)

    region(_Region(take_turns), None, max(workers, 2), 0)  # a region of one thread lets others nest
    if errors:
        raise errors[0]


def _run_in_threads(work: Callable[[int], None], workers: int, threads_of_each: int) -> None:
    """The caller's thread and threads of Python, each with its own threads of OpenMP."""
    threads = torch.get_num_threads()

    def alone(worker: int) -> None:
        # Threads that have not computed yet take this number too: there is no other way here.
        torch.set_num_threads(threads_of_each)
        work(worker)

    try:
        with ThreadPoolExecutor(max(workers - 1, 1)) as pool:
            others = [pool.submit(alone, w) for w in range(1, workers)]
            alone(0)
            for other in others:
                other.result()
    finally:
        torch.set_num_threads(threads)
