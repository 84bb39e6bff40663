"""The folder of checkpoints, as each rank sees it: written, synced and read back."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
