"""Which checkpoints are kept, and how the others are removed."""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from pydantic import BaseModel, ConfigDict, Field

from ckpt.format import (
    CheckpointError,
    Manifest,
    committed_steps,
    manifest_key,
    objects_key,
    pending_key,
    read_manifest,
)
from ckpt.locations import Location, open_store
from ckpt.store import Store

REMOVED = "removed"
"""The mark of a save whose objects are being removed."""

_MARK_ATTEMPTS = 3


class Retention(BaseModel):
    """Which checkpoints are kept: those that any of the rules keeps."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    keep: int = Field(default=2, ge=1)
    """The newest ones."""
    keep_every: int = Field(default=0, ge=0)
    """Those whose step is a multiple of it, for ever; 0 none."""
    keep_best: int = Field(default=0, ge=0)
    """Those of the lowest ``validation`` in the manifest's ``state``."""
    grace_seconds: float = Field(default=0.0, ge=0)
    """How long one stays after the save that put it beyond ``keep``."""


@dataclass(frozen=True)
class Removal:
    """A checkpoint that no rule keeps."""

    step: int
    save_id: str
    bytes: int
    why: str


@dataclass(frozen=True)
class RetentionPlan:
    """What :func:`retain` would remove, and why it keeps the rest."""

    remove: tuple[Removal, ...]
    keep: dict[int, str]
    """Why, for each step that stays."""


def plan_retention(
    root: Location, retention: Retention, now: Callable[[], float] = time.time
) -> RetentionPlan:
    """Work out what no rule keeps; nothing is removed.

    Nothing is, ever, while the newest checkpoint is not whole: each of its objects must be there
    with its length. One whose manifest is damaged stays, since what it owns is unknown. ``now`` (in
    seconds since 1970) only ever lets more stay than the rules for steps do, whatever it says.

    Raises CheckpointError where the store cannot be listed.
    """
    return _Planner(open_store(root), retention, now).plan()


def retain(
    root: Location, keep: int | Retention, now: Callable[[], float] = time.time
) -> list[int]:
    """Remove what no rule keeps; returns the steps removed. A number keeps the newest ones.

    A manifest goes, durably, before its objects do: what remains listed is always whole. Raises
    OSError where a manifest cannot be removed, or the store not listed.
    """
    retention = keep if isinstance(keep, Retention) else Retention(keep=keep)
    store = open_store(root)
    plan, removed = plan_retention(store, retention, now), list[int]()
    # One whose commit was killed is listed, and may not be durable: it must be, before others go.
    store.settle(manifest_key(step) for step in plan.keep)
    for removal in plan.remove:
        mark_unwanted(store, removal.save_id)
        store.remove(manifest_key(removal.step))
        remove_objects(store, removal.save_id)
        removed.append(removal.step)
    return removed


def mark_unwanted(store: Store, save_id: str) -> None:
    """Make a save's objects a leftover, should their removal be interrupted."""
    mark = f"{pending_key(save_id)}/{REMOVED}"
    for attempt in range(_MARK_ATTEMPTS):
        try:
            with contextlib.suppress(FileExistsError):
                store.write(mark, [b""])
            store.settle([mark])
            return
        except FileNotFoundError:
            # Somebody else who removes this save has just removed the folder of its marks.
            if attempt == _MARK_ATTEMPTS - 1:
                raise
        except OSError as error:
            # Where there is no room for it, to make room is worth a leftover.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return


def committed_save_ids(store: Store) -> set[str]:
    """Those that have a manifest. Raises CheckpointError where one is damaged."""
    return {read_manifest(store, step).save_id for step in committed_steps(store)}


def remove_objects(store: Store, save_id: str) -> None:
    """Remove a save's objects, and then the mark that they may go: it stays while one stays."""
    store.remove_all(objects_key(save_id))
    if save_id not in store.names("objects"):
        store.settle([objects_key(save_id)])
        store.remove_all(pending_key(save_id))


def what_is_wrong(store: Store, manifest: Manifest) -> str | None:
    """The first object of a checkpoint that is not there with its length; None where all are.

    Numbers are not read. Raises OSError where the store cannot be listed.
    """
    folder = objects_key(manifest.save_id)
    found = store.listing(folder)
    for key, record in manifest.objects.items():
        where = store.where(f"{folder}/{key}")
        if key not in found:
            return f"object {where} is missing"
        if found[key][0] != record.bytes:
            return f"object {where} has {found[key][0]} bytes, the manifest says {record.bytes}"
    return None


class _Planner:
    def __init__(self, store: Store, retention: Retention, now: Callable[[], float]) -> None:
        self.store, self.retention, self.now = store, retention, now
        self.steps = committed_steps(store)
        self._manifests: dict[int, Manifest | None] = {}

    def plan(self) -> RetentionPlan:
        kept: dict[int, str] = {}
        beyond: list[Manifest] = []
        newest = self.steps[-self.retention.keep :]
        every = self.retention.keep_every
        for step in self.steps:
            if step in newest:
                kept[step] = f"one of the newest {self.retention.keep}"
            elif every and step % every == 0:
                kept[step] = f"a multiple of {every}"
            elif (manifest := self._manifest(step)) is None:
                kept[step] = "its manifest is damaged"  # and someone may want to look at it
            elif step in self._best:
                kept[step] = f"one of the best {self.retention.keep_best} by validation"
            elif not self._is_past_grace(step):
                kept[step] = f"superseded less than {self.retention.grace_seconds:g} s ago"
            else:
                beyond.append(manifest)
        if beyond and (wrong := self._newest_is_not_whole()):
            kept |= {m.step: f"the newest one is not whole: {wrong}" for m in beyond}
            beyond = []
        why = f"there are {self.retention.keep} newer ones"
        remove = tuple(Removal(m.step, m.save_id, m.total_bytes, why) for m in beyond)
        return RetentionPlan(remove, dict(sorted(kept.items())))

    def _manifest(self, step: int) -> Manifest | None:
        if step not in self._manifests:
            self._manifests[step] = None
            with contextlib.suppress(CheckpointError):
                self._manifests[step] = read_manifest(self.store, step)
        return self._manifests[step]

    @cached_property
    def _best(self) -> set[int]:
        if not self.retention.keep_best:
            return set()
        ranked = []
        for step in self.steps:
            manifest = self._manifest(step)
            value = None if manifest is None else manifest.state.get("validation")
            if isinstance(value, int | float) and math.isfinite(value):
                ranked.append((value, -step))  # of two alike the newer
        return {-negative for _, negative in sorted(ranked)[: self.retention.keep_best]}

    def _is_past_grace(self, step: int) -> bool:
        """Whether it is long enough ago that a save put this one beyond the newest ones."""
        if not self.retention.grace_seconds:
            return True
        later = self.steps[self.steps.index(step) + self.retention.keep]
        manifest = self._manifest(later)
        if manifest is None:
            return False
        try:
            saved = datetime.fromisoformat(manifest.created).timestamp()
        except ValueError:
            return False
        return self.now() - saved >= self.retention.grace_seconds

    def _newest_is_not_whole(self) -> str | None:
        newest = self._manifest(self.steps[-1])
        return "its manifest is damaged" if newest is None else what_is_wrong(self.store, newest)
