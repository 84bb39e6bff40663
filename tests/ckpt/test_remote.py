"""Whole checkpoints in every kind of store; what becomes of them when an S3 server fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from obstore.store import MemoryStore

import ckpt
from ckpt.format.keys import objects_key, pending_key
from ckpt.store import location, object_store
from ckpt.store.location import Location
from ckpt.store.object_store import ObjectStore
from parallel.layout import Topology
from tests.ckpt.test_store import Flaky, retrying
from tests.support.checkpoints import (
    SPECS,
    bits,
    ended,
    full_values,
    info,
    local_array,
    pieces,
    save_with_threads,
)
from tests.support.s3 import BUCKET, Server, proxy, use

TOPOLOGY = Topology(dp_shard=2, ep=2)
LARGE = ckpt.ArraySpec("model/large", (9, 1 << 18), torch.float32, ((), ()))  # 9 MiB


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


def assert_loads(root: Location, step: int, topology=TOPOLOGY, specs=SPECS, seed=0) -> None:
    manifest = ckpt.read_manifest(root, step)
    for rank in range(topology.world):
        arrays = [local_array(spec, topology, rank) for spec in specs]
        ckpt.load(root, manifest, arrays)
        for array in arrays:
            expected = local_array(array.spec, topology, rank, full_values(array.spec, seed))
            assert torch.equal(bits(pieces(array)), bits(pieces(expected))), array.spec.name


class CheckpointContract:
    """Subclasses have a fixture ``root``, new for each test."""

    def test_what_is_saved_is_loaded_on_any_ranks(self, root):
        specs = [*SPECS, LARGE]
        manifest = save_with_threads(root, 5, TOPOLOGY, specs)
        for topology in (TOPOLOGY, Topology(), Topology(dp_shard=4, ep=2)):
            assert_loads(root, 5, topology, specs)
        assert ckpt.verify(root, manifest) == manifest.total_bytes
        box = ((3, 5), (5, 100))
        found = ckpt.read.read_box(root, manifest, manifest.array(LARGE.name), box)
        assert found.tobytes() == full_values(LARGE)[3:5, 5:100].numpy().tobytes()
        store = ckpt.open_store(root)
        assert store.names("manifests") == ["step-00000005.json"]
        assert store.names("objects") == [manifest.save_id], "marks are gone"
        with pytest.raises(ckpt.CheckpointError, match="step 5 already has a checkpoint"):
            save_with_threads(root, 5, TOPOLOGY, save_id="again")
        assert store.names("objects") == [manifest.save_id]

    def test_what_was_changed_or_is_gone_is_named(self, root):
        manifest = save_with_threads(root, 5, TOPOLOGY)
        store = ckpt.open_store(root)
        key = next(key for key in manifest.objects if "w_gate/c." in key)
        full = f"{objects_key(manifest.save_id)}/{key}"
        data = store.read(full)
        for damaged in (data[:-1], data[:9] + bytes([data[9] ^ 1]) + data[10:], b"", None):
            store.remove(full)
            if damaged is not None:
                store.write(full, [damaged])
            with pytest.raises(ckpt.CheckpointError) as error:
                ckpt.verify(root, manifest)
            assert store.where(full) in str(error.value)

    def test_old_ones_and_leftovers_are_removed(self, root):
        for step in (1, 2, 3):
            save_with_threads(root, step, TOPOLOGY, seed=step)
        store = ckpt.open_store(root)
        store.write(f"{pending_key('00000004-dead')}/rank-0.begun", [b""])
        store.write(f"{objects_key('00000004-dead')}/w/c.0", [b"half"])
        assert ckpt.lifecycle.remove_uncommitted(root) == ["00000004-dead"]
        assert ckpt.retain(root, 2) == [1]
        assert ckpt.committed_steps(root) == [2, 3]
        assert store.names("objects") == ["00000002-test", "00000003-test"]
        for step in (2, 3):
            assert_loads(root, step, seed=step)

    def test_it_is_resharded_from_there_and_to_there(self, root, tmp_path):
        manifest = save_with_threads(root, 5, TOPOLOGY)
        local = tmp_path / "resharded"
        ckpt.reshard(root, manifest, local, Topology(dp_shard=4, ep=4))
        assert_loads(local, 5, Topology(dp_shard=4, ep=4))
        again = ckpt.open_store(root)
        again.remove("manifests/step-00000005.json")
        made = ckpt.reshard(local, ckpt.read_manifest(local), root, TOPOLOGY)
        assert_loads(root, 5)
        ckpt.verify(root, made)

    def test_of_two_saves_of_a_step_one_is_committed(self, root):
        gate = threading.Barrier(2)

        def save(number: int) -> bool:
            gate.wait(20)
            try:
                save_with_threads(root, 5, Topology(), seed=number, save_id=f"save-{number}")
            except ckpt.CheckpointError as error:
                return "step 5 already has a checkpoint" not in str(error)
            return True

        with ThreadPoolExecutor(2) as pool:
            won = list(pool.map(save, range(2)))
        assert sorted(won) == [False, True]
        winner = won.index(True)
        assert_loads(root, 5, seed=winner)
        assert ckpt.open_store(root).names("objects") == [f"save-{winner}"]


class TestDisk(CheckpointContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Location:
        return tmp_path / "a folder"


class TestMemory(CheckpointContract):
    @pytest.fixture
    def root(self) -> Location:
        return ObjectStore("memory://test", MemoryStore())


class TestS3(CheckpointContract):
    @pytest.fixture
    def root(self, server: Server, request) -> Iterator[Location]:
        with use(server.port):
            yield f"s3://{BUCKET}/{abs(hash(request.node.name))}/checkpoints"


class TestRetrying(CheckpointContract):
    # A reshard's parts can be had but once; it goes on by itself when it is run again.
    test_it_is_resharded_from_there_and_to_there = None

    @pytest.fixture
    def root(self, tmp_path: Path) -> Location:
        return retrying(Flaky(ckpt.LocalStore(tmp_path)))


def one_save(root: Location, step: int) -> None:
    arrays = [local_array(spec, Topology(), 0, full_values(spec, step)) for spec in SPECS]
    ckpt.save(root, info(step, Topology()), arrays, 0, lambda ok: ok)


def test_a_server_that_dies_in_a_save_never_has_half_a_checkpoint(server, monkeypatch):
    monkeypatch.setattr(location, "_ATTEMPTS", 1)
    seen = []
    with proxy(server.port, lambda *request: seen.append(request)) as port, use(port):
        one_save(f"s3://{BUCKET}/lives", 2)
    commit = next(
        i for i, (method, path) in enumerate(seen) if "PUT/bucket/lives/manifests" in method + path
    )
    for moment in (*range(0, commit, 4), commit):
        dies_at(server, moment, lost=moment == commit)


def dies_at(server: Server, moment: int, lost: bool) -> None:
    """The server does ``moment`` requests and one more that it does not answer; then it comes back
    as it was."""
    root = f"s3://{BUCKET}/dies-{moment}"
    with use(server.port):
        one_save(root, 1)
    answered = []

    def fault(method: str, path: str) -> int | str | None:
        answered.append(method)
        if len(answered) == moment + 1:
            return "lose"
        # After the commit it forgets about manifests alone, and would do what a clean-up asks.
        dead = "manifests" in path if lost else True
        return 503 if len(answered) > moment and dead else None

    with (
        proxy(server.port, fault) as port,
        use(port),
        pytest.raises(ckpt.CheckpointError, match=r"checkpoint of step 2 in .* is not saved"),
    ):
        one_save(root, 2)
    with use(server.port):
        # A commit whose answer was lost is one all the same: what it lists must not be removed.
        assert ckpt.committed_steps(root) == ([1, 2] if lost else [1])
        assert ckpt.lifecycle.remove_uncommitted(root) in ([], ["00000002-test"])
        for step in ckpt.committed_steps(root):
            assert_loads(root, step, Topology(), seed=step)
        assert len(ckpt.open_store(root).names("objects")) == (2 if lost else 1)
        if not lost:
            one_save(root, 2)
            assert_loads(root, 2, Topology(), seed=2)


def test_a_killed_server_is_one_line_and_a_failed_save():
    server = Server()
    root = f"s3://{BUCKET}/killed"
    killer = [0]

    class Dying(ckpt.Retrying):
        def write(self, key, parts):
            killer[0] += 1
            if killer[0] == 5:
                server.kill()
            super().write(key, parts)

    try:
        with use(server.port):
            store = Dying(ckpt.open_store(root), sleep=lambda _: None)
            with pytest.raises(ckpt.CheckpointError) as error:
                one_save(store, 1)
        assert "the server refuses connections" in str(error.value)
        assert "\n" not in str(error.value)
        assert store.retries >= 5
    finally:
        server.kill()


def test_a_save_through_failures_is_whole(server):
    seen, failed = [0], set()

    def fault(method: str, path: str) -> int | None:
        seen[0] += 1
        if seen[0] % 4 or (method, path) in failed:
            return None
        failed.add((method, path))
        return (500, 503)[len(failed) % 2]

    with proxy(server.port, fault) as port, use(port):
        root = f"s3://{BUCKET}/through"
        save_with_threads(root, 1, TOPOLOGY)
        assert_loads(root, 1)
        assert ckpt.retain(root, 1) == []
    assert len(failed) > 5


def test_a_part_is_read_in_few_requests(server):
    # One chunk of a large object: its index, that chunk, and the CRC32Cs of the others.
    spec = ckpt.ArraySpec("w", (6, 1 << 20), torch.float32, ((), ()))  # 6 chunks of 4 MiB
    with use(server.port):
        root = f"s3://{BUCKET}/few"
        manifest = save_with_threads(root, 1, Topology(), [spec])
    requests = []

    def see(method: str, path: str) -> None:
        requests.append((method, path))

    with proxy(server.port, see) as port, use(port):
        box = ((3, 4), (0, 1 << 20))
        found = ckpt.read.read_box(root, manifest, manifest.array("w"), box)
        assert found.tobytes() == full_values(spec)[3:4].numpy().tobytes()
        # The last CRC32C comes with the index. The others are far apart, and fetched at once.
        assert len(requests) == 1 + 1 + 4
        requests.clear()
        ckpt.verify(root, manifest)
        length = manifest.objects["w/c.0.0"].bytes - object_store.TAIL_BYTES
        whole = [path for _, path in requests if "/w/c." in path]
        assert len(whole) == 1 + -(-length // object_store.READ_BYTES)


def test_a_writer_process_retries_a_store(server, tmp_path):
    root, failed = f"s3://{BUCKET}/by-a-writer-process", []

    def fault(method: str, path: str) -> int | str | None:
        if method == "PUT" and "rank-0.json" in path and len(failed) < 2:
            failed.append(path)
            return 400
        return None

    with proxy(server.port, fault) as port, use(port):
        tier = ckpt.Tier(name="shared", location=root)
        with ended(ckpt.AsyncCheckpointer([tier], 0, tmp_path / ".lock")) as saver:
            saver.ready()
            arrays = [local_array(spec, Topology(), 0, full_values(spec, 4)) for spec in SPECS]
            saver.save(info(4, Topology()), arrays)
            (event,) = saver.wait()
        assert (event.what, event.retries) == ("committed", 2), event.error
    with use(server.port):
        assert_loads(root, 4, Topology(), seed=4)
