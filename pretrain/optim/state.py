"""What an optimizer may know, what it keeps, and what a run sets of it, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """By name of a moment and of a parameter: whatever the optimizer keeps in a parameter's shape.

    A parameter has its moments before the first step: a checkpoint then has the same arrays at any
    step. Layers of one kind have the same moments. Checkpoints ask nothing else of an optimizer.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                found.setdefault(key, {})[name] = value
    return dict(sorted(found.items()))


@runtime_checkable
class KeepsDifferentMoments(Protocol):
    """An optimizer that does not keep the same moments of all parameters."""

    def moments_of(self, name: str, parameter: Tensor) -> tuple[str, ...]:
        """The names of a parameter's moments, by the parameter's name and global shape."""


def moment_names(
    optimizer: torch.optim.Optimizer, model: nn.Module, whole: nn.Module
) -> dict[str, list[str]]:
    """By name of a moment: the parameters of the whole model that have it; equal on all ranks.

    Args:
        optimizer: of this rank's parameters.
        model: the parameters of this rank, which may be those of a pipeline stage.
        whole: the whole model, on any device.
    """
    learning = [(name, p) for name, p in whole.named_parameters() if p.requires_grad]
    if not isinstance(optimizer, KeepsDifferentMoments):
        # A stage of a pipeline may have nothing that learns, and knows the names all the same.
        own = tuple(moments(optimizer, model))
        if isinstance(optimizer, torch.optim.AdamW):
            own = ("exp_avg", "exp_avg_sq")
        return {key: [name for name, _ in learning] for key in own}
    found: dict[str, list[str]] = {}
    for name, parameter in learning:
        for key in optimizer.moments_of(name, parameter):
            found.setdefault(key, []).append(name)
    return dict(sorted(found.items()))


def set_update_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Set the number of updates of every parameter, where the optimizer counts updates."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(count)
