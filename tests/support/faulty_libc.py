"""A preloaded library that makes a disk full at any operation, and lets the wall clock jump.

``tests/support/faulty_libc.cpp`` stands between a program and libc, so it also meets what compiled
extensions write. A file that C code writes with ``fwrite`` passes it by.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_suffix(".cpp")
BUILT = ROOT / "build" / "faulty_libc"
ALWAYS = 1 << 40
"""Failures of a disk that stays full."""


@functools.cache
def library() -> Path:
    """The compiled library. Skips the test where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("the preloaded library needs g++")
    path = BUILT / f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            draft = Path(folder) / path.name
            words = ["g++", "-O1", "-std=c++17", "-fPIC", "-shared", "-w"]
            subprocess.run([*words, str(SOURCE), "-o", str(draft), "-ldl"], check=True)
            draft.replace(path)  # another process may have made the file too
    return path


def environment(
    *, clock: str | None = None, full: tuple[int, int, Path] | None = None
) -> dict[str, str]:
    """For a program that is to have the library, and for all that it starts.

    Args:
        clock: the period in seconds and the offsets of the wall clock, which take turns.
        full: the arguments of :func:`arm`, in another order: each process counts for itself.
    """
    own = {"LD_PRELOAD": str(library()), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if clock is not None:
        own["FAULTY_CLOCK"] = clock
    if full is not None:
        at, failures, folder = full
        own["FAULTY_ARM"] = f"{at} {failures} {folder}"
    return {**os.environ, **own}


def arm(folder: Path, at: int, failures: int = ALWAYS) -> None:
    """In a program with the library: from the ``at``-th operation below a folder on the disk is
    full, for so many failures after the first; below 0 operations are counted only."""
    _own().faulty_arm(os.fsencode(folder), ctypes.c_long(at), ctypes.c_long(failures))


def count() -> int:
    """Operations since the last :func:`arm`."""
    return int(_own().faulty_count())


def _own() -> ctypes.CDLL:
    own = ctypes.CDLL(None)
    own.faulty_count.restype = ctypes.c_long
    return own
