"""A real etcd on this machine, for tests: Debian's package etcd-server, or any other etcd 3.4 or
3.5, which serve the API v2 that torchrun's rendezvous speaks."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator

import pytest

_STARTS = 5


def need_etcd() -> None:
    """Skip the test where there is no etcd, or no client of it."""
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd here: apt-get install etcd-server")
    if importlib.util.find_spec("etcd") is None:
        pytest.skip("there is no client of etcd here: pip install -e '.[etcd]'")


@contextlib.contextmanager
def etcd() -> Iterator[str]:
    """The endpoint of an etcd of its own, which ends with the context."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_STARTS):
            client, peer = _free_ports(2)
            urls = [f"http://127.0.0.1:{port}" for port in (client, peer)]
            process = subprocess.Popen(
                [
                    "etcd", "--enable-v2", "--data-dir", f"{folder}/{number}",
                    "--listen-client-urls", urls[0], "--advertise-client-urls", urls[0],
                    "--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1],
                    "--initial-cluster", f"default={urls[1]}",
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                if _answers(process, urls[0]):
                    yield f"127.0.0.1:{client}"
                    return
            finally:
                process.kill()
                process.wait()
    raise AssertionError(f"etcd did not start {_STARTS} times")


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: another process may take them first."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until etcd answers; False where it has ended, as for a port that is taken."""
    until = time.monotonic() + 60
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
        assert time.monotonic() < until, "etcd does not answer"
        time.sleep(0.1)
    return False
