"""Local shards of distributed tensors."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(parameter: Tensor) -> Tensor:
    """The local shard of a DTensor; a plain tensor is returned as given."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
