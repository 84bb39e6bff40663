"""A machine of fake CUDA devices, and one of up to thousands of fake ranks: shapes and no numbers.

    start(world=64)
    with machine() as tally:
        ...  # torch.device("cuda")
        tally.take()

Shapes, dtypes and devices are those of a GPU, and so is every call of a kernel and a collective; an
operator on tensors of two devices raises. Not seen: numbers, speed, and what CUDA alone checks, as
the alignment of pointers.

:func:`start` changes torch for the rest of its process: measure in a process that does nothing
else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401: shapes of c10d's operators
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention import bias
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from router import kernels
from tests.support.fake_gpu import cuda, cuda_kernels
from tests.support.fake_gpu.build import library
from tests.support.fake_gpu.tally import Tally, to_list

DEVICES = 8
_counting: list[Tally] = []
_changed: list[bool] = []


def start(world: int = 1, rank: int = 0) -> None:
    """Be one of ``world`` fake ranks, each with a fake GPU, eight on a node."""
    if not _changed:
        _change_torch()
        _changed.append(True)
    os.environ["LOCAL_RANK"] = str(rank % DEVICES)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


@contextlib.contextmanager
def machine() -> Iterator[Tally]:
    """Inside, tensors have no numbers, and what the device does is counted."""
    tally = Tally()
    fake_tensor.FakeTensor.tolist = to_list(tally)
    _counting.append(tally)
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), tally:
            yield tally
    finally:
        _counting.remove(tally)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """``module.to(dtype)``, which fake tensors refuse; routers stay in float32, as in the
    layer."""
    for name, part in module.named_modules():
        if name.rsplit(".", 1)[-1] == "router":
            continue
        for key, parameter in list(part._parameters.items()):
            if parameter is not None and parameter.is_floating_point():
                part._parameters[key] = nn.Parameter(parameter.detach().to(dtype))


def _change_torch() -> None:
    library("shapes").install()
    cuda.install(DEVICES)
    cuda.ON_WAIT.append(lambda what: [tally.wait(what) for tally in _counting])
    torch.version.cuda = "12.9"
    torch.backends.cuda.is_built = lambda: True
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
    fake_tensor.init_gpu_context = lambda device: None
    cuda_kernels.install()
    # Torch for CUDA comes with Triton.
    kernels.available = lambda device_type: device_type == "cuda"
    bias.causal_lower_right = _with_numbers(bias.causal_lower_right)
    _give_meshes_numbers()
    _quieten_propagation()


def _with_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **options)

    return call


def _give_meshes_numbers() -> None:
    """A mesh is a table of ranks, which the host reads."""
    for name in (
        "__init__", "_unflatten", "_flatten", "_compute_coordinate_on_dim", "__getitem__",
        "_get_slice_mesh_layout",
    ):  # fmt: skip
        setattr(DeviceMesh, name, _with_numbers(vars(DeviceMesh)[name]))
    concatenate = vars(DeviceMesh)["_concatenate"]
    DeviceMesh._concatenate = type(concatenate)(_with_numbers(concatenate.__func__))
    DeviceMesh.mesh = property(_with_numbers(vars(DeviceMesh)["mesh"].fget))


def _quieten_propagation() -> None:
    name = "_propagate_tensor_meta_non_cached"
    plain = vars(ShardingPropagator)[name]

    def quiet(*arguments: Any, **options: Any) -> Any:
        for tally in _counting:
            tally.quiet += 1
        try:
            return plain(*arguments, **options)
        finally:
            for tally in _counting:
                tally.quiet -= 1

    setattr(ShardingPropagator, name, quiet)
