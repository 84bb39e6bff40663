"""A real S3 server in a process of its own, and a proxy before it that fails as networks do."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET = "bucket"


# The system chooses the port: what was free a moment ago may not be any more.
SERVE = """
import signal
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
signal.pause()
"""


class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            self._make_bucket()
        except BaseException:
            self.kill()
            raise

    def _make_bucket(self) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, "the server has ended"
        self.port = int(said)
        who = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, Signature=0"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{BUCKET}", method="PUT", headers={"Authorization": who}
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def uploads(self) -> bytes:
        """The uploads in parts that were neither ended nor aborted, as the server lists them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{BUCKET}?uploads") as answer:
            return answer.read()


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port that nobody listens on, and that nobody else is given meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def environment(port: int) -> dict[str, str]:
    """What a person would set to use it."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
    }


@contextlib.contextmanager
def use(port: int) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment(port))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


Fault = Callable[[str, str], int | str | None]
"""Of a method and a path: a status to answer in the server's place; "drop" to close the connection;
"lose" to let the server do it and close the connection without an answer; "twice" to let the server
do it twice and give the second answer; "slow" to wait before; "stale" to answer with what the first
such request was answered; or None."""
SLOW_SECONDS = 0.1


@contextlib.contextmanager
def proxy(port: int, fault: Fault) -> Iterator[int]:
    """Forward requests to ``port``; gives its own port."""

    first: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            verdict = fault(self.command, self.path)
            if isinstance(verdict, int):
                self.answer(verdict, [], b"")
                return
            if verdict == "drop":
                self.hang_up()
                return
            if verdict == "slow":
                time.sleep(SLOW_SECONDS)
            if verdict == "twice":
                self.ask(body)
            answer = self.ask(body)
            before = first.setdefault(f"{self.command} {self.path}", answer)
            if verdict == "lose":
                self.hang_up()
            else:
                self.answer(*(before if verdict == "stale" else answer))

        def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            try:
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                return answer.status, answer.getheaders(), answer.read()
            finally:
                connection.close()

        def hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response_only(status)
            own = {"transfer-encoding", "connection", "content-length"}
            kept = [(k, v) for k, v in headers if k.lower() not in own]
            length = {k.lower(): v for k, v in headers}.get("content-length", "0")
            for key, value in kept:
                self.send_header(key, value)
            size = length if self.command == "HEAD" else str(len(data))
            self.send_header("content-length", size)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that went away is no news."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
