"""The transforms of torch.func that run at the moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def in_func_transform() -> bool:
    """Whether a transform of torch.func runs: grad, vjp, jvp, vmap or another."""
    return bool(_stack())


def in_vmap() -> bool:
    """Whether ``torch.vmap`` runs, outside or inside another transform."""
    return any(each.key() == torch._C._functorch.TransformType.Vmap for each in _stack())


def _stack() -> Sequence[Any]:
    # A compiler traces a transform that is inside what it compiles, and cannot trace this question.
    if torch.compiler.is_compiling():
        return ()
    return torch._C._functorch.get_interpreter_stack() or ()
