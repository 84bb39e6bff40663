"""The kinds of optimizers.

A new kind is a module with a subclass of :class:`pretrain.optim.config.OptimizerFields`, and the
name of the subclass in ``OptimizerConfig``. Spec, docs/spec.md, checkpoints and planner follow.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

import torch
from pydantic import Field
from torch import nn

from pretrain.optim.adamw import AdamWConfig
from pretrain.optim.config import OptimizerFields, Surroundings
from pretrain.optim.muon import MuonConfig

OptimizerConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="kind")]
"""The ``[optimizer]`` section, one variant for each ``kind``; ``adamw`` where it has no kind."""

KINDS: dict[str, type[OptimizerFields]] = {
    variant.model_fields["kind"].default: variant
    for variant in get_args(get_args(OptimizerConfig)[0])
}
"""The config of each kind."""


def with_kind(optimizer: Any) -> Any:
    """The table of an optimizer with its kind, which is ``adamw`` where the table has none.

    Raises ValueError, one line, for a field that only other kinds have.
    """
    if not isinstance(optimizer, dict):
        return optimizer
    kind = optimizer.get("kind", "adamw")
    variant = KINDS.get(kind) if isinstance(kind, str) else None
    for field in optimizer if variant else ():
        have = [name for name, other in KINDS.items() if field in other.model_fields]
        if have and kind not in have:
            raise ValueError(
                f"optimizer.{field} ({optimizer[field]}) must be left out with optimizer.kind "
                f"({kind}); kind {' or '.join(have)} has it"
            )
    return {"kind": kind, **optimizer}


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, around: Surroundings | None = None
) -> torch.optim.Optimizer:
    """The optimizer that a config asks for, over all parameters of ``model``.

    Args:
        model: on its device; parameters may be DTensors.
        config: of any kind.
        around: ranks and dtypes; None for one process in float32.
    """
    return config.build(model, Surroundings() if around is None else around)
