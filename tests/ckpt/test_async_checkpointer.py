"""Asynchronous saves: a writer process outlives its trainer, and never commits in part."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.background import writer
from ckpt.background.messages import Channel, Hello, SaveRequest
from ckpt.background.staging import Staging
from ckpt.lifecycle.removal import mark_for_removal, remove_objects
from ckpt.write.commit import begin, write_receipt
from parallel.layout import Topology
from tests.support.checkpoints import (
    SPECS,
    bits,
    ended,
    eventually,
    full_values,
    info,
    local_array,
    objects_folder,
    pieces,
)
from tests.support.processes import is_running
from tests.support.ranks import start_ranks

ROOT = Path(__file__).parents[2]
PAIR = Topology(dp_shard=2, ep=2)


ALONE = Topology()


def arrays_of(step: int, topology: Topology = ALONE, rank: int = 0) -> list[ckpt.LocalArray]:
    return [local_array(spec, topology, rank, full_values(spec, step)) for spec in SPECS]


def saver_at(root: Path, rank: int = 0, **options: object) -> ckpt.AsyncCheckpointer:
    tiers = [ckpt.Tier(name="shared", location=str(root), keep=3)]
    saver = ckpt.AsyncCheckpointer(tiers, rank, root / f".lock-{rank}", **options)
    saver.ready()
    return saver


@pytest.fixture
def saver(tmp_path):
    with ended(saver_at(tmp_path)) as saver:
        yield saver


def assert_holds(root: Path, step: int) -> None:
    manifest = ckpt.read_manifest(root, step)
    ckpt.verify(root, manifest)
    arrays = [local_array(spec, Topology(), 0) for spec in SPECS]
    ckpt.load(root, manifest, arrays)
    for array in arrays:
        assert torch.equal(bits(pieces(array)), bits(full_values(array.spec, step))), step


def test_memory_prepared_for_other_arrays_is_not_that_of_a_save_under_way(saver, tmp_path):
    os.kill(saver.writer_process_id, signal.SIGSTOP)
    try:
        saver.save(info(1, Topology()), arrays_of(1))
        others = [local_array(SPECS[0], Topology(), 0, full_values(SPECS[0], 2))]
        prepares = threading.Thread(target=saver.prepare, args=(Topology(), others))
        prepares.start()
        prepares.join(0.3)
        assert prepares.is_alive(), "prepare must wait for the writer process"
    finally:
        os.kill(saver.writer_process_id, signal.SIGCONT)
    prepares.join()
    assert [event.what for event in saver.wait()] == ["committed"]
    assert_holds(tmp_path, 1)


def test_gaps_between_chunks_are_zeros_after_a_tier_was_added(tmp_path):
    one_chunk, chunks = (1, 12_500_000), (3, 4_000_001)  # chunks begin at multiples of a page

    def save(saver: ckpt.AsyncCheckpointer, step: int, shape: tuple[int, int]) -> None:
        spec = ckpt.ArraySpec("a", shape, torch.uint8, ((), ()))
        saver.save(info(step, ALONE), [local_array(spec, ALONE, 0, torch.full(shape, 7).byte())])

    with ended(saver_at(tmp_path / "a")) as saver:
        save(saver, 1, one_chunk)
        saver.add(ckpt.Tier(name="local", location=str(tmp_path / "b"), keep=3))
        save(saver, 2, chunks)
        assert {event.what for event in saver.wait()} == {"committed"}
    with ended(saver_at(tmp_path / "c")) as saver:
        save(saver, 2, chunks)
        saver.wait()
    folders = [objects_folder(tmp_path / name, info(2, ALONE).save_id) for name in "ac"]
    first, second = ([path.read_bytes() for path in sorted(folder.rglob("c.*"))]
                     for folder in folders)  # fmt: skip
    assert first == second != []


def test_what_changes_after_a_save_is_not_in_it(saver, tmp_path):
    arrays = arrays_of(1)
    saver.save(info(1, Topology()), arrays)
    for array in arrays:
        for piece in array.pieces:
            piece.zero_()
    (event,) = saver.wait()
    assert (event.what, event.tier, event.step) == ("committed", "shared", 1)
    assert_holds(tmp_path, 1)


def test_many_saves_and_the_oldest_go(saver, tmp_path):
    for step in range(1, 6):
        saver.save(info(step, Topology()), arrays_of(step))
    assert [event.what for event in saver.wait()] == ["committed"] * 5
    assert ckpt.committed_steps(tmp_path) == [3, 4, 5]
    for step in (3, 4, 5):
        assert_holds(tmp_path, step)


def test_what_did_not_change_is_not_written_twice(saver, tmp_path):
    arrays = arrays_of(1)
    saver.save(info(1, Topology()), arrays)
    for piece in arrays[1].pieces:
        piece.zero_()
    arrays[1].pieces[0].fill_(3)
    saver.save(info(2, Topology()), arrays)
    first, second = saver.wait()
    assert first.bytes_linked == 0
    assert 0 < second.bytes_written < second.bytes_linked
    a, b = (objects_folder(tmp_path, ckpt.read_manifest(tmp_path, s).save_id) for s in (1, 2))
    same = {k: (a / k).stat().st_ino == (b / k).stat().st_ino
            for k in ckpt.read_manifest(tmp_path).objects if "/c." in k}  # fmt: skip
    assert {key for key, linked in same.items() if not linked} == {"model/layers/norm/weight/c.0.0"}
    ckpt.retain(tmp_path, 1)
    ckpt.verify(tmp_path, ckpt.read_manifest(tmp_path))


def test_an_object_that_was_damaged_since_is_written_again(saver, tmp_path):
    saver.save(info(1, Topology()), arrays_of(1))
    saver.wait()
    folder = objects_folder(tmp_path, ckpt.read_manifest(tmp_path).save_id)
    victim = folder / "model/embed/weight/c.0.0"
    data = bytearray(victim.read_bytes())
    data[17] ^= 1
    victim.write_bytes(bytes(data))
    saver.save(info(2, Topology()), arrays_of(1))
    (event,) = saver.wait()
    assert event.bytes_written > 0
    ckpt.verify(tmp_path, ckpt.read_manifest(tmp_path, 2))


def test_a_new_writer_process_links_to_what_an_earlier_run_saved(tmp_path):
    for step in (1, 2):
        with ended(saver_at(tmp_path)) as saver:
            saver.save(info(step, Topology()), arrays_of(1))
            (event,) = saver.wait()
    assert event.bytes_written == 0


def test_compressed_in_the_background(tmp_path):
    with ended(saver_at(tmp_path, compression="zstd")) as saver:
        saver.save(info(1, Topology()), arrays_of(1))
        saver.wait()
    assert ckpt.read_manifest(tmp_path).arrays[0].compression == "zstd"
    assert_holds(tmp_path, 1)


def test_a_disk_too_full_for_the_mark_of_a_failure_holds_no_save_up(tmp_path, monkeypatch):
    """The rank that commits does not wait for its own mark, which never comes."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-0")

    store, about = ckpt.open_store(tmp_path), info(7, PAIR)
    begin(store, about, 1)
    store.write(f"objects/{about.save_id}/part", [b"of the other rank"])
    write_receipt(store, about, 1, {})
    monkeypatch.setattr(writer, "sync", full)
    monkeypatch.setattr(writer, "write_failure", full)
    with pytest.raises(OSError, match="No space left"):
        save_in_tier(tmp_path, 0)
    assert list((tmp_path / "objects").iterdir()) == [], "what there was is removed"


@pytest.mark.usefixtures("real_writers")
def test_a_failure_is_told_leaves_nothing_and_the_next_save_works(saver, tmp_path):
    saver.save(info(1, Topology()), arrays_of(1))
    saver.wait()
    blocked = tmp_path / "objects" / ".pending-00000002-test"
    blocked.write_bytes(b"")  # where a folder is wanted
    saver.save(info(2, Topology()), arrays_of(2))
    (event,) = saver.wait()
    assert event.what == "failed"
    assert ".pending-00000002-test" in event.error
    blocked.unlink(missing_ok=True)
    saver.save(info(3, Topology()), arrays_of(3))
    (event,) = saver.wait()
    assert event.what == "committed"
    assert ckpt.committed_steps(tmp_path) == [1, 3]
    assert_holds(tmp_path, 3)


@pytest.mark.usefixtures("real_writers")
def test_a_writer_process_that_is_killed_is_told_and_replaced(saver, tmp_path):
    saver.save(info(1, Topology()), arrays_of(1))
    saver.wait()
    saver._process.send_signal(signal.SIGKILL)
    saver._process.wait()
    with pytest.raises(ckpt.CheckpointError, match=r"the writer process of rank 0 ended with -9"):
        saver.save(info(2, Topology()), arrays_of(2))
    saver.save(info(3, Topology()), arrays_of(3))
    assert [event.what for event in saver.wait()] == ["committed"]
    assert_holds(tmp_path, 3)


def test_a_later_start_elsewhere_ends_a_save_that_waits(tmp_path):
    with ended(saver_at(tmp_path)) as saver:
        saver.save(info(7, PAIR), arrays_of(7, PAIR))  # and rank 1 never comes
        eventually(lambda: list(tmp_path.rglob("rank-0.json")), "the first rank's part is there")
        assert ckpt.lifecycle.remove_uncommitted(tmp_path) == [info(7, PAIR).save_id]
        (event,) = saver.wait(60)
        assert event.what == "failed"
        assert "a later start of the run has abandoned this save" in event.error
    assert ckpt.committed_steps(tmp_path) == []
    assert not list(tmp_path.glob("objects/[!.]*")), "what it had written is removed"


def save_in_tier(root: Path, rank: int) -> None:
    """One rank's part of a save of two, of no objects, as its writer process writes it."""
    tier = ckpt.Tier(name="shared", location=str(root))
    hello = Hello(
        rank=rank, tiers=[tier], lock="", memory_retention_seconds=0.0, commit_timeout_seconds=30.0
    )
    ours, theirs = Pipe()
    process = writer.WriterProcess(Channel(ours), Staging(), hello)
    about = info(7, PAIR)
    request = SaveRequest(info=about, tiers=["shared"], arrays=[], objects=[], staged_bytes=0)
    try:
        process.writers["shared"]._save(request, [], threading.Semaphore(0))
    finally:
        process.writers["shared"].finish()
        theirs.close()
        process.staging.close()


def test_a_save_that_is_abandoned_before_its_receipt_leaves_nothing(tmp_path, monkeypatch):
    sync, about = writer.sync, info(7, PAIR)

    def abandon_and_sync(store, *arguments):
        assert ckpt.lifecycle.remove_uncommitted(tmp_path) == [about.save_id]
        store.write(f"objects/{about.save_id}/late", [b"written by a thread meanwhile"])
        sync(store, *arguments)

    monkeypatch.setattr(writer, "sync", abandon_and_sync)
    with pytest.raises(ckpt.CheckpointError, match="a later start of the run has abandoned this"):
        save_in_tier(tmp_path, 1)
    assert list((tmp_path / "objects").iterdir()) == []


@pytest.mark.parametrize("at", ["write_staged", "sync", "write_receipt"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_write_that_fails_since_its_save_was_abandoned_is_told_as_that(
    tmp_path, monkeypatch, at, finished
):
    def fail(store, *_):
        if finished:
            assert ckpt.lifecycle.remove_uncommitted(tmp_path) == [info(7, PAIR).save_id]
        else:
            mark_for_removal(store, info(7, PAIR).save_id)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), ".pending-00000007-test")

    monkeypatch.setattr(writer, at, fail)
    with pytest.raises(ckpt.CheckpointError, match="a later start of the run has abandoned this"):
        save_in_tier(tmp_path, 0)
    assert list((tmp_path / "objects").iterdir()) == []


def test_a_write_that_fails_for_another_reason_is_told_with_its_reason(tmp_path, monkeypatch):
    def fail(*_):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a folder")

    monkeypatch.setattr(writer, "write_staged", fail)
    with pytest.raises(FileNotFoundError, match="a folder"):
        save_in_tier(tmp_path, 1)
    assert (tmp_path / "objects/.pending-00000007-test/rank-1.failed-2").exists()


def test_two_that_remove_a_save_at_once_remove_all_of_it(tmp_path):
    about = info(7, PAIR)

    class Crossed(ckpt.LocalStore):
        """Another one removes everything just before a mark becomes durable, once."""

        crossed = False

        def sync(self, keys):
            keys = list(keys)
            if not self.crossed and any(key.endswith("/removed") for key in keys):
                self.crossed = True
                remove_objects(ckpt.LocalStore(tmp_path), about.save_id)
            super().sync(keys)

    store = ckpt.LocalStore(tmp_path)
    begin(store, about, 0)
    store.write(f"objects/{about.save_id}/part", [b"of a rank"])
    assert ckpt.lifecycle.remove_uncommitted(Crossed(tmp_path)) == [about.save_id]
    assert list((tmp_path / "objects").iterdir()) == []


@pytest.mark.parametrize("removed", [True, False])
def test_a_commit_stands_only_while_its_objects_are_there(tmp_path, removed):
    about = info(3, ALONE)

    class Crossed(ckpt.LocalStore):
        """A later start comes between a manifest and the look for marks: it has read the manifests
        before, and removes everything; or it reads them now, and clears up the marks alone."""

        def publish(self, key, data):
            super().publish(key, data)
            if key.startswith("manifests/") and removed:
                mark_for_removal(self, about.save_id)
                remove_objects(self, about.save_id)
            elif key.startswith("manifests/"):
                assert ckpt.lifecycle.remove_uncommitted(tmp_path) == []
                assert not list((tmp_path / "objects").glob(".pending-*"))

    def save():
        return ckpt.save(Crossed(tmp_path), about, arrays_of(3), 0, lambda ok: ok)

    if removed:
        with pytest.raises(
            ckpt.CheckpointError, match="a later start of the run has abandoned this"
        ):
            save()
        assert ckpt.committed_steps(tmp_path) == []
    else:
        save()
        assert_holds(tmp_path, 3)


def test_a_commit_that_a_later_start_has_crossed_is_taken_back(tmp_path, monkeypatch):
    store, about, commit = ckpt.open_store(tmp_path), info(7, PAIR), writer.commit
    begin(store, about, 1)
    write_receipt(store, about, 1, {})

    def mark_and_commit(*arguments):
        mark_for_removal(store, about.save_id)  # the start has read the manifests just now
        commit(*arguments)

    monkeypatch.setattr(writer, "commit", mark_and_commit)
    with pytest.raises(ckpt.CheckpointError, match="a later start of the run has abandoned this"):
        save_in_tier(tmp_path, 0)
    assert ckpt.committed_steps(tmp_path) == []


def test_a_first_rank_that_cannot_begin_clears_up_after_the_others(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-0.begun")

    def write_later() -> None:
        store, about = ckpt.open_store(tmp_path), info(7, PAIR)
        marks = f"objects/.pending-{about.save_id}"
        begin(store, about, 1)
        eventually(
            lambda: f"rank-0.failed-{errno.ENOSPC}" in store.names(marks),
            "the first rank has failed",
        )
        store.write(f"objects/{about.save_id}/part", [b"of the other rank"])
        write_receipt(store, about, 1, {})

    monkeypatch.setattr(writer, "begin", full)
    other = threading.Thread(target=write_later)
    other.start()
    try:
        with pytest.raises(OSError, match="No space left"):
            save_in_tier(tmp_path, 0)
    finally:
        other.join()
    assert list((tmp_path / "objects").iterdir()) == []


@pytest.mark.usefixtures("real_writers")
def test_peers_find_a_writer_process_that_took_anothers_place(tmp_path):
    served = tmp_path / "served"
    with ended(
        ckpt.AsyncCheckpointer([], 0, tmp_path / ".lock", serves=str(served), key="secret")
    ) as saver:
        port = saver.ready()
        store = ckpt.open_store(f"peer://secret@127.0.0.1:{port}/node1")
        store.publish("a", b"before")
        saver._process.kill()
        saver._process.wait()
        with pytest.raises(ckpt.CheckpointError, match="ended with -9"):
            saver.save(info(1, Topology()), arrays_of(1))
        again = ckpt.open_store(f"peer://secret@127.0.0.1:{port}/node1")
        assert again.read("a") == b"before"


def test_a_writer_process_does_not_hold_what_its_trainer_printed_into(tmp_path):
    trainer = f"""
import os, signal, sys
import ckpt
from ckpt.background import writer
tier = ckpt.Tier(name="memory", location={str(tmp_path / "memory")!r}, ranks=(0,), volatile=True)
saver = ckpt.AsyncCheckpointer([tier], 0, __import__("pathlib").Path({str(tmp_path / ".lock")!r}))
saver.ready()
print(saver._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run(
        [sys.executable, "-c", trainer], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=100,
    )  # fmt: skip
    pid = int(process.stdout)
    assert is_running(pid)
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: not is_running(pid), "the writer process gives way")


def save_and_wait_for_death(rank: int, root: Path, ready: Path) -> None:
    saver = saver_at(root, rank)
    (ready / f"pid-{rank}").write_text(str(saver._process.pid))
    saver.save(info(7, PAIR), arrays_of(7, PAIR, rank))
    (ready / f"staged-{rank}").touch()
    time.sleep(600)


def test_trainers_killed_after_the_copy_lose_nothing(tmp_path):
    root = tmp_path / "checkpoints"
    root.mkdir()
    processes, _ = start_ranks(save_and_wait_for_death, 2, root, tmp_path)
    eventually(lambda: all((tmp_path / f"staged-{r}").exists() for r in (0, 1)), "staged")
    for process in processes:
        process.kill()
        process.join()
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    eventually(lambda: not any(map(is_running, pids)), "writer processes end by themselves")
    assert_holds(root, 7)


def stage_alone(rank: int, root: Path, ready: Path) -> None:
    if rank == 0:
        save_and_wait_for_death(rank, root, ready)
    time.sleep(600)


def test_the_next_start_takes_over_from_a_writer_process_that_waits_in_vain(tmp_path):
    root = tmp_path / "checkpoints"
    root.mkdir()
    processes, _ = start_ranks(stage_alone, 2, root, tmp_path)
    eventually(lambda: (tmp_path / "staged-0").exists(), "staged")
    for process in processes:
        process.kill()
        process.join()
    pid = int((tmp_path / "pid-0").read_text())
    assert is_running(pid), "it waits for the receipt of rank 1"
    with ended(saver_at(root)) as saver:
        eventually(lambda: not is_running(pid), "the writer process before gives way")
        assert ckpt.committed_steps(root) == []
        assert ckpt.lifecycle.remove_uncommitted(root) == ["00000007-test"]
        saver.save(info(8, Topology()), arrays_of(8))
        saver.wait()
    assert_holds(root, 8)


def one_rank_cannot_write(rank: int, root: Path) -> list[str]:
    saver = saver_at(root, rank)
    if rank == 1:
        # Only its own mark of the beginning is in its way.
        mark = root / "objects" / ".pending-00000005-test" / "rank-1.begun"
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    saver.save(info(5, PAIR), arrays_of(5, PAIR, rank))
    events = saver.wait()
    saver.save(info(6, PAIR), arrays_of(6, PAIR, rank))
    events += saver.wait()
    saver.close()
    return [f"{event.step} {event.what} {event.error}" for event in events]


def test_a_rank_that_cannot_write_stops_the_commit_and_not_the_run(tmp_path):
    from tests.support.ranks import run_ranks

    first, second = run_ranks(one_rank_cannot_write, 2, tmp_path)
    assert first[0] == "5 failed rank 1 could not write: File exists"
    assert second[0].startswith("5 failed File exists")
    assert [first[1], second[1]] == ["6 committed ", "6 written "]
    assert ckpt.committed_steps(tmp_path) == [6]
    assert not (tmp_path / "objects" / "00000005-test").exists()
    assert_holds(tmp_path, 6)


def one_writer_process_dies(rank: int, root: Path) -> list[str]:
    saver = saver_at(root, rank)
    if rank == 1:
        saver._process.kill()
        saver._process.wait()
    told = []
    for step in (5, 6):
        try:
            saver.save(info(step, PAIR), arrays_of(step, PAIR, rank))
            told += [f"{event.step} {event.what} {event.error}" for event in saver.wait()]
        except ckpt.CheckpointError as error:
            told.append(str(error))
    saver.close()
    return told


def test_a_writer_process_that_dies_keeps_nobody_waiting(tmp_path):
    from tests.support.ranks import run_ranks

    first, second = run_ranks(one_writer_process_dies, 2, tmp_path)
    assert first == ["5 failed rank 1 could not write", "6 committed "]
    assert second[0].startswith("the writer process of rank 1 ended with -9")
    assert second[1] == "6 written "
    assert ckpt.committed_steps(tmp_path) == [6]
    assert not list(tmp_path.glob(".lock-*")), "locks are gone"


def with_memory(rank: int, root: Path, memory: Path, retention: float) -> None:
    tiers = [
        ckpt.Tier(name="memory", location=str(memory), ranks=(0,), volatile=True),
        ckpt.Tier(name="shared", location=str(root)),
    ]
    saver = ckpt.AsyncCheckpointer(tiers, 0, root / ".lock", memory_retention_seconds=retention)
    saver.ready()
    saver.save(info(1, Topology()), arrays_of(1))
    assert {e.tier for e in saver.wait() if e.what == "committed"} == {"memory", "shared"}
    (root / "pid").write_text(str(saver._process.pid))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("retention", [0.0, 600.0])
def test_memory_outlives_a_trainer_for_a_while(tmp_path, retention):
    root, memory = tmp_path / "shared", tmp_path / "memory"
    root.mkdir()
    (process,), _ = start_ranks(with_memory, 1, root, memory, retention)
    process.join()
    pid = int((root / "pid").read_text())
    if not retention:
        eventually(lambda: not is_running(pid), "the writer process ends")
        assert not memory.exists()
        return
    assert is_running(pid)
    assert_holds(memory, 1)
    tiers = [ckpt.Tier(name="memory", location=str(memory), ranks=(0,), volatile=True)]
    with ended(ckpt.AsyncCheckpointer(tiers, 0, root / ".lock")) as saver:
        saver.ready()
        eventually(lambda: not is_running(pid), "the writer process before gives way")
        assert_holds(memory, 1)
    assert not memory.exists()


def test_tiers_of_nodes_hold_what_their_ranks_need(tmp_path):
    # Copies take turns over all ranks in a shared store; on a node's disk its ranks have it all.
    topology = Topology(dp_replicate=2, dp_shard=2, ep=2)
    nodes = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    with contextlib.ExitStack() as held:
        savers = []
        for rank, node in nodes.items():
            local = ckpt.Tier(name="local", location=str(tmp_path / f"node{node[0]}"), ranks=node)
            shared = ckpt.Tier(name="shared", location=str(tmp_path / "shared"))
            saver = ckpt.AsyncCheckpointer([local, shared], rank, tmp_path / f"lock-{rank}")
            savers.append(held.enter_context(ended(saver)))
        for rank, saver in enumerate(savers):
            saver.ready()
            saver.save(info(1, topology), arrays_of(1, topology, rank))
        events = [[(e.tier, e.what) for e in saver.wait()] for saver in savers]
        assert sorted(events[2]) == [("local", "committed"), ("shared", "written")]
        assert sorted(events[3]) == [("local", "written"), ("shared", "written")]
    assert_holds(tmp_path / "shared", 1)
    for rank, node in nodes.items():
        root = tmp_path / f"node{node[0]}"
        manifest = ckpt.read_manifest(root)
        assert manifest.ranks == node
        ckpt.verify(root, manifest)
        arrays = [local_array(spec, topology, rank) for spec in SPECS]
        ckpt.load(root, manifest, arrays)
        for array, expected in zip(arrays, arrays_of(1, topology, rank), strict=True):
            assert torch.equal(bits(pieces(array)), bits(pieces(expected)))


@pytest.mark.usefixtures("real_writers")
def test_a_writer_process_that_cannot_start_is_told_once(tmp_path):
    (tmp_path / "file").touch()
    tiers = [ckpt.Tier(name="shared", location=str(tmp_path / "root"))]
    with (
        ended(ckpt.AsyncCheckpointer(tiers, 0, tmp_path / "file" / "lock")) as saver,
        pytest.raises(ckpt.CheckpointError, match="the writer process of rank 0 did not start"),
    ):
        saver.ready()


def test_a_stranger_who_says_nothing_keeps_no_peer_waiting(tmp_path):
    import socket

    from ckpt.store.peer import PeerServer, PeerStore

    server = PeerServer(tmp_path, "key")
    with socket.create_connection(("127.0.0.1", server.port)):
        store = PeerStore(f"peer://key@127.0.0.1:{server.port}/node0")
        store.publish("a/b", b"numbers")
        assert store.read("a/b") == b"numbers"
        stranger = PeerStore(f"peer://guess@127.0.0.1:{server.port}/node0")
        with pytest.raises(OSError, match="the connection is lost"):
            stranger.read("a/b")
    server.close()


def test_a_server_that_does_not_know_the_key_is_refused(tmp_path):
    from multiprocessing.connection import Listener

    from ckpt.store.peer import PeerStore

    def pretend(listener: Listener) -> None:
        with listener.accept() as connection:
            connection.send_bytes(bytes(32))
            connection.recv_bytes()  # a proof, which it accepts
            connection.send_bytes(connection.recv_bytes())

    with Listener(("127.0.0.1", 0)) as listener:
        other = threading.Thread(target=pretend, args=(listener,))
        other.start()
        store = PeerStore(f"peer://key@127.0.0.1:{listener.address[1]}/node0")
        with pytest.raises(OSError, match="the other end does not know the key"):
            store.read("a/b")
        other.join()


@pytest.mark.usefixtures("real_writers")
def test_a_checkpointer_closes_once(root):
    tier = ckpt.Tier(name="shared", location=str(root))
    checkpointer = ckpt.AsyncCheckpointer([tier], rank=0, lock=root / "lock")
    checkpointer.ready()
    checkpointer.close()
    checkpointer.close()
    checkpointer.leave()
    assert checkpointer.poll() == []
    with pytest.raises(ckpt.CheckpointError, match="the checkpointer of rank 0 is closed"):
        checkpointer.save(info(1, ALONE), [])
    with pytest.raises(ckpt.CheckpointError, match="the checkpointer of rank 0 is closed"):
        checkpointer.add(tier)


def test_a_failing_retention_leaves_a_commit_a_commit(root, capfd):
    keep = ckpt.Retention.model_construct(keep="x")  # stands for any defect in retention
    tier = ckpt.Tier.model_construct(name="shared", location=str(root), keep=keep)
    hello = Hello(rank=0, tiers=[], lock="", memory_retention_seconds=0, commit_timeout_seconds=9)
    events: list[ckpt.SaveEvent] = []
    process = writer.WriterProcess(None, None, hello)  # type: ignore[arg-type]
    process.publish = events.append  # type: ignore[method-assign]
    of_tier = writer.TierWriter(process, tier)
    request = SaveRequest(
        info=info(1, ALONE), tiers=["shared"], arrays=[], objects=[], staged_bytes=0
    )
    of_tier.accept(request, [], threading.Semaphore(0))
    of_tier.finish()
    assert [(event.what, event.step) for event in events] == [("committed", 1)]
    assert ckpt.committed_steps(root) == [1]
    assert "TypeError" in capfd.readouterr().err
