"""Checkpoints in object stores, through obstore: S3 and what speaks it, Google's, Azure's.

An object appears whole under its key or not at all, and is durable then, so there is nothing to
settle. obstore repeats requests that servers failed (5xx, lost connections) with exponential
backoff and jitter; ``ckpt.retrying`` repeats what that gave up on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client


SCHEMES = ("s3", "gs", "az")
PART_BYTES = 8 << 20
"""Of an upload in parts; what is smaller is uploaded in one request."""
UPLOADS = 3
"""Parts of one object on their way at a time."""
READ_BYTES = 8 << 20
"""The most that is fetched, and held, at a time of an object that is read."""
TAIL_BYTES = 64 << 10
"""Of an object, fetched as it is opened: its index, or all of it."""
_SMALL = 4096
_GAP = 64 << 10  # bytes that nobody wants cost less than a request
_RETRIES: Any = {
    "max_retries": 6,
    "backoff": {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=5),
        "base": 2,
    },
    "retry_timeout": timedelta(seconds=60),
}


def open_location(location: str) -> ObjectStore:
    """The store at ``s3://bucket/prefix``, ``gs://`` or ``az://``; options are taken from the
    environment, as obstore names them (AWS_ENDPOINT_URL, AWS_ALLOW_HTTP, ...).

    Raises ValueError, in one line, where the location is none or obstore is not installed.
    """
    scheme, _, rest = location.partition("://")
    if scheme not in SCHEMES or not rest.strip("/"):
        wanted = ", ".join(f"{scheme}://BUCKET/PREFIX" for scheme in SCHEMES)
        raise ValueError(f"checkpoint location {location} must be a folder, or one of {wanted}")
    names = ("AWS_", "GOOGLE_", "AZURE_")
    options = tuple(sorted(item for item in os.environ.items() if item[0].startswith(names)))
    return ObjectStore(location.rstrip("/"), _client(location.rstrip("/"), options, os.getpid()))


@lru_cache(maxsize=16)  # it holds the connections
def _client(location: str, options: tuple[tuple[str, str], ...], process: int) -> Client:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ValueError(
            f"checkpoint location {location} needs obstore: pip install 'convoy-moe[s3]'"
        ) from None
    config: Any = {}
    if location.startswith("s3:") and "AWS_COPY_IF_NOT_EXISTS" not in dict(options):
        config = {"copy_if_not_exists": "multipart"}
    try:
        return from_url(location, config=config, retry_config=_RETRIES)
    except (BaseError, ValueError) as error:
        raise ValueError(f"checkpoint location {location}: {_first_line(error)}") from None


class ObjectStore:
    """Objects under a bucket's prefix; ``client`` is one of ``obstore.store``."""

    links = False
    """A copy that the server makes is a copy, and reading is far."""

    def __init__(self, location: str, client: Client) -> None:
        self.location, self.client = location, client

    def where(self, key: str = "") -> str:
        """Its URL."""
        return f"{self.location}/{key}" if key else self.location

    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        """As in Store. What is larger than PART_BYTES is uploaded in parts as they come, of which
        ``UPLOADS + 2`` are in memory; whether the key is free is asked before, then: such an object
        must have one writer, as those of a save have. Smaller ones may be contended."""
        blocks = _blocks(parts)
        first, second = next(blocks, b""), next(blocks, None)
        if second is None:
            self.publish(key, first)
            return
        import obstore

        if self._holds(key):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.where(key))
        with self._told(key):
            whole = chain((first, second), blocks)
            obstore.put(self.client, key, whole, chunk_size=PART_BYTES, max_concurrency=UPLOADS)

    def settle(self, keys: Iterable[str]) -> None:
        """What is there is durable."""

    def publish(self, key: str, data: bytes | bytearray) -> None:
        """A conditional put. It is marked as ours: an answer may be lost, and a request that is
        repeated then finds the key taken by what it asked for."""
        import obstore

        mark = {"writer": secrets.token_hex(8)}
        try:
            with self._told(key):
                obstore.put(self.client, key, data, mode="create", attributes=mark)
        except FileExistsError:
            try:
                with self._told(key):
                    found = obstore.get(self.client, key, options={"head": True}).attributes
            except FileNotFoundError:
                # Of two at a time a store may refuse both, or it was removed since.
                message = "the server refused one of two writers at a time, and has neither's"
                raise OSError(errno.EAGAIN, message, self.where(key)) from None
            if found.get("writer") != mark["writer"]:
                raise

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[ObjectReader]:
        """As in Store."""
        yield ObjectReader(self, key)

    def read(self, key: str) -> bytes:
        """As in Store."""
        import obstore

        with self._told(key):
            return bytes(obstore.get(self.client, key).bytes())

    def names(self, folder: str) -> list[str]:
        """As in Store."""
        import obstore

        with self._told(folder):
            found = obstore.list_with_delimiter(self.client, folder)
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(path.rpartition("/")[2] for path in paths)

    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        """As in Store; one request for each thousand."""
        found = {}
        with self._told(folder):
            for each in self._all(folder):
                key = each["path"].removeprefix(f"{folder}/")
                found[key] = each["size"], each["last_modified"].timestamp()
        return found

    def link(self, old: str, new: str) -> bool:
        """A copy that the server makes; False where it has no conditional ones."""
        import obstore

        try:
            with self._told(new):
                obstore.copy(self.client, old, new, overwrite=False)
        except FileExistsError:
            raise
        except OSError:
            return False
        return True

    def remove(self, key: str) -> None:
        """As in Store."""
        self._remove([key])

    def remove_all(self, folder: str) -> None:
        """As in Store. What cannot be removed stays, for the next time."""
        with contextlib.suppress(OSError), self._told(folder):
            keys = [each["path"] for each in self._all(folder)]
            for start in range(0, len(keys), 1000):
                self._remove(keys[start : start + 1000])

    def free_bytes(self) -> int | None:
        """Nobody knows."""
        return None

    def _remove(self, keys: list[str]) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError), self._told(keys[0]):
            obstore.delete(self.client, keys)

    def _holds(self, key: str) -> bool:
        import obstore

        try:
            with self._told(key):
                obstore.head(self.client, key)
        except FileNotFoundError:
            return False
        return True

    def _all(self, folder: str) -> Iterator[Any]:
        import obstore

        return chain.from_iterable(obstore.list(self.client, folder, chunk_size=1000))

    @contextlib.contextmanager
    def _told(self, key: str) -> Iterator[None]:
        """obstore's errors as OSErrors, each in one line."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and error.filename is not None:
                raise  # told already
            _raise(error, self.where(key))


class ObjectReader:
    """One object, fetched in large pieces."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key = store, key
        self._runs: list[tuple[int, int]] = []
        self._small: dict[int, memoryview] = {}
        self.size, tail = self._open()
        self._tail = (self.size - len(tail), tail)
        self._block = (0, memoryview(b""))

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        """As in Reader: small ones are fetched at once, together; of the others it is known how far
        to read on."""
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
            with self._store._told(self._key):
                client = self._store.client
                found = obstore.get_ranges(
                    client, self._key, starts=starts, ends=stops, coalesce=_GAP
                )
            self._small = {at: memoryview(data) for at, data in zip(starts, found, strict=True)}

    def read_into(self, start: int, parts: Sequence[NDArray[np.uint8]]) -> None:
        """As in Reader."""
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
        """Some bytes from ``start`` on."""
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

        self._block = (0, memoryview(b""))  # let go of it before the next one comes
        with self._store._told(self._key):
            data = memoryview(
                obstore.get_range(self._store.client, self._key, start=start, end=stop)
            )
        if len(data) != stop - start:
            raise OSError(errno.EIO, f"it ends at byte {start + len(data)}", self._where)
        self._block = (start, data)
        return data

    def _open(self) -> tuple[int, memoryview]:
        """Length and last bytes, in one request where the store can, and has any bytes."""
        import obstore
        from obstore.exceptions import GenericError, NotSupportedError

        client = self._store.client
        with self._store._told(self._key):
            try:
                found = obstore.get(client, self._key, options={"range": {"suffix": TAIL_BYTES}})
                return found.meta["size"], memoryview(found.bytes())
            except (GenericError, NotSupportedError) as error:
                # Azure knows no such range, and no store one of an empty object.
                if not (isinstance(error, NotSupportedError) or _NO_RANGE.search(str(error))):
                    raise
            return obstore.head(client, self._key)["size"], memoryview(b"")

    @property
    def _where(self) -> str:
        return self._store.where(self._key)


def _blocks(parts: Iterable[memoryview | bytes]) -> Iterator[bytearray]:
    """``parts``, which may change as soon as the next one is asked for, as blocks that stay."""
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
    """The OSError for an error of obstore's, whose own text has many lines."""
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
        kind, message = errno.ECONNREFUSED, "the server takes no connections"
    elif "error sending request" in text or "connection" in text:
        kind, message = errno.ECONNRESET, "the connection to the server was lost"
    else:
        kind, message = errno.EIO, _first_line(error)
    raise OSError(kind, message, where) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
