"""Host memory that a trainer fills and its writer process writes from."""

from __future__ import annotations

import mmap
import os

import numpy as np

from ckpt.store import PAGE, Bytes


class Staging:
    """Anonymous shared memory of all processes that have its file descriptor, ``handle``.

    The memory grows and never shrinks. The system frees the memory when the last process has closed
    its descriptor.
    """

    def __init__(self, handle: int | None = None) -> None:
        self.handle = os.memfd_create("convoy-staging") if handle is None else handle
        self._memory: Bytes | None = None

    def buffer(self, count: int) -> Bytes:
        """The first ``count`` bytes, aligned to a page; their contents stay as they were.

        Raises OSError where there is not enough memory.
        """
        if self._memory is None or self._memory.nbytes < count:
            size = max(-(-count // PAGE) * PAGE, os.fstat(self.handle).st_size)
            os.ftruncate(self.handle, size)
            self._memory = np.empty(0, np.uint8)  # unmap the old mapping before a new one is made
            if size:
                # Faulting in every page now spares the first save from it.
                populate = getattr(mmap, "MAP_POPULATE", 0)
                mapping = mmap.mmap(self.handle, size, flags=mmap.MAP_SHARED | populate)
                self._memory = np.frombuffer(mapping, np.uint8)
        return self._memory[:count]

    def close(self) -> None:
        """Unmap the memory in this process."""
        self._memory = None
        os.close(self.handle)
