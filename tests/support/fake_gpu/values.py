"""A pretended CUDA device: tensors of device "cuda" with real numbers, in host memory.

``CONVOY_TEST_DEVICE=cuda`` has :mod:`tests.conftest` and :mod:`tests.support.preload` install the
device in the process of the tests and in its ranks. Every operator runs its CPU kernel; autograd,
FSDP, views and c10d see device "cuda" throughout, with gloo in the place of NCCL. New memory is
full of NaN. An operator on tensors of two devices raises, as on a GPU.

Not seen: kernels, their speed and the order of their sums, streams, and NCCL.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
import torch.distributed as dist

from tests.support.fake_gpu import cuda
from tests.support.fake_gpu.build import library

VARIABLE = "CONVOY_TEST_DEVICE"


def is_wanted() -> bool:
    """Whether this process is to have the pretended device."""
    return os.environ.get(VARIABLE) == "cuda"


def is_installed() -> bool:
    """Whether :func:`install` has been called in this process."""
    return torch.cuda.cudart is _Cudart


def install() -> None:
    """Have one pretended CUDA device in this process, which every rank's device index names.

    Does nothing in a process that has it.
    """
    if is_installed():
        return
    lib = library("values")
    for name in ("live_bytes", "peak_bytes", "sync_count"):
        getattr(lib, name).restype = ctypes.c_longlong
    lib.storage_resize.argtypes = [ctypes.c_void_p, ctypes.c_longlong]
    lib.install()
    cuda.install(devices=8)
    torch.cuda.max_memory_allocated = lambda device=None: lib.peak_bytes()
    torch.cuda.memory_allocated = lambda device=None: lib.live_bytes()
    torch.cuda.reset_peak_memory_stats = lambda device=None: lib.reset_peak()
    # What takes all free memory, as a burn-in, must not take the host's.
    torch.cuda.mem_get_info = lambda device=None: (64 << 20, cuda.PROPERTIES.total_memory)
    torch.histc = _histogram_of_integers(torch.histc)
    torch.cuda.cudart = _Cudart
    torch.cuda.set_sync_debug_mode = _SyncDebugMode(lib)
    _resize_storages(lib)
    _use_gloo()
    _pickle_from_the_host()
    torch.Tensor.pin_memory = lambda self, device=None: self


class _Cudart:
    def cudaHostRegister(self, *_: Any) -> int:
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:
        return 0


class _SyncDebugMode:
    """Waits between the modes ``error`` and ``default`` are an error at the latter."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib, self.start = lib, 0

    def __call__(self, mode: str) -> None:
        count = self.lib.sync_count()
        if mode == "error":
            self.start = count
        elif count != self.start:
            waits, self.start = count - self.start, count
            raise RuntimeError(f"called {waits} synchronizing CUDA operations")


def _histogram_of_integers(plain: Any) -> Any:
    """``torch.histc`` that takes integers, as on CUDA and not on a CPU."""

    def histc(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if x.is_floating_point():
            return plain(x, *arguments, **options)
        return plain(x.float(), *arguments, **options).to(x.dtype)

    return histc


def _resize_storages(lib: ctypes.CDLL) -> None:
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        if storage.device.type == "cuda":
            lib.storage_resize(storage._cdata, size)
        else:
            plain(storage, size)

    torch.UntypedStorage.resize_ = resize


def _use_gloo() -> None:
    plain = dist.init_process_group

    def init(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        if backend is not None and "nccl" in backend:
            backend = "cpu:gloo,cuda:gloo"
        plain(backend, *arguments, **options)

    dist.init_process_group = init
    start_all = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: [_WaitedForOnce(work) for work in start_all(ops)]


class _WaitedForOnce:
    """A send or a receive that several streams may wait for, as NCCL's; gloo's ends once."""

    def __init__(self, work: dist.Work) -> None:
        self.work: dist.Work | None = work

    def wait(self) -> bool:
        work, self.work = self.work, None
        return work is None or work.wait()


def _pickle_from_the_host() -> None:
    plain = torch.Tensor.__reduce_ex__

    def reduce(tensor: torch.Tensor, protocol: int) -> Any:
        on_device = type(tensor) is torch.Tensor and tensor.device.type == "cuda"
        return plain(tensor.detach().cpu() if on_device else tensor, protocol)

    torch.Tensor.__reduce_ex__ = reduce
