"""Local shards of distributed tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def local_shard(parameter: Tensor) -> Tensor:
    """The local shard of a DTensor; a plain tensor is returned as given."""
    # By its method and not by its class: the import of DTensor takes most of a second.
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block a module's own DTensor parameters are plain uninitialized tensors
    of their logical shapes; at its end each rank keeps its shards of what they hold.

    Values that all ranks draw with one seed are then those of one process. Each rank holds the
    module's whole parameters for as long.
    """
    sharded = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if hasattr(parameter, "to_local")
    }
    wholes = {
        name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=p.device))
        for name, p in sharded.items()
    }
    module._parameters.update(wholes)
    try:
        yield
    finally:
        module._parameters.update(sharded)
    if not sharded:
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, parameter in sharded.items():
        assert isinstance(parameter, DTensor)
        cut = distribute_tensor(
            wholes[name].detach(), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        local_shard(parameter.detach()).copy_(cut.to_local())
