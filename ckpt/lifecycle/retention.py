"""Retention: rules for the checkpoints that are kept, and the removal of the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from ckpt.errors import CheckpointError
from ckpt.format import (
    Manifest,
    committed_steps,
    manifest_key,
    read_manifest,
)
from ckpt.lifecycle.config import Retention
from ckpt.lifecycle.removal import first_problem, mark_for_removal, remove_objects
from ckpt.store import Location, Store, open_store


@dataclass(frozen=True)
class Removal:
    """A checkpoint that no rule keeps, and why."""

    step: int
    save_id: str
    bytes: int
    why: str


@dataclass(frozen=True)
class RetentionPlan:
    """The checkpoints that :func:`retain` would remove, and those that it would keep."""

    remove: tuple[Removal, ...]
    keep: dict[int, str]
    """The reason, by step."""


def plan_retention(
    root: Location, retention: Retention, now: Callable[[], float] = time.time
) -> RetentionPlan:
    """Find the checkpoints that no rule keeps; nothing is removed.

    All checkpoints are kept while the newest one is incomplete: each of its objects must be there
    with its length. A checkpoint whose manifest is damaged is kept: its objects are unknown.

    Args:
        root: the checkpoint folder or store.
        retention: the rules.
        now: gives the time in seconds since 1970, for ``grace_seconds``. A wrong clock can only
            keep more checkpoints than the other rules do.

    Raises:
        CheckpointError: where the store cannot be listed.
    """
    return _Planner(open_store(root), retention, now).plan()


def retain(
    root: Location, keep: int | Retention, now: Callable[[], float] = time.time
) -> list[int]:
    """Remove the checkpoints that no rule keeps; returns their steps.

    Each manifest is durably removed before its objects: a checkpoint that is still listed has all
    its objects.

    Args:
        root: the checkpoint folder or store.
        keep: the rules, or how many of the newest checkpoints are kept.
        now: see :func:`plan_retention`.

    Raises:
        ValueError: where ``keep`` is below 1.
        OSError: where a manifest cannot be removed.
        CheckpointError: where the store cannot be listed.
    """
    if isinstance(keep, int) and keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    retention = keep if isinstance(keep, Retention) else Retention(keep=keep)
    store = open_store(root)
    plan, removed = plan_retention(store, retention, now), list[int]()
    # The manifest of a killed commit may not be durable: make it so before others are removed.
    store.sync(manifest_key(step) for step in plan.keep)
    for removal in plan.remove:
        mark_for_removal(store, removal.save_id)
        store.remove(manifest_key(removal.step))
        remove_objects(store, removal.save_id)
        removed.append(removal.step)
    return removed


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
                kept[step] = "its manifest is damaged"  # somebody may want to look at it
            elif step in self._best:
                kept[step] = f"one of the best {self.retention.keep_best} by validation"
            elif not self._is_past_grace(step):
                kept[step] = f"superseded less than {self.retention.grace_seconds:g} s ago"
            else:
                beyond.append(manifest)
        if beyond and (wrong := self._problem_of_newest()):
            kept |= {m.step: f"the newest one is incomplete: {wrong}" for m in beyond}
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
            if manifest is not None and manifest.validation is not None:
                ranked.append((manifest.validation, -step))  # of two equal ones the newer
        return {-negative for _, negative in sorted(ranked)[: self.retention.keep_best]}

    def _is_past_grace(self, step: int) -> bool:
        """Whether the save that made ``step`` older than the newest ``keep`` is long enough ago."""
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

    def _problem_of_newest(self) -> str | None:
        newest = self._manifest(self.steps[-1])
        return "its manifest is damaged" if newest is None else first_problem(self.store, newest)
