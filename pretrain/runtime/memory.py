"""Memory of this process: what the allocator keeps, and the peak."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import torch

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for what comes next, in this process.

    It gives large pieces back at once, and takes them anew zeroed, page by page, in every step: on
    a CPU that costs several percent of it. Does nothing with another C library, or where the
    environment tunes glibc's malloc itself.
    """
    tuned = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not tuned:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def peak_memory_bytes() -> int:
    """The most memory this process has had: on its CUDA device, or else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
