"""What torch.compile leaves out. The import of this module loads the compiler: import it late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, in eager mode in a compiled model too."""
    return function(*args)
