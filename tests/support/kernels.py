"""Kernels without a GPU: run by Triton's interpreter on tensors of a CPU, or compiled and not run.

``make test-kernels`` installs Triton beside the environment, in ``build/triton``: within it torch
would behave otherwise. Triton decides when it is imported whether it interprets: there
are two runs of pytest.
"""

from __future__ import annotations

import os
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
import router.kernels

_HAS_TRITON = find_spec("triton") is not None
_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
infinities_are_quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Of numpy, in which the interpreter computes: kernels take infinities and NaN as they come."""


def need_triton(*, interpreter: bool) -> None:
    """Skip the file that calls this function, unless Triton is there, and interprets or not."""
    if not _HAS_TRITON or _INTERPRETS is not interpreter:
        pytest.skip("kernels without a GPU: run by make test-kernels", allow_module_level=True)


def load_operators() -> dict[str, Callable[..., Any]]:
    """What launches the kernels of each operator; a door loads a file when a name is asked for."""
    for door in (router.kernels, moe.kernels):
        for name in door.__all__:
            getattr(door, name)
    return router.kernels.LAUNCHERS


@contextmanager
def on_cpu() -> Iterator[Counter[str]]:
    """The operators take tensors of a CPU, and all who ask are told that there are kernels.

    Gives the number of calls of each operator.
    """
    calls: Counter[str] = Counter()

    def counted(name: str, launch: Callable[..., Any], *args: Any) -> Any:
        calls[name] += 1
        return launch(*args)

    library = torch.library.Library("convoy", "IMPL")
    for name, launch in load_operators().items():
        name = name.removeprefix("convoy::")
        library.impl(name, partial(counted, name, launch), "CPU")
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
