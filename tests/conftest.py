"""Threads are fixed before torch loads, so that sums have one order."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
