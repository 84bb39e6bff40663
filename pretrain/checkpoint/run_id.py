"""Which run a checkpoint folder belongs to."""

from __future__ import annotations

import contextlib
import json
import secrets

import ckpt
from ckpt import CheckpointError, Location, Store
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.observe import say

_RUN = "run.json"
_NO_NAME = 1 << 62


def name_run(job: Job) -> str:
    """What tells this run from others that were in the same place: a name that the shared folder
    keeps as long as it is there, or else its newest checkpoint has. What nodes have of another run
    is not this one's. Every rank must call.

    Raises InputError where the folder has a name that cannot be read.
    """
    numbers: list[int] = []
    job.runtime.first(lambda: numbers.append(_read_name(job)))
    return f"{job.runtime.broadcast(numbers[0] if numbers else 0):016x}"


def _read_name(job: Job) -> int:
    root = job.spec.checkpoint_path
    store = ckpt.open_store(root)
    try:
        if _RUN not in store.names(""):
            newest = None
            with contextlib.suppress(CheckpointError):
                newest = ckpt.read_manifest(store).state.get("run_id")
            _write_name(store, newest or _new_name())
        return int(json.loads(store.read(_RUN))["run_id"], 16) % _NO_NAME
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"checkpoint.path ({root}) must have a {_RUN} that can be read ({error}); where it is "
            f"removed, the newest checkpoint has the run's name too"
        ) from None


def _new_name() -> str:
    return f"{secrets.randbits(62):016x}"


def _write_name(store: Store, name: str) -> None:
    with contextlib.suppress(FileExistsError):
        store.publish(_RUN, json.dumps({"run_id": name}).encode())


def forget_run(location: Location) -> None:
    """Let the next start in a place be of another run. Raises OSError."""
    store = ckpt.open_store(location)
    store.remove(_RUN)
    for name in ("manifests", "objects", "away"):
        store.remove_all(name)


def go_back(location: Location, step: int) -> None:
    """Let the next start go on from ``step``: move the manifests of later ones to ``away/``, where
    nothing looks for them, and give the run another name, so that what nodes have is not taken.

    Raises InputError where there is no such step; OSError.
    """
    store = ckpt.open_store(location)
    steps = ckpt.committed_steps(store)
    if step not in steps:
        found = ", ".join(map(str, steps)) or "there is none"
        raise InputError(f"--back-to ({step}) must be a step that {store.where()} has: {found}")
    name = _new_name()
    store.remove(_RUN)
    _write_name(store, name)
    for later in reversed([s for s in steps if s > step]):
        key = ckpt.manifest_key(later)
        store.publish(f"away/{name}/{key.rpartition('/')[2]}", store.read(key))
        store.remove(key)
        say(f"step {later} is in {store.where(f'away/{name}')} now; its objects are left")
