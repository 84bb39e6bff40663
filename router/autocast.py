"""The dtype that autocast asks for, and computation without autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from router.compiler import constant_in_graphs


# The compiler of torch 2.11 stops at this function of C++.
@constant_in_graphs
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of products that autocast asks for on a device; None where autocast is off."""
    if not _has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context without autocast, on devices that have autocast."""
    if not _has_autocast(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
