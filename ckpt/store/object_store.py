"""Object stores, through obstore: S3 and compatible servers, Google Cloud Storage, Azure.

A server makes an object visible atomically and durably: there is nothing to sync. obstore repeats
no request: ``ckpt.Retrying`` repeats operations, and counts and tells what it repeats.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ckpt.store.protocol import Reader, Store, TakenByAnotherError

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client


SCHEMES = ("s3", "gs", "az")
PART_BYTES = 8 << 20
"""The bytes of a part of an upload; a shorter object is uploaded in one request."""
UPLOADS = 3
"""The parts of one object that are uploaded at a time."""
READ_BYTES = 8 << 20
"""The most bytes of an object that a reader fetches in a request, and holds."""
TAIL_BYTES = 64 << 10
"""The last bytes of an object, fetched when it is opened: the index, or a short object."""
_SMALL = 4096
_GAP = 64 << 10  # fetching that many unwanted bytes costs less than a request


def open_location(location: str) -> ObjectStore:
    """The store at ``s3://bucket/prefix``, ``gs://`` or ``az://``.

    Options are environment variables with obstore's names (AWS_ENDPOINT_URL, AWS_ALLOW_HTTP, ...).

    Raises ValueError, in one line, where ``location`` is no such URL or obstore is not installed.
    """
    scheme, _, rest = location.partition("://")
    if scheme not in SCHEMES or not rest.strip("/"):
        wanted = ", ".join(f"{scheme}://BUCKET/PREFIX" for scheme in SCHEMES)
        raise ValueError(
            f"checkpoint location {location} must be a folder, or one of {wanted}, "
            f"or package.module:Class://... of a store"
        )
    names = ("AWS_", "GOOGLE_", "AZURE_")
    options = tuple(sorted(item for item in os.environ.items() if item[0].startswith(names)))
    location = location.rstrip("/")
    return ObjectStore(location, _client(location, options, os.getpid()))


@lru_cache(maxsize=16)  # a client holds connections
def _client(location: str, options: tuple[tuple[str, str], ...], process: int) -> Client:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ValueError(
            f"checkpoint location {location} needs obstore: pip install -e '.[s3]' in Convoy's "
            f"checkout"
        ) from None
    config: Any = {}
    if location.startswith("s3:") and "AWS_COPY_IF_NOT_EXISTS" not in dict(options):
        config = {"copy_if_not_exists": "multipart"}
    try:
        return from_url(location, config=config, retry_config={"max_retries": 0})
    except (BaseError, ValueError) as error:
        raise ValueError(f"checkpoint location {location}: {_first_line(error)}") from None


class ObjectStore(Store):
    """Objects under a bucket's prefix; ``client`` is one of ``obstore.store``."""

    links = False
    """A copy on the server takes space, and reads for a comparison are slow."""

    def __init__(self, location: str, client: Client) -> None:
        self.location, self.client = location, client
        self._unanswered: dict[str, str] = {}  # the marks of published keys without an answer

    @override
    def where(self, key: str = "") -> str:
        return f"{self.location}/{key}" if key else self.location

    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write an object; see :meth:`Store.write`.

        An object longer than ``PART_BYTES`` is uploaded in parts, ``UPLOADS + 2`` of them in memory
        at a time. Such an upload first asks whether the key is taken, and is not atomic: the object
        must have a single writer, as every object of a save has. Two writers of a shorter object
        may compete.
        """
        blocks = _blocks(parts)
        first, second = next(blocks, b""), next(blocks, None)
        if second is None:
            self.publish(key, first)
            return
        import obstore

        if self._holds(key):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.where(key))
        with self._errors(key):
            whole = chain((first, second), blocks)
            obstore.put(self.client, key, whole, chunk_size=PART_BYTES, max_concurrency=UPLOADS)

    def publish(self, key: str, data: bytes | bytearray) -> None:
        """Put an object if the key is free; see :meth:`Store.publish`.

        The object carries a random mark. Where the server's answer is lost, a repeated call has
        the same mark and finds the key taken: the mark tells whether by this store, and
        :class:`TakenByAnotherError` that it was not.
        """
        writer = self._unanswered.pop(key, None) or secrets.token_hex(8)
        try:
            self._put_new(key, data, writer)
        except TakenByAnotherError:
            raise
        except OSError:
            self._unanswered[key] = writer
            raise

    def _put_new(self, key: str, data: bytes | bytearray, writer: str) -> None:
        import obstore

        try:
            with self._errors(key):
                obstore.put(self.client, key, data, mode="create", attributes={"writer": writer})
        except FileExistsError:
            try:
                with self._errors(key):
                    there = obstore.get(self.client, key, options={"head": True}).attributes
            except FileNotFoundError:
                # A server may refuse both of two writers; or the object was removed since.
                message = "the server refused two writers at a time, and has neither object"
                raise OSError(errno.EAGAIN, message, self.where(key)) from None
            if there.get("writer") != writer:
                message = os.strerror(errno.EEXIST)
                raise TakenByAnotherError(errno.EEXIST, message, self.where(key)) from None

    @override
    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[ObjectReader]:
        yield ObjectReader(self, key)

    @override
    def read(self, key: str) -> bytes:
        import obstore

        with self._errors(key):
            return bytes(obstore.get(self.client, key).bytes())

    @override
    def names(self, folder: str) -> list[str]:
        import obstore

        with self._errors(folder):
            found = obstore.list_with_delimiter(self.client, folder)
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(path.rpartition("/")[2] for path in paths)

    @override
    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        found = {}
        with self._errors(folder):
            for each in self._all(folder):
                key = each["path"].removeprefix(f"{folder}/")
                found[key] = each["size"], each["last_modified"].timestamp()
        return found

    def link(self, old: str, new: str) -> bool:
        """Let the server copy the object; False where the server has no conditional copies."""
        import obstore

        try:
            with self._errors(new):
                obstore.copy(self.client, old, new, overwrite=False)
        except FileExistsError:
            raise
        except OSError:
            return False
        return True

    @override
    def remove(self, key: str) -> None:
        self._remove([key])

    @override
    def remove_all(self, folder: str) -> None:
        """See :meth:`Store.remove_all`; raises OSError, for :class:`Retrying` to try again."""
        with self._errors(folder):
            keys = [each["path"] for each in self._all(folder)]
            for start in range(0, len(keys), 1000):
                self._remove(keys[start : start + 1000])

    def _remove(self, keys: list[str]) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError), self._errors(keys[0]):
            obstore.delete(self.client, keys)

    def _holds(self, key: str) -> bool:
        import obstore

        try:
            with self._errors(key):
                obstore.head(self.client, key)
        except FileNotFoundError:
            return False
        return True

    def _all(self, folder: str) -> Iterator[Any]:
        import obstore

        return chain.from_iterable(obstore.list(self.client, folder, chunk_size=1000))

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Raise obstore's errors as OSErrors, each in one line."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and error.filename is not None:
                raise  # converted already
            _raise(error, self.where(key))


class ObjectReader(Reader):
    """One object, fetched in large pieces."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key = store, key
        self._runs: list[tuple[int, int]] = []
        self._small: dict[int, memoryview] = {}
        self.size, tail = self._open()
        self._tail = (self.size - len(tail), tail)
        self._block = (0, memoryview(b""))

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        """Announce the reads to come; see :meth:`Reader.expect`.

        Short spans are fetched now, in one request. Long spans tell later requests how far to read
        ahead.
        """
        runs: list[tuple[int, int]] = []
        small = []
        for start, stop in sorted(spans):
            if stop - start <= _SMALL:
                small.append((start, stop))
            elif runs and start - runs[-1][1] <= _GAP:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        self._runs = runs
        away = [span for span in small if span[0] < self._tail[0]]
        if away:
            import obstore

            starts, stops = [a for a, _ in away], [b for _, b in away]
            with self._store._errors(self._key):
                client = self._store.client
                found = obstore.get_ranges(
                    client, self._key, starts=starts, ends=stops, coalesce=_GAP
                )
            self._small = {at: memoryview(data) for at, data in zip(starts, found, strict=True)}

    @override
    def read_into(self, start: int, parts: Sequence[NDArray[np.uint8]]) -> None:
        left = sum(part.nbytes for part in parts)
        for part in parts:
            out = part.data
            while out:
                found = self._from(start, left)[: len(out)]
                out[: len(found)] = found
                out = out[len(found) :]
                start += len(found)
                left -= len(found)

    def _from(self, start: int, wanted: int) -> memoryview:
        """One or more of the bytes from ``start`` on."""
        if start in self._small:
            return self._small[start]
        for at, data in (self._tail, self._block):
            if at <= start < at + len(data):
                return data[start - at :]
        stop = next((b for a, b in self._runs if a <= start < b), start + wanted)
        stop = min(stop, start + READ_BYTES, self.size)
        if stop <= start:
            raise OSError(errno.EIO, f"it ends at byte {self.size}", self._where)
        import obstore

        self._block = (0, memoryview(b""))  # free the block before the next one is fetched
        with self._store._errors(self._key):
            data = memoryview(
                obstore.get_range(self._store.client, self._key, start=start, end=stop)
            )
        if len(data) != stop - start:
            raise OSError(errno.EIO, f"it ends at byte {start + len(data)}", self._where)
        self._block = (start, data)
        return data

    def _open(self) -> tuple[int, memoryview]:
        """The object's length and last bytes, in one request where the server can."""
        import obstore
        from obstore.exceptions import GenericError, NotSupportedError

        client = self._store.client
        with self._store._errors(self._key):
            try:
                found = obstore.get(client, self._key, options={"range": {"suffix": TAIL_BYTES}})
                return found.meta["size"], memoryview(found.bytes())
            except (GenericError, NotSupportedError) as error:
                # Azure has no suffix ranges, and no server has a range of an empty object.
                if not (isinstance(error, NotSupportedError) or _NO_RANGE.search(str(error))):
                    raise
            return obstore.head(client, self._key)["size"], memoryview(b"")

    @property
    def _where(self) -> str:
        return self._store.where(self._key)


def _blocks(parts: Iterable[memoryview | bytes]) -> Iterator[bytearray]:
    """Copy ``parts``, each valid only until the next is requested, into blocks that stay valid."""
    block = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            taken = view[: PART_BYTES - len(block)]
            block += taken
            view = view[len(taken) :]
            if len(block) == PART_BYTES:
                yield block
                block = bytearray()
    if block:
        yield block


_STATUS = re.compile(r"status code: (\d{3}) ?([^:]*):")
_NO_RANGE = re.compile(r"status code: 416|NotPartial|[Ss]uffix")
_KINDS = {
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.EEXIST,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "InvalidPathError": errno.EINVAL,
    "NotSupportedError": errno.ENOTSUP,
}


def _raise(error: Exception, where: str) -> NoReturn:
    """Raise an OSError of one line for an error of obstore, whose text has many lines."""
    text = str(error)
    status = _STATUS.search(text)
    kind = _KINDS.get(type(error).__name__)
    if "NoSuchBucket" in text:
        kind, message = errno.ENOENT, "there is no such bucket"
    elif isinstance(error, FileNotFoundError):
        kind, message = errno.ENOENT, os.strerror(errno.ENOENT)
    elif status is not None:
        kind = kind or (errno.ENOSPC if status[1] == "507" else errno.EIO)
        message = f"the server answered {status[1]} {status[2]}".rstrip()
    elif kind is not None:
        message = os.strerror(kind)
    elif "TimedOut" in text or "timed out" in text:
        kind, message = errno.ETIMEDOUT, "the server did not answer in time"
    elif "ConnectionRefused" in text or "Connection refused" in text:
        kind, message = errno.ECONNREFUSED, "the server refuses connections"
    elif "error sending request" in text or "connection" in text:
        kind, message = errno.ECONNRESET, "the connection to the server was lost"
    else:
        kind, message = errno.EIO, _first_line(error)
    raise OSError(kind, message, where) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
