"""What builds the optimizer of each kind.

A new kind is a module with the optimizer, a subclass of
:class:`pretrain.optim.config.OptimizerFields` that ``OptimizerConfig`` names, and a line below.
Spec, docs/spec.md, checkpoints and planner follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pretrain.optim.adamw import build_adamw
from pretrain.optim.config import OptimizerConfig, optimizer_class
from pretrain.optim.muon import Muon
from pretrain.optim.state import Surroundings

_BUILDERS: dict[str, Callable[[nn.Module, Any, Surroundings], torch.optim.Optimizer]] = {
    "adamw": lambda model, config, around: build_adamw(model, config, around.exact),
    "muon": Muon,
}


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, around: Surroundings | None = None
) -> torch.optim.Optimizer:
    """The optimizer that a config asks for, over all parameters of ``model``, with its moments made
    at once, as zeros.

    torch makes moments in the first step. Made here, a checkpoint has the same arrays at any step,
    and can be loaded before the first one.

    Args:
        model: on its device; parameters may be DTensors.
        config: of any kind.
        around: ranks and dtypes; None for one process in float32.
    """
    builder = _BUILDERS.get(config.kind) or optimizer_class(config.kind)
    built: torch.optim.Optimizer = builder(
        model, config, Surroundings() if around is None else around
    )
    return built
