"""Large tensors in host memory whose memory is handed out again when no tensor holds it.

glibc returns large freed blocks to the system, and the system clears every page of a new block: on
a CPU that takes more time than some of the operations which fill the tensors. Accelerators have a
caching allocator in PyTorch; CPUs have none.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from math import prod
from operator import itemgetter

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20
"""Smaller tensors are left to PyTorch: glibc keeps their memory by itself."""
MOST_IDLE_BYTES = 2 << 30
"""What is kept at most while no tensor holds it; what was given back first goes to the system."""
_PAGE = 2 << 20  # a huge page, which the system clears and maps at once


class HostBuffers:
    """Memory for large tensors of the host; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[mmap.mmap] = deque()
        """Given back, and not yet among the idle."""
        self._idle: list[tuple[int, int, mmap.mmap]] = []
        """Sorted by size; the number in between is that of the giving back."""
        self._number = 0
        self.idle_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of ``shape``; its numbers are arbitrary.

        The memory is taken again when the last tensor goes that shares it, views among them.
        """
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = -(-count * dtype.itemsize // _PAGE) * _PAGE
        memory = self._take(size)
        # What the tensor holds: PyTorch drops it with the tensor's storage.
        lease = (ctypes.c_char * (count * dtype.itemsize)).from_buffer(memory)
        weakref.finalize(lease, self._give_back, memory).atexit = False
        storage = torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()
        # Not a view: autograd does not let a custom function's output be a view that is changed.
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            self._settle()
            place = bisect_left(self._idle, (size,))
            # A larger one is taken where little of it is left over.
            if place < len(self._idle) and self._idle[place][0] <= size + size // 4:
                found, _, memory = self._idle.pop(place)
                self.idle_bytes -= found
                return memory
        # Private: a forked process must not write into its parent's tensors. Python's default is
        # shared memory, which would not be of huge pages either.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The constant comes with Python, and the kernel may be without huge pages.
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        self._returned.append(memory)
        # A collection of garbage may come here while this thread holds the lock: then whoever holds
        # the lock next puts the memory in its place.
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Make what was given back ready to be taken; within the lock."""
        while self._returned:
            memory = self._returned.popleft()
            self._number += 1
            insort(self._idle, (len(memory), self._number, memory))
            self.idle_bytes += len(memory)
        # Sizes that nobody asks for any more must not fill the place of those in use.
        while self.idle_bytes > MOST_IDLE_BYTES:
            oldest = min(self._idle, key=itemgetter(1))
            self._idle.remove(oldest)
            self.idle_bytes -= oldest[0]

    def forget(self) -> None:
        """Begin anew in a forked process."""
        self._lock = threading.Lock()
        self.release()

    def release(self) -> None:
        """Give the memory back to the system that no tensor holds."""
        with self._lock:
            self._returned.clear()
            self._idle.clear()
            self.idle_bytes = 0


HOST_BUFFERS = HostBuffers()
"""Of this process."""
# A thread of the parent that held the lock is not there to give the lock back.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HOST_BUFFERS.forget)


def new_empty(like: Tensor, *shape: int) -> Tensor:
    """``like.new_empty(shape)``; large tensors of the host from :data:`HOST_BUFFERS`."""
    if torch.compiler.is_compiling() or like.device.type != "cpu":
        return like.new_empty(shape)
    # Another class of tensor, as one of a compiler, has no memory of its own.
    if type(like) not in (Tensor, torch.nn.Parameter):
        return like.new_empty(shape)
    if prod(shape) * like.dtype.itemsize < LEAST_BYTES:
        return like.new_empty(shape)
    return HOST_BUFFERS.empty(shape, like.dtype)


def empty_like(like: Tensor) -> Tensor:
    """``torch.empty_like(like)``, contiguous; see :func:`new_empty`."""
    return new_empty(like, *like.shape)


def zeros_like(like: Tensor) -> Tensor:
    """``torch.zeros_like(like)``, contiguous; see :func:`new_empty`."""
    return empty_like(like).zero_()
