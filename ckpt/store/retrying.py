"""A store whose operations are retried after transient errors."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from ckpt.store.protocol import Bytes, Reader, Store, TakenByAnotherError

T = TypeVar("T")

_LASTING = {
    errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS,
    errno.EFBIG, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTSUP,
}  # fmt: skip
_COMPARED_BYTES = 1 << 20


def may_pass(error: OSError) -> bool:
    """Whether an error is transient. An error about a taken or missing name, a permission or a full
    disk is not."""
    return error.errno not in _LASTING


class Retrying(Store):
    """A store whose operations are retried with exponential backoff and full jitter.

    An operation that failed may have taken effect. Where a retry finds the key taken, the object
    there is compared byte by byte: an equal object is success, any other raises FileExistsError.

    Args:
        store: the store; of one that retries already, what it retries: there is one layer.
        attempts: the most attempts at one operation, the first included.
        first_seconds: the longest wait before the second attempt; doubled for each later one.
        longest_seconds: the limit of that doubling.
        sleep: waits for some seconds.
        jitter: draws a number from 0 to 1, the share of the longest wait to wait.
        told: called before each wait with the error of the attempt; from several threads.

    Attributes:
        retries: the number of repeated attempts so far.
    """

    store: Store

    def __init__(
        self,
        store: Store,
        attempts: int = 6,
        first_seconds: float = 0.2,
        longest_seconds: float = 10.0,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
        told: Callable[[OSError], None] | None = None,
    ) -> None:
        assert attempts >= 1
        if isinstance(store, Retrying):
            store = store.store
        self.store, self.attempts, self.retries, self.links = store, attempts, 0, store.links
        self._first, self._longest = first_seconds, longest_seconds
        self._sleep, self._jitter, self._told = sleep, jitter, told
        self._lock = threading.Lock()  # objects are written and read by several threads

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @override
    def where(self, key: str = "") -> str:
        return self.store.where(key)

    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write an object; see :meth:`Store.write`.

        Where ``parts`` is an iterator, a failed write is repeated only if no part was taken yet.
        """
        source = _Source(parts)
        self._make(key, lambda: self.store.write(key, source), source, lambda: not source.spent)

    @override
    def sync(self, keys: Iterable[str]) -> None:
        names = list(keys)
        self._again(lambda: self.store.sync(names))

    @override
    def publish(self, key: str, data: bytes) -> None:
        self._make(key, lambda: self.store.publish(key, data), [data])

    @override
    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        with contextlib.ExitStack() as stack:
            reader = self._again(lambda: stack.enter_context(self.store.open(key)))
            yield _RetryingReader(self, reader)

    @override
    def read(self, key: str) -> bytes:
        return self._again(lambda: self.store.read(key))

    @override
    def names(self, folder: str) -> list[str]:
        return self._again(lambda: self.store.names(folder))

    @override
    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        return self._again(lambda: self.store.listing(folder))

    @override
    def link(self, old: str, new: str) -> bool:
        made = True

        def link() -> None:
            nonlocal made
            made = self.store.link(old, new)

        with contextlib.ExitStack() as stack:
            self._make(new, link, _Contents(stack, self, old))
        return made

    @override
    def remove(self, key: str) -> None:
        self._again(lambda: self.store.remove(key))

    @override
    def remove_all(self, folder: str) -> None:
        with contextlib.suppress(OSError):  # what cannot be removed stays
            self._again(lambda: self.store.remove_all(folder))

    @override
    def free_bytes(self) -> int | None:
        return self._again(self.store.free_bytes)

    def _make(
        self,
        key: str,
        act: Callable[[], None],
        parts: Iterable[memoryview | bytes],
        repeatable: Callable[[], bool] = lambda: True,
    ) -> None:
        failed = False

        def make() -> None:
            nonlocal failed
            try:
                act()
            except TakenByAnotherError:
                raise
            except FileExistsError:
                if not (failed and holds(self, key, parts)):
                    raise
                self.sync(
                    [key]
                )  # the attempt that wrote the object may have failed before the sync
            except OSError:
                failed = True
                raise

        self._again(make, repeatable)

    def _again(self, act: Callable[[], T], repeatable: Callable[[], bool] = lambda: True) -> T:
        for attempt in range(1, self.attempts):
            try:
                return act()
            except OSError as error:
                if not (may_pass(error) and repeatable()):
                    raise
                if self._told is not None:
                    self._told(error)
            with self._lock:
                self.retries += 1
            longest = min(self._longest, self._first * 2 ** (attempt - 1))
            self._sleep(longest * self._jitter())
        return act()


def holds(store: Store, key: str, parts: Iterable[memoryview | bytes]) -> bool:
    """Whether an object's bytes are those of ``parts``, end to end.

    Raises OSError where the object cannot be read.
    """
    found = np.empty(_COMPARED_BYTES, np.uint8)
    with store.open(key) as reader:
        at = 0
        for part in parts:
            expected = np.frombuffer(part, np.uint8)
            if at + expected.nbytes > reader.size:
                return False
            for start in range(0, expected.nbytes, _COMPARED_BYTES):
                block = expected[start : start + _COMPARED_BYTES]
                reader.read_into(at + start, [found[: block.nbytes]])
                if not np.array_equal(block, found[: block.nbytes]):
                    return False
            at += expected.nbytes
        return at == reader.size


class _Source:
    """Parts, and whether they can still be iterated from the first one."""

    def __init__(self, parts: Iterable[memoryview | bytes]) -> None:
        self._parts, self._once = parts, iter(parts) is parts
        self.spent = False

    def __iter__(self) -> Iterator[memoryview | bytes]:
        for part in self._parts:
            self.spent = self._once
            yield part


class _Contents:
    """The bytes of an object, in parts; the object is opened on iteration."""

    def __init__(self, stack: contextlib.ExitStack, store: Store, key: str) -> None:
        self._stack, self._store, self._key = stack, store, key

    def __iter__(self) -> Iterator[memoryview | bytes]:
        reader = self._stack.enter_context(self._store.open(self._key))
        for start in range(0, reader.size, _COMPARED_BYTES):
            part = np.empty(min(_COMPARED_BYTES, reader.size - start), np.uint8)
            reader.read_into(start, [part])
            yield part.data


class _RetryingReader(Reader):
    def __init__(self, store: Retrying, reader: Reader) -> None:
        self._store, self._reader, self.size = store, reader, reader.size

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        self._store._again(lambda: self._reader.read_into(start, parts))

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        self._store._again(lambda: self._reader.expect(spans))
