"""What a run, a launch and a place are called, and how a run is removed.

Run: all starts that go on from each other's checkpoints. ``run.json`` in the checkpoint folder has
the run id, and so has each manifest's ``state``. A checkpoint in a node's memory or on its disk is
taken only where its run id is that of the folder. A roll-back gives the folder a new run id, and a
newer checkpoint on some node is not taken any more.

Launch: one start of all ranks. ``Runtime.launch_id`` names the launch in the log and in save ids.
The launch secret lets the ranks of one launch read each other's memory.

Place: the checkpoint folder itself. A hash of its path names what the run keeps outside the folder:
lock files, and folders in nodes' memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import ckpt
from ckpt import CheckpointError, Location, Store
from pretrain.errors import InputError
from pretrain.spec import JobSpec
from pretrain.state import run_id_of

if TYPE_CHECKING:  # ``convoy prepare`` changes the folder without torch
    from pretrain.runtime import Runtime

RUN = "run.json"
"""The file with the run id; after a roll-back also what :mod:`pretrain.checkpoint.rolling_back`
says.
"""
BEGINNING = -1
"""In the place of a step, for a roll-back: before the first checkpoint."""
_BITS = 62  # of a random id, so that a rank can broadcast the id as a signed number


def run_id(runtime: Runtime, root: Location) -> str:
    """The id of the run that the checkpoint folder ``root`` is of; every rank must call.

    A folder without ``run.json`` gets one: with the id of its newest checkpoint, or a new id.

    Raises InputError on every rank where ``run.json`` cannot be read or written.
    """
    return f"{runtime.from_first(lambda: _read_or_make(root)):016x}"


def _read_or_make(root: Location) -> int:
    store = ckpt.open_store(root)
    try:
        if RUN not in store.names(""):
            newest = ""
            with contextlib.suppress(CheckpointError):
                newest = run_id_of(ckpt.read_manifest(store))
            _write(store, newest or new_id())
        return int(json.loads(store.read(RUN))["run_id"], 16) % (1 << _BITS)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"checkpoint.path ({root}) must have a {RUN} that can be read ({error}); remove the "
            f"file, and the next start takes the run id of the newest checkpoint"
        ) from None


def new_id() -> str:
    """A new run id."""
    return f"{secrets.randbits(_BITS):016x}"


def _write(store: Store, name: str) -> None:
    with contextlib.suppress(FileExistsError):
        store.publish(RUN, json.dumps({"run_id": name}).encode())


def launch_secret(runtime: Runtime) -> str:
    """A secret that the ranks of this launch share, and nobody else; every rank must call."""
    return f"{runtime.from_first(lambda: secrets.randbits(_BITS)):016x}"


def save_id(launch_id: str, step: int, go_backs: int = 0) -> str:
    """The name of a launch's save of a step.

    A launch that has gone back to a checkpoint saves some steps again: ``go_backs`` says how many
    times the run went back, and makes another name.
    """
    again = f"-{go_backs}" if go_backs else ""
    return f"{step:08d}-{launch_id}{again}"


def place_name(spec: JobSpec) -> str:
    """A name for the checkpoint folder that files elsewhere on this machine can have."""
    path = spec.checkpoint_path
    path = str(path.resolve()) if isinstance(path, Path) else path
    return hashlib.sha256(path.encode()).hexdigest()[:16]


def remove_run(location: Location) -> None:
    """Remove all checkpoints of a folder, and the run id: the next start is a new run.

    Raises OSError.
    """
    store = ckpt.open_store(location)
    store.remove(RUN)
    store.remove("rolling-back.json")
    for name in ("manifests", "objects", "away"):
        store.remove_all(name)
