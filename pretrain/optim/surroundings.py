"""What an optimizer may need to know besides the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from parallel import ParallelDims, ShardLayout


@dataclass(frozen=True)
class Surroundings:
    """What an optimizer may need to know besides the model. The defaults are those of one process
    in float32."""

    layouts: Mapping[str, ShardLayout] | None = None
    """Of every parameter, by name; None for one process."""
    dims: ParallelDims | None = None
    """The meshes; None for one process."""
    device: torch.device | None = None
    """Where the forward and the backward run; None: where the parameters are."""
    compute: str = "float32"
    """The dtype of the forward and the backward; parameters are in float32."""
    exact: bool = False
    """Whether the bits of an update must not depend on the layout."""
