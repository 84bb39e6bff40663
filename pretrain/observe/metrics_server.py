"""The HTTP server of metrics, a program of its own: ``python metrics_server.py FD``.

FD is a socket that listens. A rank's process starts the program, so that requests, however many,
do not take Python's lock from training. The program asks for a text with a byte on standard output,
at most once a second, and gets the text on standard input behind its length in 8 bytes. When
standard input ends, the rank is gone, and so is the program. It imports nothing of the package.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OLD_SECONDS = 1.0
_WAIT_SECONDS = 2.0


class Latest:
    """The newest text of the rank."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._text, self._number, self._time = b"", 0, 0.0
        self._asked = False

    def put(self, text: bytes) -> None:
        """Take the rank's answer."""
        with self._changed:
            self._text, self._time = text, time.monotonic()
            self._number, self._asked = self._number + 1, False
            self._changed.notify_all()

    def get(self) -> bytes:
        """A text that is not old; where the rank does not answer, as when it hangs, the last."""
        with self._changed:
            if time.monotonic() - self._time > OLD_SECONDS:
                number = self._number
                if not self._asked:
                    self._asked = True
                    os.write(1, b"?")
                self._changed.wait_for(lambda: self._number != number, _WAIT_SECONDS)
            return self._text


def serve(listening: socket.socket) -> None:
    """Answer requests until standard input ends."""
    latest = Latest()

    class Handler(BaseHTTPRequestHandler):
        """Answers /metrics and nothing else."""

        timeout = 10

        def do_GET(self) -> None:
            """Send the metrics."""
            found = self.path.partition("?")[0] in ("/", "/metrics")
            text = latest.get() if found else b"the metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            """Say nothing: the terminal is the run's."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that goes away is no error."""

    def take() -> None:
        while len(head := sys.stdin.buffer.read(8)) == 8:
            latest.put(sys.stdin.buffer.read(int.from_bytes(head, "big")))
        os._exit(0)

    threading.Thread(target=take, daemon=True).start()
    server = Server(listening.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.serve_forever()


if __name__ == "__main__":
    # The rank decides when to end: Ctrl-C in a terminal reaches all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))
