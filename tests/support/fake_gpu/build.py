"""Compile the C++ files of this folder against the installed torch, once for each torch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
BUILT = Path(__file__).parents[3] / "build" / "fake_gpu"


def why_not() -> str:
    """Why there is no fake device here, and what would help; empty where there can be one."""
    if torch.cuda.is_available():
        return "this torch has a CUDA device: run the tests without CONVOY_TEST_DEVICE"
    if shutil.which("g++") is None:
        return "a fake device needs g++: install it, for instance with apt install g++"
    return ""


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The library of ``name.cpp``, compiled if need be, in 5 to 15 s.

    Raises subprocess.CalledProcessError, with the compiler's words on stderr, where this torch's
    headers are not those that the file was written for.
    """
    sources = [HERE / "guard.h", HERE / f"{name}.cpp"]
    key = hashlib.sha256(torch.__version__.encode())
    for source in sources:
        key.update(source.read_bytes())
    path = BUILT / f"{name}-{key.hexdigest()[:16]}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        _compile(sources[-1], path)
    return ctypes.CDLL(str(path))


def _compile(source: Path, target: Path) -> None:
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        draft = Path(folder) / target.name
        subprocess.run(
            [
                "g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w",
                f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include",
                str(source), "-o", str(draft), f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-ltorch",
            ],
            check=True,
        )  # fmt: skip
        draft.replace(target)  # another process may have made the same file
