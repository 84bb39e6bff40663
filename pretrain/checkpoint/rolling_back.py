"""Rolling a run back to an earlier checkpoint, by a person's command or by the playbook's rules.

A roll-back is decided by one atomic write of ``rolling-back.json``. The steps after that can be
repeated: a start after an interruption completes the roll-back. Afterwards ``run.json`` says to
which step the run was rolled back, and what the playbook remembers from then on: the checkpoint of
that step is older than the memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

import ckpt
from ckpt import CheckpointError, Location, Store
from pretrain.checkpoint.run_id import BEGINNING, RUN, new_id
from pretrain.errors import InputError
from pretrain.parts.playbook import HealthMemory
from pretrain.state import Progress

_ROLLING_BACK = "rolling-back.json"
_MEMORY = TypeAdapter(HealthMemory)


def roll_back(
    location: Location, step: int, say: Callable[[str], None], health: HealthMemory | None = None
) -> None:
    """Let the next start resume from ``step``, whatever tiers the run has.

    Manifests of newer steps are moved to ``away/``, where no start looks for checkpoints. The
    folder gets a new run id, and checkpoints in nodes' memory and on their disks are not taken.

    Args:
        location: the checkpoint folder.
        step: a step that the folder has; with ``BEGINNING`` all manifests are moved, and the next
            start begins the run anew.
        say: gets a line for each manifest that is moved.
        health: what the playbook remembers from then on; None for the memory of the checkpoint.

    Raises InputError where there is no such step; OSError.
    """
    store = ckpt.open_store(location)
    complete_roll_back(store, say)
    steps = ckpt.committed_steps(store)
    if step not in steps and step != BEGINNING:
        found = ", ".join(map(str, steps)) or "there is none"
        raise InputError(f"--load-step ({step}) must be a step that {store.where()} has: {found}")
    record: dict[str, Any] = {"run_id": new_id(), "rolled_back_to": step}
    if health is not None:
        record["health"] = asdict(health)
    store.publish(_ROLLING_BACK, json.dumps(record).encode())
    complete_roll_back(store, say)


def complete_roll_back(location: Location, say: Callable[[str], None]) -> None:
    """Do what is left of a roll-back; nothing where none was begun. Raises OSError."""
    store = ckpt.open_store(location)
    try:
        data = store.read(_ROLLING_BACK)
    except FileNotFoundError:
        return
    record = json.loads(data)
    name = record["run_id"]
    store.remove(RUN)
    with contextlib.suppress(FileExistsError):
        store.publish(RUN, data)
    later = [s for s in ckpt.committed_steps(store) if s > record["rolled_back_to"]]
    for step in reversed(later):
        key = ckpt.format.manifest_key(step)
        _forget_marks(store, step)
        with contextlib.suppress(FileExistsError):  # moved by half when it was interrupted
            store.publish(f"away/{name}/{key.rpartition('/')[2]}", store.read(key))
        store.remove(key)
        say(
            f"the manifest of step {step} is now in {store.where(f'away/{name}')}; "
            f"`convoy inspect gc --unlisted` removes the objects that only such manifests list"
        )
    store.remove(_ROLLING_BACK)


def _forget_marks(store: Store, step: int) -> None:
    """Remove the marks that a kill has left of a committed save. Without a manifest beside them,
    the next start would remove the save's objects, which ``away/`` promises."""
    with contextlib.suppress(CheckpointError):  # nobody knows the save of a damaged manifest
        marks = ckpt.format.pending_key(ckpt.read_manifest(store, step).save_id)
        if store.names(marks):
            store.remove_all(marks)
            store.sync([marks])


def with_memory_of_roll_back(location: Location, progress: Progress) -> Progress:
    """The counters of a checkpoint, with what the playbook remembers since it went back there.

    Raises InputError where ``run.json`` cannot be read.
    """
    store = ckpt.open_store(location)
    try:
        record = json.loads(store.read(RUN))
        if record.get("rolled_back_to") != progress.step or "health" not in record:
            return progress
        return replace(progress, health=_MEMORY.validate_python(record["health"]))
    except (OSError, ValueError, ValidationError, AttributeError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise InputError(
            f"checkpoint.path ({location}) must have a {RUN} that can be read ({first}); roll the "
            f"run back with `convoy prepare SPEC --load-step {progress.step}`"
        ) from None
