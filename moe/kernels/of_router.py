"""What kernels of both packages have in common, and the sort, by way of :mod:`router.kernels`."""

from __future__ import annotations

from router import kernels
from router.kernels import LAUNCHES as LAUNCHES
from router.kernels import MAX_BINS as MAX_BINS
from router.kernels import MAX_BLOCKS as MAX_BLOCKS
from router.kernels import MAX_COLUMNS as MAX_COLUMNS
from router.kernels import sort_assignments as sort_assignments
from router.kernels import sort_by_bin as sort_by_bin


def available(device_type: str) -> bool:
    """See :func:`router.kernels.available`, which is asked in each call: who replaces that function
    replaces this one too."""
    return kernels.available(device_type)
