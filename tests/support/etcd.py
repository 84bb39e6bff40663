"""A real etcd on this machine, for tests: Debian's package etcd-server, or any other etcd 3.4 or
3.5, which serve the API v2 that torchrun's rendezvous speaks."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_STARTS = 5


def need_etcd() -> None:
    """Skip the test where there is no etcd, or no client of it."""
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd here: apt-get install etcd-server")
    if importlib.util.find_spec("etcd") is None:
        pytest.skip("there is no client of etcd here: pip install -e '.[etcd]'")


class Etcd:
    """An etcd on two ports, with its data in ``folder``."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder, self.endpoint = folder, f"127.0.0.1:{ports[0]}"
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.start()

    def start(self) -> None:
        """Start it, on the data that it has."""
        client, peer = self.urls
        self.process = subprocess.Popen(
            [
                "etcd", "--enable-v2", "--data-dir", str(self.folder),
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"default={peer}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def answers(self) -> bool:
        """Wait until etcd answers; False where it has ended, as for a port that is taken."""
        until = time.monotonic() + 60
        while self.process.poll() is None:
            url = f"{self.urls[0]}/health"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
                return True
            assert time.monotonic() < until, "etcd does not answer"
            time.sleep(0.1)
        return False

    def kill(self) -> None:
        """SIGKILL; connections to it are refused then."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP; connections to it are taken then, and nobody answers."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def etcd() -> Iterator[Etcd]:
    """An etcd of its own, which ends with the context."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_STARTS):
            server = Etcd(Path(folder) / str(number), _free_ports(2))
            try:
                if server.answers():
                    yield server
                    return
            finally:
                server.kill()
    raise AssertionError(f"etcd did not start {_STARTS} times")


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: another process may take them first."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
