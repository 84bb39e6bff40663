"""Where metrics are served, and the file by which Prometheus finds the place."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from pretrain.errors import InputError

_SERVER = Path(__file__).with_name("metrics_server.py")
_LAST_PORT = 65535
_ANY_ADDRESS = ("", "0.0.0.0", "::")


class Endpoint:
    """Serves the metrics of a registry over HTTP, from a process of its own, and nothing else.

    ``port`` 0 takes a free one. The process asks this one for the metrics at most once a second,
    so that scrapes, however many, do not slow training: a scrape that prometheus_client's server
    answered in this process took 0.27 ms of it, with the text at hand, and 1,000 a second a quarter
    of a core. It ends with this process, also when this process is killed, and answers for it when
    this process hangs.

    Raises InputError where the port is taken.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            if port > _LAST_PORT:
                raise OSError(0, "there is no such port")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            # socket.create_server puts the address into the text of an error of the system.
            why = "the host has no address" if error.errno else error.strerror
            if error.errno is not None and error.errno > 0:
                why = os.strerror(error.errno)
            raise InputError(
                f"metrics.host and metrics.port ({host}:{port}) cannot be listened on: "
                f"{why}; 0 takes a free port, -1 none"
            ) from None
        with listening:
            port = listening.getsockname()[1]
            self._process = subprocess.Popen(
                [sys.executable, str(_SERVER), str(listening.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
        self._registry = registry
        self._thread = threading.Thread(target=self._answer, daemon=True, name="metrics")
        self._thread.start()
        name = socket.gethostname() if host in _ANY_ADDRESS else host
        self.address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        """HOST:PORT, by which others find the server."""
        self.url = f"http://{self.address}/metrics"
        self._target: Path | None = None

    def announce(self, folder: Path, run: str, *, rank: int, run_dir: Path) -> None:
        """Write ``FOLDER/RUN-rank-N.json``, a target for Prometheus' ``file_sd_configs``.

        The labels are ``run`` and ``process_rank``: metrics of the whole run have the label
        ``rank`` for the rank that they are about. The label ``instance`` is the machine with the
        run's folder. By default it is the address, and each start on a port of its own would begin
        series of its own.
        """
        target = folder / f"{run}-rank-{rank}.json"
        labels = {
            "run": run,
            "process_rank": str(rank),
            "instance": f"{socket.gethostname()}:{run_dir.resolve()}",
        }
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
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what the process has not read
                pipe and pipe.close()

    def _answer(self) -> None:
        """Give the process the metrics whenever it asks, until it has ended."""
        asked, answer = self._process.stdout, self._process.stdin
        assert asked is not None
        assert answer is not None
        with contextlib.suppress(OSError):
            while asked.read(1):
                text = generate_latest(self._registry)
                answer.write(len(text).to_bytes(8, "big") + text)
                answer.flush()


def local_port(port: int) -> int:
    """The port of this rank where all ranks of a machine serve metrics: the ports follow each
    other from ``port`` on; 0 and -1 are the same for all."""
    return port + int(os.environ.get("LOCAL_RANK", "0")) if port > 0 else port
