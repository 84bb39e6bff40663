"""The product, broken on purpose: each defect must be seen by its machine within some examples.

A defect is a patch of the product's code while a machine runs. ``python -m tests.fuzz --broken``
prints how many examples each machine needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest import mock

from ckpt.lifecycle import garbage, removal, retention
from ckpt.rewrite import checkpoint_target
from cluster.members import epochs
from pretrain.checkpoint import progress as checkpoint_progress
from pretrain.checkpoint import resume
from pretrain.data import loader as loader_module
from pretrain.data.loader import Cursor, Loader
from pretrain.elastic import membership
from pretrain.parts.playbook import rule as playbook_rule
from pretrain.train import health_watch
from tests.fuzz.machine import Tally, explore
from tests.fuzz.worlds import WORLDS

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Defect:
    """What is broken, and the machine that must see it."""

    world: str
    patch: Patch
    steps: int = 25


def _retain_removes_objects_first() -> contextlib.AbstractContextManager[Any]:
    """Retention removes objects while the manifest is still listed."""

    def mark(store: Any, save_id: str) -> None:
        removal.mark_for_removal(store, save_id)
        store.remove_all(f"objects/{save_id}")

    return mock.patch.object(retention, "mark_for_removal", mark)


def _retain_forgets_the_best() -> contextlib.AbstractContextManager[Any]:
    """Retention does not keep the best by validation."""
    return mock.patch.object(retention._Planner, "_best", frozenset())


def _clean_up_takes_the_committed() -> contextlib.AbstractContextManager[Any]:
    """A clean-up takes a mark for a save that was broken off, whatever manifests say."""
    return mock.patch.object(garbage, "_committed", return_value=(set(), ""))


def _commit_ignores_abandonment() -> contextlib.AbstractContextManager[Any]:
    """A commit does not look whether a later start has removed the save."""
    commit_module = import_module("ckpt.write.commit")
    save_module = import_module("ckpt.write.save")

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with (
            mock.patch.object(commit_module, "first_problem", return_value=None),
            mock.patch.object(commit_module, "REMOVED", "nothing"),
            mock.patch.object(save_module, "check_not_abandoned"),
        ):
            yield

    return both()


def _reshard_writes_another_box() -> contextlib.AbstractContextManager[Any]:
    """A reshard with more than one object writes the first box's numbers into each."""
    target = checkpoint_target.CheckpointTarget
    write = target.write

    def shifted(self: Any, key: str, slab_bytes: int, progress: Any) -> Any:
        read = type(self.source).read_box

        def other(source: Any, name: str, box: Any) -> Any:
            width = box[0][1] - box[0][0]
            return read(source, name, ((0, width), *box[1:]))

        with mock.patch.object(type(self.source), "read_box", other):
            return write(self, key, slab_bytes, progress)

    return mock.patch.object(target, "write", shifted)


def _cursor_is_a_sample_behind() -> contextlib.AbstractContextManager[Any]:
    """The cursor after a step is the step's last sample."""
    read = Loader._read

    def behind(self: Loader, cursor: Cursor, skipped: Any) -> Any:
        batches, after = read(self, cursor, skipped)
        return batches, Cursor(after.sample_index - 1)

    return mock.patch.object(Loader, "_read", behind)


def _read_ahead_forgets_what_is_skipped() -> contextlib.AbstractContextManager[Any]:
    """What was read ahead is taken whatever samples are left out by now."""
    return mock.patch.object(Loader, "_key", lambda self, cursor, skipped: self.division)


def _two_ranks_read_one_micro_batch() -> contextlib.AbstractContextManager[Any]:
    """On more than two readers, the last reads what the one before it reads."""
    real = loader_module.micro_batches

    def swapped(
        cursor: Any, size: int, micro: int, rank: int, ranks: int, counts: Any = None
    ) -> Any:
        last = ranks > 2 and rank == ranks - 1
        return real(cursor, size, micro, rank - last, ranks, counts)

    return mock.patch.object(loader_module, "micro_batches", swapped)


def _start_takes_the_oldest() -> contextlib.AbstractContextManager[Any]:
    """A start resumes from the oldest checkpoint that there is."""

    def oldest(runtime: Any, root: Any) -> int:
        steps = checkpoint_progress.ckpt.committed_steps
        return int(runtime.from_first(lambda: min(steps(root), default=-1)))

    return mock.patch.object(resume, "newest_shared_step", oldest)


def _going_back_forgets_what_was_skipped() -> contextlib.AbstractContextManager[Any]:
    """After going back, samples of the bad steps are taken again."""
    real = playbook_rule.after_going_back

    def forgets(now: Any, then: Any) -> Any:
        return replace(real(now, then), skipped_samples=((0, 1),))

    return mock.patch.object(health_watch, "after_going_back", forgets)


def _source_is_behind() -> contextlib.AbstractContextManager[Any]:
    """The source of an epoch is its first member, whatever it has."""
    real = epochs.decide

    def first(*given: Any) -> Any:
        epoch = real(*given)
        if epoch is None or epoch.source is None:
            return epoch
        return replace(epoch, source=0)

    return mock.patch.object(membership, "decide", first)


def _dead_members_stay() -> contextlib.AbstractContextManager[Any]:
    """A life that is gone is taken for one that has come."""
    real = epochs.decide

    def blind(before: Any, words: Any, gone: Any, waiting: Any, seats: Any) -> Any:
        return real(before, words, {}, waiting, seats)

    return mock.patch.object(membership, "decide", blind)


BROKEN = {
    "retention removes objects before the manifest": Defect(
        "checkpoint-folder", _retain_removes_objects_first
    ),
    "retention forgets the best checkpoint": Defect("checkpoint-folder", _retain_forgets_the_best),
    "a clean-up ignores manifests": Defect("checkpoint-folder", _clean_up_takes_the_committed),
    "a commit ignores that its save was removed": Defect(
        "checkpoint-store", _commit_ignores_abandonment
    ),
    "a reshard writes the numbers of another box": Defect(
        "checkpoint-store", _reshard_writes_another_box
    ),
    "the cursor is a sample behind": Defect("elastic", _cursor_is_a_sample_behind),
    "what was read ahead is taken blindly": Defect("elastic", _read_ahead_forgets_what_is_skipped),
    "two ranks read one micro-batch": Defect("elastic", _two_ranks_read_one_micro_batch),
    "a start takes the oldest checkpoint": Defect("elastic", _start_takes_the_oldest),
    "going back forgets the samples that are left out": Defect(
        "elastic", _going_back_forgets_what_was_skipped
    ),
    "an epoch's source has not the newest state": Defect("members", _source_is_behind),
    "a replica that is gone is waited for": Defect("members", _dead_members_stay),
}


def examples_until_seen(defect: Defect, most: int) -> int:
    """The examples after which the machine sees the defect; 0 where it does not."""
    tally = Tally()
    with defect.patch():
        try:
            explore(WORLDS[defect.world], examples=most, steps=defect.steps, seed=1, shrink=False,
                    tally=tally)  # fmt: skip
        except Exception:
            assert tally.failed is not None, "an error of the machine itself"
            return tally.examples
    return 0
