"""What the system says of this process."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int | None:
    """The memory that this process has now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None  # not Linux
    return pages * os.sysconf("SC_PAGE_SIZE")
