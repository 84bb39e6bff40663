"""Another node's memory as a store: a small server in its keeper, and the client.

Only who knows the run's key is served, over connections of multiprocessing (bytes and an HMAC
handshake; nothing is unpickled).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.store.local import LocalStore
from ckpt.store.protocol import Bytes, Reader

_SCHEME = "peer://"
_TIMEOUT_SECONDS = 30.0
_PART_BYTES = 4 << 20
# What a lost connection raises, from below or from multiprocessing.
_LOST = (EOFError, OSError, AuthenticationError)


def address_towards(host: str) -> str:
    """This machine's address as another one sees it, by which it would reach ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # A machine's own name is often that of its loopback: others come by its default route.
        for other in (host, "192.0.2.1"):
            with contextlib.suppress(OSError):
                probe.connect((other, 1))  # sends nothing
                found = str(probe.getsockname()[0])
                if not found.startswith("127."):
                    return found
        return "127.0.0.1"


class PeerServer:
    """Serves the stores in a folder to other nodes until it is closed, at ``port``, or where that
    is 0 or taken at any that is free."""

    def __init__(self, folder: Path, key: str, port: int = 0) -> None:
        self.folder = folder
        self._key, self._closed = key.encode(), False
        try:
            self._listener = socket.create_server(("0.0.0.0", port), backlog=64)
        except OSError:
            if not port:
                raise
            self._listener = socket.create_server(("0.0.0.0", 0), backlog=64)
        threading.Thread(target=self._accept, name="peer server", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens, on all of the machine's addresses."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Accept nobody any more."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(*_LOST):  # of a stranger, or of the end
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        _limit(accepted, _TIMEOUT_SECONDS)
        with contextlib.suppress(*_LOST), Connection(accepted.detach()) as connection:
            # Here, so that who connects and says nothing keeps nobody else.
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                _limit(same, 0.0)  # a client may be silent between two saves
            while True:
                request = json.loads(connection.recv_bytes())
                try:
                    answer, data = self._answer(connection, request)
                except OSError as error:
                    number = error.errno or errno.EIO
                    _send(connection, {"errno": number, "strerror": error.strerror or str(error)})
                    if request["op"] == "write":
                        return
                    continue
                _send(connection, answer)
                if data is not None:
                    connection.send_bytes(data)

    def _answer(
        self, connection: Connection[Any, Any], request: dict[str, Any]
    ) -> tuple[dict[str, Any], bytes | None]:
        op, key = request["op"], request["key"]
        parts = key.split("/")
        if ".." in parts or "" in parts[:1]:
            raise PermissionError(errno.EPERM, f"no key of a store: {key}")
        store = LocalStore(self.folder)
        if op == "write":
            parts = iter(connection.recv_bytes, b"")
            try:
                store.write(key, parts)
            except OSError:
                # An answer is lost where the connection ends with something unread.
                for _ in parts:
                    pass
                raise
        elif op == "publish":
            store.publish(key, connection.recv_bytes())
        elif op == "size":
            return {"size": (self.folder / key).stat().st_size}, None
        elif op == "read":
            with store.open(key) as reader:
                count = reader.size if request["count"] < 0 else request["count"]
                if request["start"] + count > reader.size:
                    raise OSError(errno.EIO, f"it ends at byte {reader.size}")
                data = np.empty(count, np.uint8)
                reader.read_into(request["start"], [data])
            return {}, data.tobytes()
        elif op == "names":
            return {"names": store.names(key)}, None
        elif op == "listing":
            return {"listing": store.listing(key)}, None
        elif op == "remove":
            store.remove(key)
        elif op == "remove_all":
            store.remove_all(key)
        else:
            raise OSError(errno.ENOSYS, f"no such operation: {op}")
        return {}, None


def _limit(connected: socket.socket, seconds: float) -> None:
    """How long a read or a write may wait for the other end; 0 for ever."""
    value = struct.pack("@ll", int(seconds), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, value)


def _send(connection: Connection[Any, Any], message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


class PeerStore:
    """A store in another node's memory, at ``peer://KEY@HOST:PORT/NAME``."""

    links = False

    def __init__(self, location: str) -> None:
        key, _, rest = location.removeprefix(_SCHEME).partition("@")
        place, _, self._prefix = rest.partition("/")
        host, _, port = place.rpartition(":")
        self._address, self._key = (host, int(port)), key.encode()
        self._mine = threading.local()

    def where(self, key: str = "") -> str:
        """Without the key of the run."""
        return f"{_SCHEME}{self._address[0]}:{self._address[1]}/{self._prefix}/{key}".rstrip("/")

    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        """As in Store."""
        with self._asking("write", key) as connection:
            try:
                for part in parts:
                    view = memoryview(part).cast("B")
                    for start in range(0, len(view), _PART_BYTES):
                        connection.send_bytes(view[start : start + _PART_BYTES])
                connection.send_bytes(b"")
            except BrokenPipeError:
                pass  # it says why before it hangs up
            self._receive(connection, key)

    def settle(self, keys: Iterable[str]) -> None:
        """Nothing: memory has nothing safer."""

    def publish(self, key: str, data: bytes) -> None:
        """As in Store."""
        with self._asking("publish", key) as connection:
            connection.send_bytes(data)
            self._receive(connection, key)

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        """As in Store."""
        with self._asking("size", key) as connection:
            size = self._receive(connection, key)["size"]
        yield _PeerReader(self, key, size)

    def read(self, key: str) -> bytes:
        """As in Store."""
        return self.read_range(key, 0, -1)

    def read_range(self, key: str, start: int, count: int) -> bytes:
        """``count`` bytes of an object; all that follow where it is negative."""
        with self._asking("read", key, start=start, count=count) as connection:
            self._receive(connection, key)
            return connection.recv_bytes()

    def names(self, folder: str) -> list[str]:
        """As in Store."""
        with self._asking("names", folder) as connection:
            return list(self._receive(connection, folder)["names"])

    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        """As in Store."""
        with self._asking("listing", folder) as connection:
            found = self._receive(connection, folder)["listing"]
        return {key: (size, modified) for key, (size, modified) in found.items()}

    def link(self, old: str, new: str) -> bool:
        """As in Store: it cannot."""
        return False

    def remove(self, key: str) -> None:
        """As in Store."""
        with self._asking("remove", key) as connection:
            self._receive(connection, key)

    def remove_all(self, folder: str) -> None:
        """As in Store."""
        with self._asking("remove_all", folder) as connection:
            self._receive(connection, folder)

    def free_bytes(self) -> int | None:
        """Not known."""
        return None

    @contextlib.contextmanager
    def _asking(self, op: str, key: str, **more: int) -> Iterator[Connection[Any, Any]]:
        """This thread's connection, with a request on its way; it is dropped where that fails."""
        full = f"{self._prefix}/{key}".rstrip("/")
        try:
            connection = getattr(self._mine, "connection", None)
            if connection is None:
                connection = self._mine.connection = self._connect()
            _send(connection, {"op": op, "key": full, **more})
            yield connection
        except (EOFError, AuthenticationError, ConnectionError) as error:
            self._drop()
            reason = "the connection is lost" if isinstance(error, EOFError) else str(error)
            raise OSError(errno.EIO, reason, self.where(key)) from None
        except OSError:
            if op == "write":
                self._drop()
            raise

    def _connect(self) -> Connection[Any, Any]:
        made = socket.create_connection(self._address, _TIMEOUT_SECONDS)
        made.settimeout(None)
        # A peer that is gone without a word is an error, not a wait without end.
        _limit(made, _TIMEOUT_SECONDS)
        milliseconds = int(1000 * _TIMEOUT_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection: Connection[Any, Any] = Connection(made.detach())
        try:
            answer_challenge(connection, self._key)
            deliver_challenge(connection, self._key)
        except BaseException:
            connection.close()
            raise
        return connection

    def _drop(self) -> None:
        connection = getattr(self._mine, "connection", None)
        self._mine.connection = None
        if connection is not None:
            connection.close()

    def _receive(self, connection: Connection[Any, Any], key: str) -> dict[str, Any]:
        if not connection.poll(_TIMEOUT_SECONDS):
            self._drop()
            raise TimeoutError(errno.ETIMEDOUT, "no answer", self.where(key))
        answer: dict[str, Any] = json.loads(connection.recv_bytes())
        if "errno" in answer:
            raise OSError(answer["errno"], answer["strerror"], self.where(key))
        return answer


class _PeerReader:
    def __init__(self, store: PeerStore, key: str, size: int) -> None:
        self._store, self._key, self.size = store, key, size

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        count = sum(part.nbytes for part in parts)
        data = np.frombuffer(self._store.read_range(self._key, start, count), np.uint8)
        for part in parts:
            part[:] = data[: part.nbytes]
            data = data[part.nbytes :]

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        pass
