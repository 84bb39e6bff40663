"""What ranks of the cases about saves run; kept apart, since ranks import it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
from ckpt.store.posix import Files

ROWS = 7


class _KilledInTheManifest(Files):
    """Kills its process when the file of a manifest is there, and has no byte yet."""

    def create(self, path: Path) -> int:
        handle = super().create(path)
        if path.parent.name == "manifests":
            os.kill(os.getpid(), signal.SIGKILL)
        return handle


def save_and_die(rank: int, root: Path) -> None:
    """Save step 2, and be killed in the middle of the commit."""
    store = ckpt.LocalStore(root, _KilledInTheManifest())
    ckpt.save_state_dict(store, {"w": torch.full((9,), 2.0)}, step=2)


def save_rows(rank: int, root: str) -> None:
    """Save an array of rows of which each of two ranks has some, and one that both have."""
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(ROWS << 18, dtype=torch.float32).view(ROWS, -1)
    state = {
        "cut": distribute_tensor(values, mesh, [Shard(0)]),
        "copied": distribute_tensor(values, mesh, [Replicate()]),
    }
    ckpt.save_state_dict(root, state, step=1)
