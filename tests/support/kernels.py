"""Kernels without a GPU: run by Triton's interpreter on tensors of a CPU, or compiled and not run.

``make test-kernels`` installs Triton beside the environment, in ``build/triton``: within it torch
would behave otherwise. Triton decides when it is imported whether it interprets: there
are two runs of pytest. With a real CUDA device, tests that are written for the interpreter run the
compiled kernels there instead, on tensors of the device.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe.kernels
import pretrain.kernels
import router.kernels
from tests.support.fake_gpu import values

_HAS_TRITON = find_spec("triton") is not None
_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
ON_DEVICE = torch.cuda.is_available() and not values.is_wanted() and not _INTERPRETS
"""Kernels run on a real CUDA device."""
infinities_are_quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Of numpy, in which the interpreter computes: kernels take infinities and NaN as they come."""


def need_triton(*, interpreter: bool) -> None:
    """Skip the file that calls this function, unless Triton is there, and interprets or not.

    Files for the interpreter are not skipped where there is a real CUDA device.
    """
    if not _HAS_TRITON or (_INTERPRETS is not interpreter and not (interpreter and ON_DEVICE)):
        pytest.skip("kernels without a GPU: run by make test-kernels", allow_module_level=True)


def load_operators() -> dict[str, Callable[..., Any]]:
    """What launches the kernels of each operator; a door loads a file when a name is asked for."""
    for door in (router.kernels, moe.kernels, pretrain.kernels):
        for name in door.__all__:
            getattr(door, name)
    return router.kernels.LAUNCHERS


@contextmanager
def only_when_asked() -> Iterator[None]:
    """Outside :func:`in_use`, nobody is told of kernels; new tensors are where kernels run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.kernels, "available", lambda device_type: False)
        with torch.device("cuda" if ON_DEVICE else "cpu"):
            yield


@contextmanager
def in_use() -> Iterator[Counter[str]]:
    """All who ask are told that there are kernels, and the operators take tensors of a CPU as well.

    Gives the number of calls of each operator.
    """
    calls: Counter[str] = Counter()

    def counted(name: str, launch: Callable[..., Any], *args: Any) -> Any:
        calls[name] += 1
        return launch(*args)

    library = torch.library.Library("convoy", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, launch in load_operators().items():
            name = name.removeprefix("convoy::")
            key = "CUDA" if ON_DEVICE else "CPU"
            library.impl(name, partial(counted, name, launch), key, allow_override=ON_DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.kernels, "available", lambda device_type: True)
        try:
            yield calls
        finally:
            library._destroy()


class Launch:
    """Stands in for a kernel: notes the arguments of launches."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> None:
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            self.launches.append((self.kernel, args, constants, options))

        return launch


class Fills(TorchDispatchMode):
    """Counts the operations that fill tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.new_zeros, torch.ops.aten.zero_)
        return func(*args, **kwargs or {})
