"""The functions of ``torch.distributed.checkpoint`` over ``ckpt.save_state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.testing._internal.distributed._tensor import common_dtensor

import ckpt
from tests.foreign.touching import touch


def replace() -> None:
    """Put Convoy's in the place of torch's, and let cases for GPUs run on gloo."""
    dcp.save_state_dict = dcp.save = _save
    dcp.load_state_dict = dcp.load = _load
    common_dtensor.skip_if_lt_x_gpu = _run_anyway


def _save(state_dict: dict[str, Any], storage_writer: Any = None, **options: Any) -> None:
    touch()
    root = _folder(storage_writer, options)
    # A case saves into a folder again, and a step of Convoy's is never replaced.
    step = max(ckpt.committed_steps(root), default=-1) + 1
    ckpt.save_state_dict(root, state_dict, step=step)


def _load(state_dict: dict[str, Any], storage_reader: Any = None, **options: Any) -> None:
    touch()
    ckpt.load_state_dict(_folder(storage_reader, options), state_dict)


def _folder(storage: Any, options: dict[str, Any]) -> Path:
    return Path(options["checkpoint_id"] if storage is None else storage.path)


def _run_anyway(gpus: int) -> Callable[[Any], Any]:
    """In the place of the decorator that skips a case on a machine with fewer GPUs."""
    del gpus
    return lambda case: case
