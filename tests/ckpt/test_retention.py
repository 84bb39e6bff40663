"""What is kept and what goes: by rules, never the last good one, and never by a clock alone."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from obstore.store import MemoryStore

import ckpt
from ckpt.format.keys import manifest_key, objects_key, pending_key
from ckpt.format.manifest import encode_manifest
from ckpt.store.location import Location
from ckpt.store.object_store import ObjectStore
from ckpt.store.posix import Files
from parallel.layout import Topology
from tests.support.checkpoints import full_values, info, local_array

SPEC = ckpt.ArraySpec("w", (4, 3), torch.float32, ((), ()))
HOUR = 3600.0


class Unsynced(Files):
    """Nothing crashes here; a disk's syncs would be most of the time."""

    def sync(self, handle: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


@pytest.fixture(params=["disk", "object store"])
def root(request, tmp_path: Path) -> Location:
    if request.param == "disk":
        return ckpt.LocalStore(tmp_path, Unsynced())
    return ObjectStore("memory://x", MemoryStore())


def save(root: Location, step: int, hour: float = 0, validation: object = None) -> ckpt.Manifest:
    """As of ``hour`` hours after 1970, on the saver's clock."""
    about = info(step, Topology())
    state = about.state | ({} if validation is None else {"validation": validation})
    about = ckpt.SaveInfo(**{**vars(about), "state": state})
    array = local_array(SPEC, Topology(), 0, full_values(SPEC, step))
    manifest = ckpt.save(root, about, [array], 0, lambda ok: ok)
    assert manifest is not None
    whole, part = divmod(round(hour * 60), 60)
    created = f"1970-01-{1 + whole // 24:02d}T{whole % 24:02d}:{part:02d}:00+00:00"
    manifest = manifest.model_copy(update={"created": created})
    rewrite(root, step, encode_manifest(manifest))
    return manifest


def rewrite(root: Location, step: int, data: bytes) -> None:
    store = ckpt.open_store(root)
    store.remove(manifest_key(step))
    store.publish(manifest_key(step), data)


def removed(root: Location, now: float = 0, **rules) -> list[int]:
    """What the plan says and what is done are the same, and what stays is whole."""
    retention = ckpt.Retention(**rules)
    before = ckpt.committed_steps(root)
    plan = ckpt.lifecycle.plan_retention(root, retention, lambda: now)
    assert ckpt.committed_steps(root) == before, "a plan removes nothing"
    gone = ckpt.retain(root, retention, lambda: now)
    assert gone == [each.step for each in plan.remove]
    assert sorted([*gone, *plan.keep]) == before
    assert ckpt.committed_steps(root) == sorted(plan.keep)
    return gone


def test_the_newest_the_regular_and_the_best_are_kept(root):
    for step, loss in zip(range(1, 11), (9, 3, 8, 1, 7, float("nan"), 5, 2, None, 6), strict=True):
        save(root, step, validation=None if loss != loss else loss)
    # 9 and 10 are the newest, 5 and 10 regular, 4 and 8 the best; 6 and 9 were not validated.
    assert removed(root, keep=2, keep_every=5, keep_best=2) == [1, 2, 3, 6, 7]
    plan = ckpt.lifecycle.plan_retention(root, ckpt.Retention(keep=2, keep_every=5, keep_best=2))
    assert plan.keep == {
        4: "one of the best 2 by validation",
        5: "a multiple of 5",
        8: "one of the best 2 by validation",
        9: "one of the newest 2",
        10: "one of the newest 2",
    }
    for step in ckpt.committed_steps(root):
        ckpt.verify(root, ckpt.read_manifest(root, step))
    store = ckpt.open_store(root)
    assert store.names("objects") == [f"{step:08d}-test" for step in (4, 5, 8, 9, 10)]
    assert removed(root, keep=1) == [4, 5, 8, 9]


def test_of_two_alike_the_newer_is_the_best(root):
    for step in (1, 2, 3):
        save(root, step, validation=1.5)
    assert removed(root, keep=1, keep_best=2) == [1]


def test_a_grace_period_begins_when_a_save_supersedes(root):
    for step, hour in ((1, 0), (2, 10), (3, 20), (4, 30)):
        save(root, step, hour)
    # With two kept, 1 was superseded by 3 at hour 20, and 2 by 4 at hour 30.
    assert removed(root, 21.9 * HOUR, keep=2, grace_seconds=2 * HOUR) == []
    assert removed(root, 22.1 * HOUR, keep=2, grace_seconds=2 * HOUR) == [1]
    assert removed(root, 31.9 * HOUR, keep=2, grace_seconds=2 * HOUR) == []
    assert removed(root, 32.1 * HOUR, keep=2, grace_seconds=2 * HOUR) == [2]


@pytest.mark.parametrize("seed", range(6))
def test_no_clock_makes_more_go_than_the_newest_rule_alone(root, seed):
    chooser = random.Random(seed)
    count, keep = 6, chooser.randint(1, 4)
    for step in range(1, count + 1):
        save(root, step, chooser.choice([0, 5, 200, 700]))
    for _ in range(6):
        now = chooser.choice([-1e12, 0, 6 * HOUR, 500 * HOUR, 1e15])
        grace = chooser.choice([0.0, 1.0, HOUR, 1e9])
        removed(root, now, keep=keep, grace_seconds=grace)
        assert ckpt.committed_steps(root)[-keep:] == list(range(count + 1 - keep, count + 1))


@pytest.mark.parametrize("damage", ["missing", "short", "metadata", "manifest"])
def test_nothing_goes_while_the_newest_is_not_whole(root, damage):
    for step in (1, 2, 3):
        manifest = save(root, step)
    store = ckpt.open_store(root)
    name = "w/zarr.json" if damage == "metadata" else "w/c.0.0"
    key = f"{objects_key(manifest.save_id)}/{name}"
    data = store.read(key)
    if damage == "manifest":
        rewrite(root, 3, b"no manifest")
    else:
        store.remove(key)
    if damage == "short":
        store.write(key, [data[:-1]])
    assert removed(root, keep=1) == []
    why = ckpt.lifecycle.plan_retention(root, ckpt.Retention(keep=1)).keep[1]
    assert why.startswith("the newest one is incomplete: ")
    assert damage == "manifest" or store.where(key) in why
    assert removed(root, keep=1, keep_best=1) == []
    # A save that is whole lets them go; what is damaged still is for people to look at.
    save(root, 4)
    assert removed(root, keep=1) == ([1, 2] if damage == "manifest" else [1, 2, 3])


def test_objects_that_cannot_be_removed_stay_marked(root, monkeypatch):
    save(root, 1)
    save(root, 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(root), "remove_all", lambda *_: None)
        assert ckpt.retain(root, 1) == [1]
    (found,) = ckpt.find_garbage(root)
    assert (found.kind, found.name) == ("uncommitted", "00000001-test")
    assert ckpt.lifecycle.remove_uncommitted(root) == ["00000001-test"]


def scattered(root: Location) -> None:
    """Two checkpoints, and one of each kind of garbage."""
    for step in (1, 2):
        save(root, step)
    store = ckpt.open_store(root)
    store.write("manifests/.step-00000003.json.0123abcd", [b"{half"])
    store.write(f"{pending_key('00000002-test')}/rank-0.begun", [b""])
    store.write(f"{pending_key('00000003-dead')}/rank-0.begun", [b""])
    store.write(f"{objects_key('00000003-dead')}/w/c.0.0", [b"numbers"])
    store.write(f"{objects_key('00000009-away')}/w/c.0.0", [b"others"])
    store.write("manifests/notes.txt", [b"a person's"])


def kinds(garbage) -> dict[str, tuple[str, int, int]]:
    return {each.kind: (each.name, each.objects, each.bytes) for each in garbage}


def test_garbage_is_listed_with_its_bytes_and_removed(root):
    scattered(root)
    found = ckpt.find_garbage(root)
    assert kinds(found) == {
        "draft": (".step-00000003.json.0123abcd", 1, 5),
        "mark": ("00000002-test", 1, 0),
        "uncommitted": ("00000003-dead", 2, 7),
        "unlisted": ("00000009-away", 1, 6),
    }
    assert ckpt.find_garbage(root) == found, "listing removes nothing"
    assert [each.stays for each in found] == ["", "", "", "its manifest may have been moved away"]
    assert len(ckpt.remove_garbage(root, found)) == 3
    assert list(kinds(ckpt.find_garbage(root))) == ["unlisted"]
    store = ckpt.open_store(root)
    ckpt.remove_garbage(root, ckpt.find_garbage(root, unlisted=True))
    assert store.names("objects") == ["00000001-test", "00000002-test"]
    assert store.names("manifests") == ["notes.txt", "step-00000001.json", "step-00000002.json"]
    for step in (1, 2):
        ckpt.verify(root, ckpt.read_manifest(root, step))


def test_what_is_young_may_be_a_save_on_its_way(root):
    scattered(root)
    youngest = max(each.modified for each in ckpt.find_garbage(root))
    for now in (youngest + 59, youngest - 1e6):  # a clock that went back among them
        found = ckpt.find_garbage(root, 60.0, True, lambda now=now: now)
        assert [each.stays for each in found] == ["it is younger than 60 s"] * 4
        assert ckpt.remove_garbage(root, found) == []
    found = ckpt.find_garbage(root, 60.0, True, lambda: youngest + 61)
    assert len(ckpt.remove_garbage(root, found)) == 4


def test_nothing_that_a_damaged_manifest_may_own_goes(root):
    scattered(root)
    rewrite(root, 2, b"damaged")
    found = ckpt.find_garbage(root, unlisted=True)
    # Its own objects are listed by nothing now, and its mark may be that of a save.
    assert {each.name for each in found if each.stays} == {
        "00000002-test", "00000003-dead", "00000009-away",
    }  # fmt: skip
    assert "step-00000002.json, which is damaged" in found[1].stays
    assert [each.kind for each in ckpt.remove_garbage(root, found)] == ["draft"]
    assert ckpt.lifecycle.remove_uncommitted(root) == []
    assert len(ckpt.open_store(root).names(objects_key("00000002-test"))) > 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.5, 1.5), (2, 2), (None, None), ("1.5", None), (math.nan, None), (-math.inf, None),
     (10**400, 10**400)],
)  # fmt: skip
def test_the_validation_of_a_manifest_is_a_finite_number_or_none(root, value, expected):
    manifest = save(root, 3)
    assert manifest.validation is None
    assert manifest.model_copy(update={"state": {"validation": value}}).validation == expected
