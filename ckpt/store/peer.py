"""Another node's memory as a store: a small server in its writer process, and the client.

Messages are bytes over connections of :mod:`multiprocessing`; nothing is unpickled. Client and
server each prove by an HMAC that they know the run's key, before the first request.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from ckpt.store.local import LocalStore
from ckpt.store.protocol import Bytes, Reader, Store

_SCHEME = "peer://"
_TIMEOUT_SECONDS = 30.0
_PART_BYTES = 4 << 20
_NONCE_BYTES = 32
_PLAIN = ("names", "listing", "remove", "remove_all")
"""Operations of a key alone, whose results are JSON."""
# What a lost connection raises, in the system or in multiprocessing.
_LOST = (EOFError, OSError, AuthenticationError)


def address_towards(host: str) -> str:
    """The address of this machine on the network by which it reaches ``host``.

    A loopback address where ``host`` is this machine under a name that resolves to the loopback, as
    a machine's own name often does, and where nothing leads to ``host``.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect((host, 1))  # sends nothing
            return str(probe.getsockname()[0])
        return "127.0.0.1"


class PeerServer:
    """Serves the stores in a folder to other nodes until it is closed.

    Args:
        folder: the folder; each folder in it is a store.
        key: the secret that a client must know.
        port: the port to listen at; a free one where it is 0 or taken.
    """

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
        """The port that it listens at, on all addresses of the machine."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Accept no further connections."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(*_LOST):  # a client without the key, or the end
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        _limit(accepted, _TIMEOUT_SECONDS)
        with contextlib.suppress(*_LOST), Connection(accepted.detach()) as connection:
            # In the thread of this connection: a silent client delays no other.
            _challenge(connection, self._key, b"client")
            _answer_challenge(connection, self._key, b"server")
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
                # Closing a connection with unread bytes would lose the answer.
                for _ in parts:
                    pass
                raise
        elif op == "publish":
            store.publish(key, connection.recv_bytes())
        elif op == "size":
            with store.open(key) as reader:
                return {"size": reader.size}, None
        elif op == "read":
            with store.open(key) as reader:
                count = reader.size if request["count"] < 0 else request["count"]
                if request["start"] + count > reader.size:
                    raise OSError(errno.EIO, f"it ends at byte {reader.size}")
                data = np.empty(count, np.uint8)
                reader.read_into(request["start"], [data])
            return {}, data.tobytes()
        elif op in _PLAIN:
            return {"result": getattr(store, op)(key)}, None
        else:
            raise OSError(errno.ENOSYS, f"no such operation: {op}")
        return {}, None


def _challenge(connection: Connection[Any, Any], key: bytes, role: bytes) -> None:
    """Raises AuthenticationError where the other end, in its ``role``, does not know ``key``."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send_bytes(nonce)
    if not hmac.compare_digest(connection.recv_bytes(_NONCE_BYTES), _proof(key, role, nonce)):
        raise AuthenticationError("the other end does not know the key")


def _answer_challenge(connection: Connection[Any, Any], key: bytes, role: bytes) -> None:
    connection.send_bytes(_proof(key, role, connection.recv_bytes(_NONCE_BYTES)))


def _proof(key: bytes, role: bytes, nonce: bytes) -> bytes:
    # With the role in it, a proof cannot be sent back to the end that made it.
    return hmac.digest(key, role + nonce, "sha256")


def _limit(connected: socket.socket, seconds: float) -> None:
    """Limit the seconds that a read or a write waits for the other end; 0 for no limit."""
    value = struct.pack("@ll", int(seconds), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, value)


def _send(connection: Connection[Any, Any], message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


class PeerStore(Store):
    """A store in another node's memory, at ``peer://KEY@HOST:PORT/NAME``; memory is never
    durable."""

    links = False

    def __init__(self, location: str) -> None:
        key, _, rest = location.removeprefix(_SCHEME).partition("@")
        address, _, self._prefix = rest.partition("/")
        host, _, port = address.rpartition(":")
        self._address, self._key = (host, int(port)), key.encode()
        self._mine = threading.local()

    @override
    def where(self, key: str = "") -> str:
        # Without the secret key.
        return f"{_SCHEME}{self._address[0]}:{self._address[1]}/{self._prefix}/{key}".rstrip("/")

    @override
    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        with self._asking("write", key) as connection:
            try:
                for block in parts:
                    view = memoryview(block).cast("B")
                    for start in range(0, len(view), _PART_BYTES):
                        connection.send_bytes(view[start : start + _PART_BYTES])
                connection.send_bytes(b"")
            except BrokenPipeError:
                pass  # the server sends the reason before it closes the connection
            self._receive(connection, key)

    @override
    def publish(self, key: str, data: bytes) -> None:
        with self._asking("publish", key) as connection:
            connection.send_bytes(data)
            self._receive(connection, key)

    @override
    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        with self._asking("size", key) as connection:
            size = self._receive(connection, key)["size"]
        yield _PeerReader(self, key, size)

    @override
    def read(self, key: str) -> bytes:
        return self.read_range(key, 0, -1)

    def read_range(self, key: str, start: int, count: int) -> bytes:
        """``count`` bytes of an object from ``start`` on; all where ``count`` is negative."""
        with self._asking("read", key, start=start, count=count) as connection:
            self._receive(connection, key)
            return connection.recv_bytes()

    @override
    def names(self, folder: str) -> list[str]:
        return list(self._plain("names", folder))

    @override
    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        listing = self._plain("listing", folder)
        return {key: (size, modified) for key, (size, modified) in listing.items()}

    @override
    def remove(self, key: str) -> None:
        self._plain("remove", key)

    @override
    def remove_all(self, folder: str) -> None:
        self._plain("remove_all", folder)

    def _plain(self, op: str, key: str) -> Any:
        """The result of one of the operations ``_PLAIN``."""
        with self._asking(op, key) as connection:
            answer = self._receive(connection, key)
        return answer["result"]

    @contextlib.contextmanager
    def _asking(self, op: str, key: str, **more: int) -> Iterator[Connection[Any, Any]]:
        """This thread's connection, with a request sent; closed where that fails."""
        full = f"{self._prefix}/{key}".rstrip("/")
        try:
            connection = getattr(self._mine, "connection", None)
            if connection is None:
                connection = self._mine.connection = self._connect()
            _send(connection, {"op": op, "key": full, **more})
            yield connection
        except (EOFError, AuthenticationError, ConnectionError) as error:
            self._drop()
            # A server that closes a connection with unread bytes, as that of a client without the
            # key, resets the connection.
            lost = isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)
            reason = "the connection is lost" if lost else str(error)
            raise OSError(errno.EIO, reason, self.where(key)) from None
        except OSError:
            if op == "write":
                self._drop()
            raise

    def _connect(self) -> Connection[Any, Any]:
        made = socket.create_connection(self._address, _TIMEOUT_SECONDS)
        made.settimeout(None)
        # A peer that vanishes must be an error, not an endless wait.
        _limit(made, _TIMEOUT_SECONDS)
        milliseconds = int(1000 * _TIMEOUT_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection: Connection[Any, Any] = Connection(made.detach())
        try:
            _answer_challenge(connection, self._key, b"client")
            _challenge(connection, self._key, b"server")
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


class _PeerReader(Reader):
    def __init__(self, store: PeerStore, key: str, size: int) -> None:
        self._store, self._key, self.size = store, key, size

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        count = sum(buffer.nbytes for buffer in parts)
        data = np.frombuffer(self._store.read_range(self._key, start, count), np.uint8)
        for buffer in parts:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]
