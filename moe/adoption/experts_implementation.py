"""A warning for whoever sets how ``transformers`` computes experts, where layers are adopted."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

from torch import nn

_NAME = "set_experts_implementation"


def warn_when_set(model: nn.Module) -> None:
    """Let the method of ``transformers`` warn, for a model with adopted layers and its parts."""
    for module in model.modules():
        if callable(getattr(type(module), _NAME, None)):
            # A partial and not a method: pickle has methods by their names in the object's class.
            setattr(module, _NAME, partial(set_experts_implementation, module))


def no_longer_warn(model: nn.Module) -> None:
    """Undo :func:`warn_when_set`."""
    for module in model.modules():
        vars(module).pop(_NAME, None)


def set_experts_implementation(model: Any, experts_implementation: Any) -> None:
    """As in ``transformers``, with a warning."""
    caller = str(sys._getframe(1).f_globals.get("__name__"))
    if caller.partition(".")[0] != "transformers":  # generate() sets it for a while by itself
        warnings.warn(
            f"{_NAME} has no effect on adopted layers: call moe.restore(model), and then "
            f"moe.adopt(model, backend=...) with a backend of moe.MoEConfig",
            stacklevel=2,
        )
    getattr(type(model), _NAME)(model, experts_implementation)
