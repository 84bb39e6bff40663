"""An object store that fails at some request, or at each, of a save, its commit, a load, and a
clean-up: what is committed is whole, and what is whole is never removed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator

import pytest

import ckpt
from ckpt.store import location
from parallel.layout import Topology
from tests.ckpt.test_remote import assert_loads, one_save
from tests.support.checkpoints import assert_whole, save_small
from tests.support.crash import UnsyncedFiles
from tests.support.s3 import BUCKET, Server, proxy, use

KINDS = [500, 503, "drop", "lose", "twice", "slow", "stale"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "_ATTEMPTS", 3)


def work(root: str) -> list[int]:
    """A save, its commit, a clean-up, and a load; the steps that are committed afterwards."""
    one_save(root, 2)
    ckpt.lifecycle.remove_uncommitted(root)
    assert_loads(root, 2, Topology(), seed=2)
    return ckpt.committed_steps(root)


class At:
    """A fault at the requests that ``hits`` names, counted from 0."""

    def __init__(self, kind: int | str, hits: range) -> None:
        self.kind, self.hits, self.count = kind, hits, 0
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str) -> int | str | None:
        with self._lock:
            number, self.count = self.count, self.count + 1
        if number not in self.hits:
            return None
        if self.kind == "stale":
            return "stale" if "list-type" in path else None
        return self.kind


def fault(server: Server, root: str, kind: int | str, hits: range) -> bool:
    """Work through a fault; what must be so whatever it meets. Whether it was done."""
    with use(server.port):
        one_save(root, 1)
    said = ""
    with proxy(server.port, At(kind, hits)) as port, use(port):
        try:
            work(root)
        except (ckpt.CheckpointError, OSError) as error:  # the latter of a clean-up
            said = str(error)
    done = not said
    assert "\n" not in said
    with use(server.port):
        steps = ckpt.committed_steps(root)
        assert steps == [1, 2] or (not done and steps == [1])
        for step in steps:
            assert_loads(root, step, Topology(), seed=step)
            ckpt.verify(root, ckpt.read_manifest(root, step))
        ckpt.lifecycle.remove_uncommitted(root)
        assert ckpt.committed_steps(root) == steps
        if steps == [1]:
            one_save(root, 2)
        assert_loads(root, 2, Topology(), seed=2)
        assert len(ckpt.open_store(root).names("objects")) == 2
    return done


def requests_of(server: Server, root: str) -> int:
    count = At("none", range(0))
    with proxy(server.port, count) as port, use(port):
        one_save(root, 1)
        count.count = 0
        assert work(root) == [1, 2]
    return count.count


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_some_requests_is_retried(server, kind):
    root = f"s3://{BUCKET}/some-{kind}"
    requests = requests_of(server, f"{root}-counted")
    assert requests > 20
    at = requests * KINDS.index(kind) // len(KINDS)
    assert fault(server, f"{root}-{at}", kind, range(at, at + 1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_each_request(server, kind, for_good):
    """Once it is retried. For good it ends what is under way, and takes nothing away."""
    root = f"s3://{BUCKET}/each-{kind}-{for_good}"
    requests = requests_of(server, f"{root}-counted")
    for at in range(requests):
        hits = range(at, 1 << 30 if for_good else at + 1)
        done = fault(server, f"{root}-{at}", kind, hits)
        assert done or for_good, f"{kind} at request {at} of {requests} is not retried"


class Lagging(ckpt.LocalStore):
    """Lists no manifest that was put there after the store was opened; has each by its name."""

    def __init__(self, root) -> None:
        super().__init__(root, UnsyncedFiles())
        self.known = set(super().names("manifests"))

    def names(self, folder: str) -> list[str]:
        found = super().names(folder)
        return [name for name in found if name in self.known] if folder == "manifests" else found


def test_a_commit_whose_answer_is_lost_stays_where_lists_lag(tmp_path):
    class Lossy(Lagging):
        def publish(self, key: str, data: bytes) -> None:
            super().publish(key, data)
            if key.startswith("manifests/"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), key)

    save_small(ckpt.LocalStore(tmp_path, UnsyncedFiles()), 1)
    with pytest.raises(ckpt.CheckpointError, match="Input/output error"):
        save_small(Lossy(tmp_path), 2)
    assert ckpt.committed_steps(tmp_path) == [1, 2]
    assert_whole(tmp_path, 2)


def test_a_clean_up_keeps_a_commit_that_lists_do_not_have_yet(tmp_path):
    class Stubborn(Lagging):
        def remove_all(self, folder: str) -> None:
            if ".pending-" not in folder:
                super().remove_all(folder)

    store = Stubborn(tmp_path)
    save_small(store, 1)  # its mark stays
    lagging = Lagging(tmp_path)
    lagging.known.clear()
    assert ckpt.lifecycle.remove_uncommitted(lagging) == []
    assert_whole(tmp_path, 1)
