"""Where metrics are served, and the file by which Prometheus finds the place."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from pretrain.errors import InputError

_ANY_ADDRESS = ("", "0.0.0.0", "::")


class Endpoint:
    """An HTTP server for a registry, which serves nothing else. ``port`` 0 takes a free one.

    Raises InputError where the port is taken.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, socket.gaierror, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "there is no such port"
            raise InputError(
                f"metrics.host and metrics.port ({host}:{port}) cannot be listened on: "
                f"{why}; 0 takes a free port, -1 none"
            ) from None
        name = socket.gethostname() if host in _ANY_ADDRESS else host
        self.address = f"{name}:{self._server.server_port}"
        """HOST:PORT, by which others find the server."""
        self.url = f"http://{self.address}/metrics"
        self._target: Path | None = None

    def announce(self, folder: Path, run: str, rank: int) -> None:
        """Write ``FOLDER/RUN-rank-N.json``, a target for Prometheus' ``file_sd_configs``.

        The labels are ``run`` and ``process_rank``: metrics of the whole run have the label
        ``rank`` for the rank that they are about.
        """
        target = folder / f"{run}-rank-{rank}.json"
        labels = {"run": run, "process_rank": str(rank)}
        draft = target.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # training is worth more than its metrics
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps([{"targets": [self.address], "labels": labels}]) + "\n")
            draft.replace(target)
            self._target = target

    def close(self) -> None:
        """Stop serving."""
        if self._target is not None:
            with contextlib.suppress(OSError):
                self._target.unlink()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def local_port(port: int) -> int:
    """The port of this rank where all ranks of a machine serve metrics: the ports follow each
    other from ``port`` on; 0 and -1 are the same for all."""
    return port + int(os.environ.get("LOCAL_RANK", "0")) if port > 0 else port
