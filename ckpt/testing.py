"""The tests that a store from outside must pass, for pytest: see :func:`ckpt.open_store`."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ckpt.store import Store, open_store

__all__ = ["StoreContract"]

_PART_BYTES = 8 << 20
"""Of an upload to an object store."""


def reused(data: bytes, size: int) -> Iterator[memoryview]:
    """Parts that all live in one piece of memory, as those of an object do."""
    buffer = bytearray(size)
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        buffer[: len(piece)] = piece
        yield memoryview(buffer)[: len(piece)]
        buffer[:] = b"\xee" * size


def breaking(data: bytes) -> Iterator[bytes]:
    """``data``, and then an OSError."""
    yield data
    raise OSError(errno.EIO, "the source broke")


def contents(size: int, seed: int = 0) -> bytes:
    """Random bytes."""
    return random.Random(seed).randbytes(size)


LARGE = contents(2 * _PART_BYTES + 12345, 9)


class StoreContract:
    """What every store must do.

    A subclass has a fixture ``store``, an empty store for each test::

        class TestMine(StoreContract):
            @pytest.fixture
            def store(self, tmp_path):
                return Mine(f"mystores.mine:Mine://{tmp_path}")
    """

    can_link = True
    """Whether the store's :meth:`~ckpt.Store.link` gives an object a second key."""

    def test_what_is_written_is_read(self, store: Store) -> None:
        cases = {"a/empty": b"", "a/some": contents(1000), "b/one part": LARGE[:_PART_BYTES],
                 "b/ünïcode/.dot/large": LARGE}  # fmt: skip
        for key, data in cases.items():
            store.write(key, reused(data, 3 << 20))
        store.sync(cases)
        for key, data in cases.items():
            assert store.read(key) == data, key
            with store.open(key) as reader:
                assert reader.size == len(data)
                found = np.zeros(len(data), np.uint8)
                reader.read_into(0, [found[:10], found[10:]])
                assert found.tobytes() == data
        assert "b/one part" in store.where("b/one part")

    @pytest.mark.parametrize("size", [10, len(LARGE)])
    def test_nothing_is_written_over(self, store: Store, size: int) -> None:
        store.write("a/key", [LARGE[:size]])
        with pytest.raises(FileExistsError) as error:
            store.write("a/key", [contents(size, 1)])
        assert error.value.strerror
        assert error.value.filename
        with pytest.raises(FileExistsError):
            store.publish("a/key", b"other")
        assert store.read("a/key") == LARGE[:size]

    @pytest.mark.parametrize("size", [10, len(LARGE)])
    def test_a_write_that_fails_leaves_nothing(self, store: Store, size: int) -> None:
        with pytest.raises(OSError, match="the source broke"):
            store.write("a/key", breaking(LARGE[:size]))
        deadline = time.monotonic() + 20  # another machine's may learn of it a little later
        while store.names("a") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert store.names("a") == []
        store.write("a/key", [b"now"])
        assert store.read("a/key") == b"now"

    def test_of_many_that_publish_one_succeeds(self, store: Store) -> None:
        def publish(number: int) -> bool:
            try:
                store.publish("manifests/it", b"same length %d" % number)
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(publish, range(8)))
        assert won.count(True) == 1
        assert store.read("manifests/it") == b"same length %d" % won.index(True)
        with pytest.raises(FileExistsError):
            store.publish("manifests/it", store.read("manifests/it"))
        assert store.names("manifests") == ["it"]

    @pytest.mark.parametrize("announced", [False, True])
    def test_any_part_can_be_read(self, store: Store, announced: bool) -> None:
        store.write("large", reused(LARGE, 5 << 20))
        chooser = random.Random(1)
        spans = [(0, 100), (len(LARGE) - 7, len(LARGE)), (_PART_BYTES - 3, _PART_BYTES + 7_000_000)]
        for _ in range(12):
            start = chooser.randrange(len(LARGE))
            size = chooser.choice([4, 4, 4, 4096, 4097, 3 << 20])
            spans.append((start, min(start + size, len(LARGE))))
        with store.open("large") as reader:
            if announced:
                reader.expect(spans)
            for start, stop in spans:
                cuts = sorted(chooser.randint(0, stop - start) for _ in range(2))
                out = np.zeros(stop - start, np.uint8)
                reader.read_into(start, np.split(out, cuts))
                assert out.tobytes() == LARGE[start:stop], (start, stop)
            with pytest.raises(OSError, match="it ends at byte"):
                reader.read_into(len(LARGE) - 7, [np.zeros(8, np.uint8)])

    def test_what_is_not_there(self, store: Store) -> None:
        acts: list[Callable[[str], object]] = [
            store.read,
            lambda key: store.open(key).__enter__(),
        ]
        for act in acts:
            with pytest.raises(FileNotFoundError) as error:
                act("no/such")
            assert error.value.strerror == "No such file or directory"
            assert "no/such" in error.value.filename
        assert store.names("no") == []
        assert store.listing("no") == {}
        store.remove("no/such")
        store.remove_all("no")

    def test_a_folder_is_no_object(self, store: Store) -> None:
        store.write("folder/key", [b"data"])
        for act in (store.read, lambda key: store.open(key).__enter__()):
            with pytest.raises(FileNotFoundError) as error:
                act("folder")
            assert "folder" in error.value.filename

    def test_names_are_those_directly_below(self, store: Store) -> None:
        keys = ["a/b/c/d", "a/b/e", "a/f", "a/.g", "ab/c", "a/f.json"]
        for key in keys:
            store.write(key, [b"xy"])
        assert store.names("a") == [".g", "b", "f", "f.json"]
        assert store.names("a/b") == ["c", "e"]
        before = time.time()
        listing = store.listing("a")
        assert {k: v[0] for k, v in listing.items()} == dict.fromkeys(
            ["b/c/d", "b/e", "f", ".g", "f.json"], 2
        )
        assert all(abs(modified - before) < 300 for _, modified in listing.values())
        store.remove_all("a/b")
        assert store.names("a") == [".g", "f", "f.json"]
        store.remove("a/f")
        store.remove_all("a")
        assert store.names("a") == []
        assert store.read("ab/c") == b"xy"

    def test_a_second_key_of_an_object(self, store: Store) -> None:
        store.write("old/key", [b"numbers"])
        store.write("taken", [b"other"])
        assert store.link("old/key", "new/key") == self.can_link
        if not self.can_link:
            assert store.names("new") == []
            return
        with pytest.raises(FileExistsError):
            store.link("old/key", "taken")
        assert not store.link("nothing", "new/other")
        store.remove("old/key")
        assert store.read("new/key") == b"numbers"
        assert store.read("taken") == b"other"

    def test_room(self, store: Store) -> None:
        store.write("key", [b""])
        free = store.free_bytes()
        assert free is None or free > 0

    def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert open_store(store) is store
