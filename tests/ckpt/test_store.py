"""What every store must do, on disks, in memory, on an S3 server, and through failures."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

import ckpt
from ckpt.store.local import LocalStore
from ckpt.store.object_store import PART_BYTES, ObjectStore, open_location
from ckpt.store.peer import PeerServer, PeerStore
from ckpt.store.protocol import Store
from ckpt.store.retrying import Retrying, may_pass
from ckpt.testing import LARGE, StoreContract, breaking, contents
from tests.support.s3 import BUCKET, Server, deaf_port, proxy, use


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


class TestDisk(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "a folder")


class TestMemoryFileSystem(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no file system in memory")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield LocalStore(Path(folder))


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return ObjectStore("memory://test", MemoryStore())


class TestPeer(StoreContract):
    can_link = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        server = PeerServer(tmp_path, "key")
        yield PeerStore(f"peer://key@127.0.0.1:{server.port}/a prefix")
        server.close()


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, server: Server, request) -> Iterator[Store]:
        with use(server.port):
            yield open_location(f"s3://{BUCKET}/{abs(hash(request.node.name))}/a prefix")

    def test_another_process_can_have_it(self, store: Store):
        store.write("key", [b"numbers"])
        assert pickle.loads(pickle.dumps(store)).read("key") == b"numbers"

    def test_an_upload_that_fails_is_aborted(self, store: Store, server: Server):
        with pytest.raises(OSError, match="the source broke"):
            store.write("key", breaking(LARGE))
        assert b"<Upload>" not in server.uploads()


class Flaky:
    """Each operation on a key fails twice: first before it is done, then when it has been."""

    def __init__(self, real: object, quiet: tuple[str, ...] = ("where", "free_bytes")) -> None:
        self.real, self.quiet, self.calls = real, quiet, collections.Counter()

    def __getattr__(self, name: str):
        method = getattr(self.real, name)
        if name in self.quiet or not callable(method):
            return method

        def act(first, *more):
            call = name, str(first)
            self.calls[call] += 1
            if self.calls[call] == 1:
                raise OSError(errno.EIO, f"{name} failed before")
            result = method(first, *more)
            if self.calls[call] == 2:
                raise OSError(errno.ETIMEDOUT, f"{name} failed after")
            return opened(result) if name == "open" else result

        return act


@contextlib.contextmanager
def opened(entered) -> Iterator[Flaky]:
    with entered as reader:
        yield Flaky(reader, ())


def retrying(store: Store, **changed) -> Retrying:
    return Retrying(store, **{"sleep": lambda _: None} | changed)


class TestRetryingDisk(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = retrying(Flaky(LocalStore(tmp_path)))
        yield store
        assert store.retries or not store.store.calls

    # Parts that a store has taken, and that cannot be had again, are the writer's to write again.
    test_a_write_that_fails_leaves_nothing = None

    def test_what_is_written_is_read(self, store: Store, monkeypatch):
        monkeypatch.setattr("ckpt.testing.reused", lambda data, size: [data])
        super().test_what_is_written_is_read(store)

    @pytest.mark.parametrize("told", [False, True])
    def test_any_part_can_be_read(self, store: Store, told: bool, monkeypatch):
        monkeypatch.setattr("ckpt.testing.reused", lambda data, size: [data])
        super().test_any_part_can_be_read(store, told)


@pytest.mark.slow
class TestRetryingS3(TestRetryingDisk):
    @pytest.fixture
    def store(self, server: Server, request) -> Iterator[Store]:
        with use(server.port):
            name = abs(hash(request.node.nodeid))
            yield retrying(Flaky(open_location(f"s3://{BUCKET}/{name}")))


class Scripted:
    """``write`` and ``publish`` raise these in turn, and then are done."""

    links = False

    def __init__(self, *errors: OSError | None) -> None:
        self.errors, self.calls = list(errors), 0

    def publish(self, key: str, data: bytes) -> None:
        self.calls += 1
        if self.errors and (error := self.errors.pop(0)):
            raise error

    def write(self, key: str, parts) -> None:
        next(iter(parts))
        self.publish(key, b"")


def test_waits_double_up_to_the_longest_and_are_jittered():
    waits = []
    store = Retrying(
        Scripted(*(OSError(errno.EIO, "no") for _ in range(5))),
        first_seconds=1, longest_seconds=5, sleep=waits.append, jitter=lambda: 0.5,
    )  # fmt: skip
    store.publish("key", b"")
    assert waits == [0.5, 1.0, 2.0, 2.5, 2.5]
    assert store.retries == 5


def test_what_never_passes_is_told_after_the_last_attempt():
    inner = Scripted(*(OSError(errno.EIO, str(i)) for i in range(9)))
    with pytest.raises(OSError, match="3"):
        retrying(inner, attempts=4).publish("key", b"")
    assert inner.calls == 4


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EEXIST, errno.EACCES, errno.ENOSPC])
def test_what_cannot_pass_is_told_at_once(number):
    inner = Scripted(OSError(number, "lasting"))
    with pytest.raises(OSError, match="lasting"):
        retrying(inner).publish("key", b"")
    assert inner.calls == 1


def test_parts_that_are_gone_are_not_written_again():
    store = retrying(Scripted(OSError(errno.EIO, "half way")))
    with pytest.raises(OSError, match="half way"):
        store.write("key", iter([b"1", b"2"]))
    store = retrying(Scripted(OSError(errno.EIO, "half way")))
    store.write("key", [b"1", b"2"])
    assert store.retries == 1


def test_a_name_that_another_took_meanwhile_is_told(tmp_path):
    class Slow(LocalStore):
        taken = b"mine!"

        def publish(self, key: str, data: bytes) -> None:
            if not self.names("m"):
                super().publish(key, self.taken)
                raise OSError(errno.EIO, "lost")
            super().publish(key, data)

    retrying(Slow(tmp_path / "same")).publish("m/key", b"mine!")
    for number, Slow.taken in enumerate((b"other", b"one longer")):
        with pytest.raises(FileExistsError):
            retrying(Slow(tmp_path / str(number))).publish("m/key", b"mine!")


MEMORY = r"""
import re, sys
from pathlib import Path
from ckpt.store.object_store import open_location

def peak():  # not that of getrusage, which begins with that of the process that started this one
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

store, part = open_location(sys.argv[1]), bytearray(4 << 20)
store.write("warm", [part] * 8)
before = peak()
store.write("large", (part for _ in range(40)))
with store.open("large") as reader:
    import numpy
    out = numpy.empty(1 << 20, numpy.uint8)
    reader.expect([(0, reader.size)])
    for start in range(0, reader.size, out.nbytes):
        reader.read_into(start, [out])
print(peak() - before)
"""


@pytest.mark.slow
def test_an_object_of_any_length_takes_a_few_parts_of_memory(server):
    with use(server.port):
        command = [sys.executable, "-c", MEMORY, f"s3://{BUCKET}/memory"]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    # 160 MiB went each way. What the first object took, of four parts, is not counted.
    assert int(done.stdout) < 6 * PART_BYTES


class Faults:
    """Every ``one_in``-th request that is not the same again gets a fault, in turn."""

    def __init__(self, one_in: int) -> None:
        self.one_in, self.seen, self.given = one_in, 0, collections.Counter()
        self.failed: set[tuple[str, str]] = set()
        self.lock = threading.Lock()

    def __call__(self, method: str, path: str) -> int | str | None:
        # An upload that is begun again has another id.
        path = re.sub(r"uploadId=[^&]*", "", path)
        with self.lock:
            self.seen += 1
            if (method, path) in self.failed or self.seen % self.one_in:
                return None
            self.failed.add((method, path))
            # A store that loses its answer to a write that it has made.
            fault = (500, 503, "lose")[len(self.failed) % 3]
            self.given[fault] += 1
            return fault


def test_an_s3_server_that_fails_now_and_then_is_asked_again(server):
    faults = Faults(one_in=3)
    with proxy(server.port, faults) as port, use(port):
        store = ckpt.open_store(f"s3://{BUCKET}/failing")
        for number in range(8):
            store.publish(f"manifests/{number}", b"%d" % number)
            store.write(f"objects/{number}", [contents(1000, number)])
        store.write("objects/large", [LARGE])
        assert store.read("objects/large") == LARGE
        for number in range(8):
            assert store.read(f"manifests/{number}") == b"%d" % number
            with pytest.raises(FileExistsError):
                store.publish(f"manifests/{number}", b"%d" % number)
        assert len(store.names("objects")) == 9
        store.remove_all("objects")
        assert store.listing("objects") == {}
    assert set(faults.given) == {500, 503, "lose"}


def test_a_server_that_is_not_there_is_one_line():
    with deaf_port() as port, use(port):
        store = open_location(f"s3://{BUCKET}/nowhere")
        for act in (
            lambda: store.read("key"),
            lambda: store.publish("key", b""),
            lambda: store.write("key", [LARGE]),
            lambda: store.names("folder"),
            lambda: store.open("key").__enter__(),
        ):
            with pytest.raises(OSError, match="server") as error:
                act()
            assert "\n" not in str(error.value)
            assert may_pass(error.value)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, PermissionError), (401, PermissionError), (404, FileNotFoundError), (507, OSError)],
)
def test_what_a_server_refuses_is_an_error_of_its_kind(server, status, kind):
    with proxy(server.port, lambda *_: status) as port, use(port):
        store = open_location(f"s3://{BUCKET}/refused")
        with pytest.raises(kind) as error:
            store.publish("key", b"")
        assert not may_pass(error.value)
        assert error.value.filename == store.where("key")


def test_a_bucket_that_is_not_there(server):
    with use(server.port):
        store = open_location("s3://no-such-bucket/prefix")
        for act in (lambda: store.names("manifests"), lambda: store.publish("key", b"")):
            with pytest.raises(FileNotFoundError, match="there is no such bucket"):
                act()


def test_locations(tmp_path, monkeypatch):
    assert isinstance(ckpt.open_store(str(tmp_path)), LocalStore)
    for wrong in ("s3://", "ftp://host/folder", "memory://", "file:///tmp"):
        with pytest.raises(ValueError, match=f"checkpoint location {wrong} must be a folder, or"):
            ckpt.open_store(wrong)
    with pytest.raises(ValueError, match="give it as a str"):
        ckpt.open_store(Path("s3://bucket/prefix"))
    assert ckpt.store.as_location("s3://bucket/a") == "s3://bucket/a"
    assert ckpt.store.as_location("some/folder") == Path("some/folder")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ValueError, match=r"s3://b/new needs obstore: pip install -e '.\[s3"):
        ckpt.open_store("s3://b/new")
