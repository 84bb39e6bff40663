"""Memory of this process: glibc's allocator, and the peak."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import torch

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let glibc keep freed memory of this process for later allocations.

    By default glibc returns large freed blocks to the kernel, and each step gets zeroed pages for
    new blocks: on a CPU that costs several percent of a step. Does nothing with another C library,
    or where environment variables tune glibc's malloc.
    """
    tuned = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not tuned:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def peak_memory_bytes() -> int:
    """Peak bytes of this process: allocated on its CUDA device, or else resident on the host."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
