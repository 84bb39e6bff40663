"""Local shards of distributed tensors."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank computes with; a plain tensor is its own."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
