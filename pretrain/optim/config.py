"""What the config of every optimizer has, and what a kind of optimizer must say of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from parallel import ParallelDims, ShardLayout

Product = tuple[float, float, float]
"""m, n and k of a product [m, k] x [k, n]."""


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


class OptimizerFields(BaseModel):
    """The fields of every kind of optimizer. A kind is a subclass with a ``kind`` of its own, the
    class variables below and :meth:`build`; :mod:`pretrain.optim.registry` lists the kinds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    matrix_moments: ClassVar[tuple[str, ...]]
    """What is kept in the shape of a hidden matrix, see :func:`pretrain.model.is_hidden_matrix`."""
    other_moments: ClassVar[tuple[str, ...]]
    """What is kept in the shape of any other parameter."""

    kind: str
    """Names this variant."""
    lr: float = Field(gt=0)
    """The peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added by AdamW to the root of the mean of squared gradients."""
    weight_decay: float = Field(default=0.1, ge=0)
    """The decoupled weight decay of matrices; norms and biases have none."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 leaves gradients unscaled."""

    def build(self, model: nn.Module, around: Surroundings) -> torch.optim.Optimizer:
        """The optimizer over all parameters of ``model``, with its moments made at once, as zeros.

        torch makes moments in the first step. Made here, a checkpoint has the same arrays at any
        step, and can be loaded before the first one.
        """
        raise NotImplementedError

    def matrix_products(self, rows: float, columns: float) -> list[Product]:
        """The matrix products of the update of one hidden matrix; none for an update of each number
        by itself."""
        return []

    def products_dtype(self, compute: str) -> str:
        """The dtype of these products, by ``precision.compute``."""
        return compute
