"""How kernels become operators of torch: one call to autograd, FakeTensorMode and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from router.compiler import constant_in_graphs

LAUNCHES: dict[str, int] = {}
"""By the name of an operator, ``convoy::take_rows``: how many kernels a call with rows launches."""
LAUNCHERS: dict[str, Callable[..., Any]] = {}
"""By the same name: what launches the kernels. Tests call it on tensors of a CPU."""
OPTIONS = {"enable_fp_fusion": False}
"""Of every launch. Products and sums are rounded each by itself, as in plain operations."""

# A FRAGMENT: the namespace has operators of other files too.
_LIBRARY = torch.library.Library("convoy", "FRAGMENT")


def available(device_type: str) -> bool:
    """Whether the kernels run on a device: CUDA of compute capability 8 or later, with Triton.

    Callers look this function up in its package for each call, and tests replace it there.
    """
    return device_type == "cuda" and _has_triton()


@constant_in_graphs
@cache
def _has_triton() -> bool:
    # The kernels are compiled by tests for NVIDIA's devices alone, and bfloat16 begins with 8.0.
    if torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def on_its_device(launch: Callable[..., Any], *args: Any) -> Any:
    """Launch where the tensors are: Triton would launch on the current device, whatever it is."""
    device = next(a for a in args if isinstance(a, Tensor)).device
    if device.index == torch.cuda.current_device():
        return launch(*args)
    with torch.cuda.device(device):
        return launch(*args)


def operator(
    signature: str, launch: Callable[..., Any], shapes: Callable[..., Any], launches: int
) -> Callable[..., Any]:
    """Register an operator of the namespace ``convoy``, for CUDA.

    Args:
        signature: the operator's schema, as ``take_rows(Tensor x, Tensor source) -> Tensor``.
        launch: launches the kernels. Triton is imported inside, and not before.
        shapes: the outputs of fake tensors, without values.
        launches: how many kernels ``launch`` launches, with those that fill tensors.

    Returns:
        The operator. It has no gradient of its own.
    """
    name = signature.partition("(")[0]
    _LIBRARY.define(signature)
    _LIBRARY.impl(name, partial(on_its_device, launch), "CUDA")
    torch.library.register_fake(f"convoy::{name}", shapes, lib=_LIBRARY)
    LAUNCHES[f"convoy::{name}"], LAUNCHERS[f"convoy::{name}"] = launches, launch
    packet: Callable[..., Any] = getattr(torch.ops.convoy, name).default
    return packet
