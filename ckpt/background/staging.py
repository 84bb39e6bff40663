"""Host memory that a trainer fills and its keeper writes from."""

from __future__ import annotations

import mmap
import os

import numpy as np

from ckpt.store import PAGE, Bytes


class Staging:
    """Anonymous shared memory, in as many processes as have its handle; it grows, and never
    shrinks. It is gone when the last of them has let go."""

    def __init__(self, handle: int | None = None) -> None:
        self.handle = os.memfd_create("convoy-staging") if handle is None else handle
        self._memory: Bytes | None = None

    def room(self, count: int) -> Bytes:
        """``count`` bytes from the first on, aligned to a page. What was in them stays.

        Raises OSError where there is no memory.
        """
        if self._memory is None or self._memory.nbytes < count:
            size = max(-(-count // PAGE) * PAGE, os.fstat(self.handle).st_size)
            os.ftruncate(self.handle, size)
            self._memory = np.empty(0, np.uint8)  # an old mapping goes before there is a new one
            if size:
                # Faulting in every page now spares the first save from it.
                populate = getattr(mmap, "MAP_POPULATE", 0)
                mapping = mmap.mmap(self.handle, size, flags=mmap.MAP_SHARED | populate)
                self._memory = np.frombuffer(mapping, np.uint8)
        return self._memory[:count]

    def close(self) -> None:
        """Let go of it in this process."""
        self._memory = None
        os.close(self.handle)
