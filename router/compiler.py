"""What torch.compile is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def constant_in_graphs(function: F) -> F:
    """Have the compiler call a function of Python once, and take the result as a constant.

    ``torch.compiler.assume_constant_result`` does no more, but loads the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
